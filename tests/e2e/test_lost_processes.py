"""Whole runs whose processes are killed while they work: engines and workers come back, a trainer rank ends the run."""

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import Run, small
from tests.e2e.test_fully_async import trained

NUM_STEPS = 4
PARITY = "train_rollout_logprob_abs_diff/mean"


def processes(run: Run, kind: str) -> list[psutil.Process]:
    """Of the run, those whose command line has `kind` in it."""
    numbers = (int(process.partition(":")[0]) for process in run.processes() if kind in process)
    return [psutil.Process(number) for number in numbers]


def steps_done(run: Run) -> int:
    return len(run.steps()) if (run.folder / "metrics.jsonl").exists() else 0


def kill_at(run: Run, hold: Path, kind: str) -> None:
    """SIGKILL to the first process of `kind`, once the answers of a step are being scored."""
    run.wait_until(hold.with_suffix(".reached").exists, 240.0)
    processes(run, kind)[0].send_signal(signal.SIGKILL)


def held(hold: Path, at: int) -> list[str]:
    """Scores from prompt `at` on wait for the file `hold` to go."""
    hold.touch()
    return [f"+reward.terms.accuracy.kwargs.hold={hold}", f"+reward.terms.accuracy.kwargs.hold_from={at}"]


def log_of(run: Run) -> Callable[[str], bool]:
    return lambda text: text in (run.folder / "rlpost.log").read_text()


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM")
def test_run_goes_on_after_the_only_vllm_engine_is_killed(checkpoint, tmp_path):
    """Once its core, once the process around it, beside the training (`test_chaos.py` kills engines of colocated runs).

    Parity is checked in every step, also with the engines that follow.
    """
    rollouts = tmp_path / "rollouts"
    run = Run(
        tmp_path / "run",
        *small(
            checkpoint,
            "rollout=vllm",
            "trainer=fully_async",
            f"trainer.total_training_steps={2 * NUM_STEPS}",
            f"trainer.rollout_data_dir={rollouts}",
            "rollout.health_interval_s=0.5",
        ),
        *held(tmp_path / "hold", 8),
    )
    says = log_of(run)
    kill_at(run, tmp_path / "hold", "EngineCore")
    run.wait_until(lambda: says("rollout replica 0 is lost"))
    (tmp_path / "hold").unlink()
    run.wait_until(lambda: says("rollout replica 0 is back"))
    processes(run, "RolloutWorker")[0].send_signal(signal.SIGKILL)
    assert run.succeed()["steps"] == 2 * NUM_STEPS
    everything = [group for groups in trained(run, rollouts).values() for group in groups]
    assert len(set(everything)) == len(everything) == 8 * NUM_STEPS
    parity = [metrics[PARITY] for metrics in run.steps().values() if PARITY in metrics]
    assert len(parity) >= 2 and max(parity) <= 1e-4
    assert run.left_behind() == []


def test_run_ends_with_the_engines_own_error_when_it_dies_again_and_again(checkpoint, tmp_path):
    run = Run(
        tmp_path / "run",
        *small(checkpoint, "trainer.total_training_steps=500", "rollout.health_interval_s=0.2"),
        "rollout.max_restarts=1",
    )
    says = log_of(run)
    for _ in range(2):
        run.wait_until(lambda: steps_done(run) >= 1 and processes(run, "RolloutWorker"))
        processes(run, "RolloutWorker")[0].send_signal(signal.SIGKILL)
        run.wait_until(lambda: says("rollout replica 0 is back"))
    assert run.wait() == 1
    assert "ActorDiedError" in run.stderr and "RolloutWorker" in run.stderr
    assert run.left_behind() == []


def test_killed_trainer_rank_is_named_and_the_run_resumes(checkpoint, tmp_path):
    run = Run(
        tmp_path / "run",
        *small(checkpoint, "trainer.total_training_steps=60", "trainer.save_freq=2", "cluster.n_gpus_per_node=2"),
    )
    run.wait_until(lambda: run.has_checkpoint(2))
    victim = processes(run, "ModelWorker")[1]
    victim.send_signal(signal.SIGKILL)
    assert run.wait() == 1
    assert "RankDied: trainer rank" in run.stderr and "trainer.resume=auto" in run.stderr
    assert run.left_behind() == []
    last = max(step for step in range(60) if run.has_checkpoint(step))
    run.start()
    run.wait_until(lambda: run.has_checkpoint(last + 2))
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.left_behind() == []
