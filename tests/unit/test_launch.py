"""How a command ends: statuses, messages and signals."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.endings import CONFIG_ERROR, FAILED, FINISHED, INTERRUPTED, RESUMABLE, STALLED, Preempted, Stalled
from rlpost.launch import run

WAITS = """
import asyncio
from rlpost.launch import launch

async def wait():
    print("waiting", flush=True)
    try:
        for _ in range(6000):  # awake often: just before a loop sleeps, a signal without a handler of its own is missed
            await asyncio.sleep(0.01)
    finally:
        print("cleaned up", flush=True)

launch(lambda cfg, run_dir: asyncio.run(wait()))
"""


def ends(monkeypatch, tmp_path, error):
    monkeypatch.setattr("rlpost.launch.to_object", lambda cfg: cfg)

    def execute(cfg, run_dir):
        raise error

    return run({}, tmp_path, execute)


def test_every_failure_keeps_its_trace(monkeypatch, tmp_path, capsys):
    assert ends(monkeypatch, tmp_path, ValueError("rollout.n=0: must be >= 1")) == CONFIG_ERROR
    assert capsys.readouterr().err == "rlpost: rollout.n=0: must be >= 1\n"
    assert "in execute" in (tmp_path / "error.txt").read_text()
    assert ends(monkeypatch, tmp_path, RuntimeError("broken")) == FAILED
    assert "RuntimeError: broken" in (tmp_path / "error.txt").read_text()
    assert ends(monkeypatch, tmp_path, RuntimeError("login of http://me:hunter2@host failed, api_key=k1")) == FAILED
    kept = (tmp_path / "error.txt").read_text()
    assert "login of http://***@host failed, api_key=***" in kept and "hunter2" not in kept and "k1" not in kept


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Stalled("rank 1 made no progress"), STALLED, "rlpost: rank 1 made no progress\n"),
        (Preempted("SIGTERM: no end"), RESUMABLE, "rlpost: SIGTERM: no end\n"),
        (KeyboardInterrupt(), INTERRUPTED, "rlpost: interrupted\n"),
        (SystemExit(0), FAILED, "rlpost: something called sys.exit(0) before the run had ended\n"),
    ],
)
def test_every_early_end_has_a_status_of_its_own(monkeypatch, tmp_path, capsys, error, status, said):
    assert ends(monkeypatch, tmp_path, error) == status != FINISHED
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ({"finished": True}, FINISHED),
        ({"finished": False, "stopped_by": "SIGINT"}, INTERRUPTED),
        ({"finished": False, "stopped_by": "SIGTERM"}, RESUMABLE),
        ({"passed": False}, FAILED),
    ],
)
def test_summary_of_a_run_that_ended_early_is_no_success(monkeypatch, tmp_path, summary, status):
    monkeypatch.setattr("rlpost.launch.to_object", lambda cfg: cfg)
    assert run({}, tmp_path, lambda cfg, run_dir: summary) == status


@pytest.mark.parametrize("ctrl_c", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def test_sigterm_cleans_up_like_ctrl_c(ctrl_c, tmp_path):
    """Also where the shell has Ctrl-C ignored, as it does for what a script starts in the background."""
    command = [sys.executable, "-c", WAITS, f"hydra.run.dir={tmp_path}"]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, ctrl_c),
    )
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (RESUMABLE, "cleaned up\n", "rlpost: interrupted\n")
