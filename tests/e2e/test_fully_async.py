"""Asynchronous runs: at staleness 0 they are the colocated ones; ahead of training they keep bound and groups."""

import importlib.util
import json
from pathlib import Path

import pytest

from rlpost.trainer.ledger import Ledger
from tests.e2e.runs import Run, small

NUM_STEPS = 10
PARITY = "train_rollout_logprob_abs_diff/mean"
# readings of the clock, and what only one kind of source has
APART = ("timing_s/", "time_s", "throughput/", "weight_sync/", "async/", "groups/", "perf/")


def readings(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(APART)} for line in run.lines()]


def trained(run: Run, folder: Path) -> dict[int, list[str]]:
    """Ids of the groups that each step trained, in the order of the batch."""
    ids = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda p: int(p.stem)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ids[int(path.stem)] = list(dict.fromkeys(row["group"] for row in rows))
    return ids


def test_staleness_0_over_gloo_gives_the_losses_of_the_colocated_run(checkpoint, tmp_path):
    shared = (f"trainer.total_training_steps={NUM_STEPS}", "trainer.test_freq=5", "actor.ppo_mini_batch_size=2")
    apart = Run(tmp_path / "async", *small(checkpoint, "trainer=fully_async", "trainer.staleness_threshold=0", *shared))
    colocated = Run(tmp_path / "colocated", *small(checkpoint, *shared))
    apart.succeed()
    colocated.succeed()
    assert "weights travel by gloo" in (apart.folder / "rlpost.log").read_text()
    ours, theirs = readings(apart), readings(colocated)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(yours, rel=1e-6, abs=1e-9), f"step {mine['step']}"
    steps = apart.steps()
    assert len(steps) == NUM_STEPS and all(m["async/staleness/max"] == 0 for m in steps.values())
    assert len({m["actor/pg_loss"] for m in steps.values()}) == NUM_STEPS


def test_killed_ahead_of_training_and_resumed_trains_every_group_once(checkpoint, tmp_path):
    hold, rollouts = tmp_path / "hold", tmp_path / "rollouts"
    hold.touch()
    run = Run(
        tmp_path / "run",
        *small(
            checkpoint,
            "trainer=fully_async",
            "trainer.staleness_threshold=1.5",
            "trainer.trigger_parameter_sync_step=2",
            "trainer.total_training_steps=8",
            "trainer.save_freq=1",
            f"trainer.rollout_data_dir={rollouts}",
            "reward.terms.accuracy.fn=tests.e2e.rewards.parity_apart",
            f"+reward.terms.accuracy.kwargs.hold={hold}",
            "+reward.terms.accuracy.kwargs.hold_from=24",
        ),
    )
    run.wait_until(lambda: (tmp_path / "hold.reached").exists() and run.has_checkpoint(5))
    run.kill()
    assert run.left_behind() == [] and not run.has_checkpoint(8)
    hold.unlink()
    run.start()
    assert run.succeed()["steps"] == 8
    ids = trained(run, rollouts)
    assert list(ids) == list(range(1, 9)) and all(len(groups) == 4 for groups in ids.values())
    everything = [group for groups in ids.values() for group in groups]
    assert len(set(everything)) == len(everything) == 32
    ledger = Ledger.read(run.folder)
    assert ledger.problems() == [] and len(ledger.resumes) == 1 and ledger.steps == ids
    steps = run.steps()
    assert 0 < max(m["async/staleness/max"] for m in steps.values()) <= 4  # ceil(2.5 x 2) - 1
    assert any("async/tokens_lag_1" in m for m in steps.values())


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM")
def test_quickstart_reaches_the_demos_accuracy_asynchronously(tmp_path):
    run = Run(
        tmp_path, "experiment=quickstart", "trainer=fully_async", "tracking=console", "trainer.total_training_steps=30"
    )
    run.wait(600)
    summary = run.succeed()
    assert summary["accuracy_after"] >= 0.80 and summary["accuracy_after"] >= summary["accuracy_before"] + 0.35
    steps = run.steps()
    assert 1 <= max(m["async/staleness/max"] for m in steps.values()) <= 2
    parity = [m[PARITY] for m in steps.values() if PARITY in m]  # where the trainer's own version sampled a token
    assert len(parity) >= len(steps) // 10 and max(parity) <= 1e-4
