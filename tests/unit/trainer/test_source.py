"""What all sources report of what was generated, and when broken rewards stop a run."""

import pytest

from rlpost.metrics import merge, scalars
from rlpost.rewards.config import RewardConfig
from rlpost.trainer.source import RewardFailure, check_rewards, rollout_metrics, warn_of_errors
from rlpost.trajectory import Status
from tests.unit.trainer.rollouts import group, prompt


def failing(index):
    """A group of two whose answers could not be scored."""
    failed = group(prompt(index), [0.0, 0.0], Status.REWARD_ERROR)
    for trajectory in failed.trajectories:
        trajectory.error, trajectory.error_kind, trajectory.reward_parts = "out of order", "crash", {}
    return failed


def test_rollout_metrics_average_over_finished_answers_and_rewards_over_scored_ones():
    groups = [
        group(prompt(0), [1.0, 0.5], num_tokens=2),
        group(prompt(1), [0.0], Status.LENGTH, num_tokens=8),
        failing(2),  # 1 token each
        group(prompt(3), [9.0], Status.ABORT, num_tokens=99),  # partial: neither scored nor as long as it would be
    ]
    assert scalars(rollout_metrics(groups)) == {
        "reward/mean": 0.5,
        "reward/accuracy": 0.5,
        "reward/error_rate": 2 / 5,
        "reward/errors/crash": 2,
        "response_length/mean": (2 + 2 + 8 + 1 + 1) / 5,
        "response_length/max": 8,
        "response_length/truncated": 1 / 5,
        "prompt_length/mean": 2,
    }


def test_rollout_metrics_of_parts_merge_to_those_of_the_whole():
    groups = [group(prompt(0), [1.0, 0.0, 1.0]), group(prompt(1), [0.0], num_tokens=5), failing(2)]
    parts = merge([rollout_metrics(groups[:1]), rollout_metrics(groups[1:])])
    assert scalars(parts) == pytest.approx(scalars(rollout_metrics(groups)))


def test_rollout_metrics_without_a_score_report_no_reward():
    metrics = scalars(rollout_metrics([failing(0)]))
    assert metrics["reward/error_rate"] == 1.0 and not {"reward/mean", "reward/accuracy"} & set(metrics)


def test_few_failed_scores_are_tolerated():
    groups = [failing(0), group(prompt(1), [1.0, 0.0])]
    check_rewards(groups, RewardConfig(stop_error_rate=0.5))
    with pytest.raises(RewardFailure, match=r"2 of 4 .*reward.stop_error_rate=0.4 \(crash: 2\); for example: out of"):
        check_rewards(groups, RewardConfig(stop_error_rate=0.4))


def test_first_failed_score_stops_a_run_that_asks_for_it():
    check_rewards([group(prompt(1), [1.0, 0.0])], RewardConfig(on_error="stop"))
    with pytest.raises(RewardFailure, match=r"reward.on_error=stop: 1 of 203 answers .*\(crash: 1\); for example: out"):
        rare = failing(0)
        rare.trajectories.pop()
        check_rewards([rare, *[group(prompt(1), [1.0, 0.0]) for _ in range(101)]], RewardConfig(on_error="stop"))


def test_warning_above_the_error_rate_says_which_kinds_and_shows_one(caplog):
    groups = [failing(0), *[group(prompt(i), [1.0, 0.0]) for i in range(1, 100)]]
    groups[0].trajectories[1].error_kind = "timeout"
    warn_of_errors(groups, 0.01)  # 2 of 200: not above
    assert caplog.text == ""
    warn_of_errors(groups[:-1], 0.01)
    assert "2 of 198 answers could not be scored, above reward.max_error_rate=0.01" in caplog.text
    assert "(crash: 1, timeout: 1); for example: out of order" in caplog.text


def test_answers_left_out_with_their_group_are_counted_apart():
    dropped = failing(0)
    dropped.trajectories[1].error_kind = "group"
    metrics = scalars(rollout_metrics([dropped]))
    assert (metrics["reward/error_rate"], metrics["reward/errors/crash"], metrics["reward/errors/group"]) == (0.5, 1, 1)
    check_rewards([dropped], RewardConfig(stop_error_rate=0.5))
