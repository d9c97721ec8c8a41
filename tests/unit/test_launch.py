"""How a command ends: statuses, messages and signals."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.endings import (
    CONFIG_ERROR,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RESUMABLE,
    STALLED,
    Preempted,
    Stalled,
    begun,
)
from rlpost.files import DiskFull
from rlpost.launch import HYDRA_RAISES, _report_hydra, run
from rlpost.lock import holding

ROOT = Path(__file__).parents[2]
SUCCEEDS = """
import os
from rlpost.launch import launch
launch(lambda cfg, run_dir: {"finished": os.environ["HYDRA_FULL_ERROR"] != "1"})
"""

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
        assert not (run_dir / "error.txt").exists(), "of an earlier attempt"
        raise error

    return run({}, tmp_path, execute)


def test_every_failure_keeps_its_trace(monkeypatch, tmp_path, capsys):
    assert ends(monkeypatch, tmp_path, ValueError("rollout.n=0: must be >= 1")) == CONFIG_ERROR
    assert capsys.readouterr().err == f"rlpost: rollout.n=0: must be >= 1\n(full trace: {tmp_path}/error.txt)\n"
    assert "in execute" in (tmp_path / "error.txt").read_text()
    assert ends(monkeypatch, tmp_path, RuntimeError("broken")) == FAILED
    assert "RuntimeError: broken" in (tmp_path / "error.txt").read_text()
    assert ends(monkeypatch, tmp_path, RuntimeError("login of http://me:hunter2@host failed, api_key=k1")) == FAILED
    kept = (tmp_path / "error.txt").read_text()
    assert "login of http://***@host failed, api_key=***" in kept and "hunter2" not in kept and "k1" not in kept


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Stalled("rank 1 made no progress"), STALLED, "rlpost: rank 1 made no progress\n{trace}"),
        (Preempted("SIGTERM: no end"), RESUMABLE, "rlpost: SIGTERM: no end\n{trace}"),
        (KeyboardInterrupt(), INTERRUPTED, "rlpost: interrupted\n"),
        (SystemExit(0), FAILED, "rlpost: something called sys.exit(0) before the run had ended\n{trace}"),
    ],
)
def test_every_early_end_has_a_status_of_its_own(monkeypatch, tmp_path, capsys, error, status, said):
    assert ends(monkeypatch, tmp_path, error) == status != FINISHED
    assert capsys.readouterr().err == said.format(trace=f"(full trace: {tmp_path}/error.txt)\n")


def test_value_error_once_the_run_has_begun_is_none_of_the_configuration(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("rlpost.launch.to_object", lambda cfg: cfg)

    def execute(cfg, run_dir):
        with begun():
            int("a user's mistake")

    assert run({}, tmp_path, execute) == FAILED
    said = 'ValueError: invalid literal for int() with base 10: "a user\'s mistake"'
    assert capsys.readouterr().err == f"rlpost: {said}\n(full trace: {tmp_path}/error.txt)\n"
    assert said in (tmp_path / "error.txt").read_text()


def test_trace_that_cannot_be_kept_is_printed_once_and_hides_nothing(monkeypatch, tmp_path, capsys):
    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert ends(monkeypatch, tmp_path, RuntimeError("broken, api_key=k1")) == FAILED
    err = capsys.readouterr().err
    assert err.startswith("rlpost: RuntimeError: broken, api_key=k1\n")
    assert f"{tmp_path}/error.txt cannot be written: [Errno 28] No space left" in err
    assert err.count("Traceback") == 1 and err.endswith("RuntimeError: broken, api_key=***\n")
    assert not (tmp_path / "error.txt").exists()


def test_full_disk_is_named_so_whatever_met_it(monkeypatch, tmp_path, capsys):
    for number, text in ((errno.ENOSPC, "No space left on device"), (errno.EDQUOT, "Disk quota exceeded")):
        assert ends(monkeypatch, tmp_path, OSError(number, text)) == FAILED
        said = f"rlpost: the disk is full (OSError: [Errno {number}] {text}). Free some space and start the run again"
        assert capsys.readouterr().err.startswith(said)
    assert ends(monkeypatch, tmp_path, DiskFull("there: the disk is full")) == FAILED
    assert capsys.readouterr().err.startswith("rlpost: DiskFull: there: the disk is full\n")


def test_error_of_an_earlier_attempt_is_set_aside(monkeypatch, tmp_path):
    assert ends(monkeypatch, tmp_path, RuntimeError("broken")) == FAILED
    assert run({}, tmp_path, lambda cfg, run_dir: {}) == FINISHED
    assert not (tmp_path / "error.txt").exists()
    assert "RuntimeError: broken" in (tmp_path / "error.txt.old").read_text()


def test_folder_of_another_run_is_refused_and_left_as_it_is(monkeypatch, tmp_path, capsys):
    (tmp_path / "error.txt").write_text("of the other run")
    with holding(tmp_path):
        before = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert ends(monkeypatch, tmp_path, AssertionError("started")) == CONFIG_ERROR
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    assert capsys.readouterr().err.startswith(f"rlpost: hydra.run.dir={tmp_path} is in use by process ")


def start(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    """A command that would succeed."""
    command = [sys.executable, "-c", SUCCEEDS, *overrides]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    "override", ["hydra.run.dir={}/file/run", "hydra.run.dir={}/run", "-m hydra.sweep.dir={}/file"]
)
def test_run_folder_that_cannot_be_used_is_named_without_a_trace(tmp_path, override):
    """Below a file; or with a log that cannot be opened."""
    (tmp_path / "file").touch()
    (tmp_path / "run" / "main.log").mkdir(parents=True)
    done = start(tmp_path, *override.format(tmp_path).split(), "hydra.job.name=main")
    assert (done.returncode, done.stdout) == (CONFIG_ERROR, "")
    assert done.stderr.startswith("rlpost: the run folder cannot be used ([Errno ") and str(tmp_path) in done.stderr
    assert "hydra.run.dir" in done.stderr and "Traceback" not in done.stderr


def test_disk_that_is_full_before_the_run_begins_is_named_so(monkeypatch, capsys):
    def job():
        raise ValueError("Unable to configure handler 'file'") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.delenv(HYDRA_RAISES, raising=False)
    with pytest.raises(SystemExit) as ended:
        _report_hydra(job)
    assert HYDRA_RAISES not in os.environ
    assert ended.value.code == FAILED
    assert capsys.readouterr().err.startswith("rlpost: the disk is full ([Errno 28] No space left on device). Free")


def test_sweep_frees_the_folder_of_each_job(tmp_path):
    done = start(tmp_path, "-m", "seed=1,2", "hydra.sweep.dir=.", "hydra.sweep.subdir=both")
    assert done.returncode == FINISHED, done.stderr
    assert done.stdout.count("finished") == 2


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
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, ctrl_c),
    )
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (RESUMABLE, "cleaned up\n", "rlpost: interrupted\n")
