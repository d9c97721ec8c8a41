"""How a command ends: statuses, messages and signals."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from rlpost.launch import CONFIG_ERROR, FAILED, INTERRUPTED, run

WAITS = """
import asyncio
from rlpost.launch import launch

async def wait():
    print("waiting", flush=True)
    try:
        await asyncio.sleep(60)
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


def test_sigterm_ends_like_ctrl_c(tmp_path):
    command = [sys.executable, "-c", WAITS, f"hydra.run.dir={tmp_path}"]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    time.sleep(0.3)  # let it fall asleep: just before, a signal does not wake a Python loop without handlers of its own
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (INTERRUPTED, "cleaned up\n", "rlpost: interrupted\n")
