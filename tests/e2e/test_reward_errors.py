"""A run whose rewards fail now and then: it goes on without those answers, counts them, and says so."""

import json

import pytest

from tests.e2e.runs import Run, small


def test_run_with_few_failing_rewards_masks_them_and_warns(checkpoint, tmp_path):
    run = Run(
        tmp_path,
        *small(
            checkpoint,
            "algo=grpo",
            "trainer.total_training_steps=2",
            "data.train_batch_size=5",
            "actor.ppo_mini_batch_size=5",
            "data.val_files=null",
            f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
            "reward.terms.accuracy.fn=tests.e2e.rewards.fails_at_times",
        ),
    )
    assert run.succeed()["finished"] is True
    for metrics in run.steps().values():
        assert metrics["reward/error_rate"] == 0.05 and metrics["reward/errors/exception"] == 1
        assert metrics["reward/mean"] * 19 == pytest.approx(round(metrics["reward/mean"] * 19))  # of those scored
    for path in (tmp_path / "rollouts").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 20 and [row["status"] for row in rows].count("reward_error") == 1
    said = run.stdout + run.stderr
    assert "1 of 20 answers could not be scored, above reward.max_error_rate=0.01 (exception: 1); for example" in said
    assert "fails_at_times): out of order" in said
    assert run.left_behind() == []
