"""A run whose rewards fail now and then: it goes on without those answers, counts them, and says so. Where its time
went is written down."""

import json

import pytest

from rlpost.tools.timelines.lanes import accounted, find_lanes, find_window, read_spans
from tests.e2e.runs import Run, small


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    run = Run(
        folder,
        *small(
            checkpoint,
            "algo=grpo",
            "trainer.total_training_steps=2",
            "data.train_batch_size=5",
            "actor.ppo_mini_batch_size=5",
            "data.val_files=null",
            f"trainer.rollout_data_dir={folder / 'rollouts'}",
            "trainer.timeline=true",
            "reward.terms.accuracy.fn=tests.e2e.rewards.fails_at_times",
            "+reward.terms.accuracy.kwargs.pause_s=0.2",
        ),
    )
    assert run.succeed()["finished"] is True
    return run


def test_run_with_few_failing_rewards_masks_them_and_warns(run):
    for metrics in run.steps().values():
        assert metrics["reward/error_rate"] == 0.05 and metrics["reward/errors/exception"] == 1
        assert metrics["reward/mean"] * 19 == pytest.approx(round(metrics["reward/mean"] * 19))  # of those scored
    for path in (run.cwd / "rollouts").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 20 and [row["status"] for row in rows].count("reward_error") == 1
    said = run.stdout + run.stderr
    assert "1 of 20 answers could not be scored, above reward.max_error_rate=0.01 (exception: 1); for example" in said
    assert "fails_at_times): out of order" in said
    assert run.left_behind() == []


def test_timeline_accounts_for_the_steps_and_shows_every_process(run):
    spans = read_spans(run.folder)
    window = find_window(spans, 1, 2, 2)
    lanes = find_lanes(spans, window, most=0)
    assert accounted(lanes, window) >= 0.9
    (driver, rank, engine, workflow, reward) = (lane.seconds() for lane in lanes)
    assert [lane.name for lane in lanes] == ["driver", "rank", "engine", "workflow", "reward"]
    assert driver.keys() == {"generate", "infer", "train", "publish", "save"}
    assert rank.keys() == {"infer", "train", "publish", "save"}  # "save" is the last that it did
    assert engine.keys() == {"generate", "publish"} and workflow.keys() == {"generate"} and reward.keys() == {"reward"}
    for name in rank:  # the driver waits for the rank, and for more than that
        assert rank[name] < driver[name]
