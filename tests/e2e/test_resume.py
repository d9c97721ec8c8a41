"""A run that was killed and started again gives what the uninterrupted run gives."""

import importlib.util
import json
from pathlib import Path

import pytest

from rlpost.trainer.ledger import Ledger
from tests.e2e.runs import Run, small

NUM_STEPS, BATCH = 4, 4
# readings of the clock
UNSTEADY = ("timing_s/", "time_s", "throughput/tokens_per_s", "weight_sync/seconds_s", "weight_sync/gigabytes_per_s")


def overrides(checkpoint: Path, engine: str, hold: Path) -> list[str]:
    """PPO with everything that has a state: critic, optimizer, schedule, shuffles, KL controller, data cursor."""
    return small(
        checkpoint,
        f"rollout={engine}",
        "algo=ppo",
        "algo.filter_groups.enable=true",
        "algo.filter_groups.metric=accuracy",
        "algo.use_kl_in_reward=true",
        "algo.kl_ctrl.type=adaptive",
        "rollout.n=2",  # half of the groups agree and are dropped
        "actor.ppo_mini_batch_size=3",  # of 4: a last one of 1
        "actor.ppo_epochs=2",
        "actor.shuffle=true",
        "actor.optim.lr_scheduler_type=linear",
        "actor.optim.lr_warmup_steps=3",
        "critic.optim.lr_scheduler_type=cosine",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
        "reward.terms.accuracy.fn=tests.e2e.rewards.parity_apart",
        f"+reward.terms.accuracy.kwargs.hold={hold}",
        "+reward.terms.accuracy.kwargs.hold_from=20",
        train_size=15,  # several epochs: a step begins in one and ends in the next
    )


def readings(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(UNSTEADY)} for line in run.lines()]


@pytest.mark.parametrize(
    ("engine", "tolerance"),
    [
        ("hf", 0.0),
        pytest.param("vllm", 1e-6, marks=pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM")),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(engine, tolerance, checkpoint, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    killed = Run(tmp_path / "killed", *overrides(checkpoint, engine, hold))
    whole = Run(tmp_path / "whole", *overrides(checkpoint, engine, tmp_path / "no_hold"))  # beside the other
    killed.wait_until(lambda: (tmp_path / "hold.reached").exists())
    assert killed.has_checkpoint(1)
    killed.kill()
    assert killed.left_behind() == []
    assert not killed.has_checkpoint(NUM_STEPS)

    hold.unlink()
    killed.start()
    assert killed.succeed()["steps"] == whole.succeed()["steps"] == NUM_STEPS

    expected, resumed = readings(whole), readings(killed)
    assert [line["step"] for line in resumed] == [line["step"] for line in expected] == [0, 1, 2, 2, 3, 4, 4]
    for ours, theirs in zip(resumed, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance), f"step {ours['step']}"
    steps = whole.steps()
    assert sum(metrics.get("groups/dropped_all_0", 0) for metrics in steps.values()) > 0
    assert len({metrics["actor/lr"] for metrics in steps.values()}) == NUM_STEPS
    last = [run.folder / "checkpoints" / f"global_step_{NUM_STEPS}" for run in (killed, whole)]
    ours, theirs = (json.loads((folder / "manifest.json").read_text())["source"]["stream"] for folder in last)
    assert ours == theirs and ours["epoch"] >= 1 and ours["position"] > 0
    ledgers = [Ledger.read(run.folder) for run in (killed, whole)]
    assert [ledger.problems() for ledger in ledgers] == [[], []]
    assert ledgers[0].steps == ledgers[1].steps and ledgers[0].groups == ledgers[1].groups
    assert [record["step"] for record in ledgers[0].resumes] != [] and ledgers[1].resumes == []
    updates = [json.loads((folder / "actor" / "rank_0.json").read_text())["updates"] for folder in last]
    assert updates == [NUM_STEPS * 2 * 2] * 2  # epochs, mini-batches
