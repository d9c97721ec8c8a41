"""Ctrl-C and SIGTERM: the step in progress is finished and saved; a second one ends the run at once, as does any before
training has begun."""

import importlib.util
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlpost.endings import INTERRUPTED, RESUMABLE
from rlpost.trainer.interrupts import AT_ONCE_S
from tests.e2e.runs import Run, small


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """Step 2 waits for this file to go."""
    (tmp_path / "hold").touch()
    return tmp_path / "hold"


def overrides(checkpoint: Path, hold: Path, *changes: str) -> list[str]:
    return small(
        checkpoint,
        *changes,
        "trainer.total_training_steps=50",
        f"+reward.terms.accuracy.kwargs.hold={hold}",
        "+reward.terms.accuracy.kwargs.hold_from=4",
    )


def reach_step_2(run: Run, hold: Path) -> None:
    run.wait_until(lambda: hold.with_suffix(".reached").exists())
    assert any("raylet" in process for process in run.processes())  # Ray's processes are told by their folder


def test_ctrl_c_finishes_the_step_and_keeps_a_checkpoint(checkpoint, hold, tmp_path):
    engine = "vllm" if importlib.util.find_spec("vllm") else "hf"  # the engine's processes get the signal as well
    run = Run(tmp_path / "a", *overrides(checkpoint, hold, f"rollout={engine}"))
    reach_step_2(run, hold)
    run.signal(signal.SIGINT)
    run.wait_until(lambda: "finishing this step" in run.stderr)
    hold.unlink()
    assert run.wait() == INTERRUPTED
    assert run.left_behind() == []
    assert list(run.steps()) == [1, 2] and run.has_checkpoint(2)
    assert '"finished": false' in run.stdout.splitlines()[-1]
    assert f"to go on    The same command with hydra.run.dir={run.folder}" in run.stderr
    assert "Traceback" not in run.stderr


def test_sigterm_ends_a_sweep_after_the_step(checkpoint, hold, tmp_path):
    sweep = ["seed=1,2", "trainer.grace_period_s=100", f"hydra.sweep.dir={tmp_path}/a", "hydra.sweep.subdir=run"]
    run = Run(tmp_path / "a", "-m", *overrides(checkpoint, hold), *sweep)
    reach_step_2(run, hold)
    run.process.send_signal(signal.SIGTERM)
    run.wait_until(lambda: "finishing this step" in run.stderr)
    hold.unlink()
    assert run.wait() == RESUMABLE
    assert run.left_behind() == []
    assert (
        run.has_checkpoint(2) and "seed: 1" in (run.folder / ".hydra" / "config.yaml").read_text()
    )  # of the first job
    assert "Traceback" not in run.stderr


def test_second_ctrl_c_ends_the_run_at_once(checkpoint, hold, tmp_path):
    run = Run(tmp_path / "a", *overrides(checkpoint, hold), "trainer.save_freq=1")
    reach_step_2(run, hold)
    run.signal(signal.SIGINT)
    run.wait_until(lambda: "finishing this step" in run.stderr)
    run.signal(signal.SIGINT)  # too soon: one Ctrl-C may arrive twice
    time.sleep(AT_ONCE_S)
    run.signal(signal.SIGINT)
    assert run.wait(60.0) == INTERRUPTED
    assert run.left_behind() == []
    assert list(run.steps()) == [1] and run.has_checkpoint(1) and not run.has_checkpoint(2)
    assert "interrupted" in run.stderr and "Traceback" not in run.stderr


def test_sigterm_saves_and_the_same_command_finishes(checkpoint, hold, tmp_path):
    run = Run(
        tmp_path / "a",
        *overrides(checkpoint, hold),
        "trainer.grace_period_s=100",
        "trainer.total_training_steps=3",
    )
    reach_step_2(run, hold)
    run.process.send_signal(signal.SIGTERM)
    run.wait_until(lambda: "SIGTERM: finishing this step" in run.stderr)
    hold.unlink()
    assert run.wait() == RESUMABLE
    assert run.left_behind() == [] and run.has_checkpoint(2)
    assert '"stopped_by": "SIGTERM"' in run.stdout.splitlines()[-1]
    run.start()
    assert run.succeed()["finished"] is True
    assert list(run.steps()) == [1, 2, 3]


def test_step_longer_than_the_grace_period_is_given_up(checkpoint, hold, tmp_path):
    run = Run(tmp_path / "a", *overrides(checkpoint, hold), "trainer.save_freq=1", "trainer.grace_period_s=1")
    reach_step_2(run, hold)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60.0) == RESUMABLE
    assert run.left_behind() == []
    assert run.has_checkpoint(1) and not run.has_checkpoint(2)
    assert "no end of the step within trainer.grace_period_s=1.0\nThe same command with hydra.run.dir=" in run.stderr
    assert f"{run.folder} goes on from" in run.stderr
    assert "Traceback" not in run.stderr


def test_sigterm_to_every_process_is_resumable_too(checkpoint, hold, tmp_path):
    run = Run(tmp_path / "a", *overrides(checkpoint, hold), "trainer.save_freq=1")
    reach_step_2(run, hold)
    for process in [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]:
        process.send_signal(signal.SIGTERM)  # as Slurm does
    assert run.wait(120.0) == RESUMABLE
    assert run.left_behind() == []
    assert run.has_checkpoint(1) and "SIGTERM" in run.stderr


def test_sigterm_while_starting_is_resumable(checkpoint, hold, tmp_path):
    run = Run(tmp_path / "a", *overrides(checkpoint, hold))
    run.wait_until(lambda: any("raylet" in process for process in run.processes()))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60.0) == RESUMABLE
    assert run.left_behind() == []


def test_ctrl_c_while_starting_leaves_nothing(checkpoint, hold, tmp_path):
    run = Run(tmp_path / "a", *overrides(checkpoint, hold))
    run.wait_until(lambda: any("ModelWorker" in process for process in run.processes()))
    run.signal(signal.SIGINT)
    assert run.wait(60.0) == INTERRUPTED
    assert run.left_behind() == []
    first, *others = run.stderr.splitlines()
    assert first.startswith("starting    Ray") and others == ["rlpost: interrupted"]
