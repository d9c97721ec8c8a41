"""What all sources report of what was generated, and when broken rewards stop a run."""

import pytest

from rlpost.batch import Status
from rlpost.metrics import merge, scalars
from rlpost.trainer.source import RewardFailure, check_rewards, rollout_metrics
from tests.unit.trainer.rollouts import group, prompt


def failing(index):
    """A group of two whose answers could not be scored."""
    failed = group(prompt(index), [0.0, 0.0], Status.REWARD_ERROR)
    for trajectory in failed.trajectories:
        trajectory.error, trajectory.reward_parts = "out of order", {}
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
    check_rewards(groups, 0.5)
    with pytest.raises(RewardFailure, match="2 of 4 .*reward.max_error_rate=0.4; for example: out of order"):
        check_rewards(groups, 0.4)
