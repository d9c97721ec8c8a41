"""One run a folder: who is refused, what is said, and what frees a folder."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlpost import lock
from rlpost.heartbeat import DRIVER, FOLDER, Pulse
from rlpost.lock import InUse, holding

HOLDS = """
import subprocess, sys, time
from pathlib import Path
from rlpost.lock import holding

with holding(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_folder_is_refused_while_another_process_lives_but_not_for_what_it_started(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        said = rf"hydra.run.dir={tmp_path} is in use by process {holder.pid} on host {socket.gethostname()}, since 2"
        with pytest.raises(InUse, match=said), holding(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with holding(tmp_path):
            os.kill(child, 0)
            assert f"process {os.getpid()} " in (tmp_path / lock.LOCK).read_text()
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)


def test_folder_is_free_again_after_an_error_and_its_refusal_changes_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="broken"), holding(tmp_path):
        before = (tmp_path / lock.LOCK).read_text()
        with pytest.raises(InUse, match=before.replace("+", r"\+")), holding(tmp_path):
            pass
        assert (tmp_path / lock.LOCK).read_text() == before
        raise RuntimeError("broken")
    with holding(tmp_path):
        pass


def test_holder_that_cannot_say_who_it_is_holds_all_the_same(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with holding(tmp_path), pytest.raises(InUse, match="in use by another process: end"), holding(tmp_path):
        pass


def test_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, caplog):
    def none(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with holding(tmp_path):
        assert "this file system has no locks" in caplog.text


def write_pulse(run_dir: Path, pulse: Pulse) -> None:
    path = run_dir / FOLDER / "driver.json"
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(dataclasses.asdict(pulse)))
    os.replace(path.with_suffix(".tmp"), path)


def test_driver_on_another_host_that_goes_on_writing_is_heard(tmp_path):
    """Where no lock of another host is seen. One that has stopped writing is not in the way."""
    pulse = Pulse(name=DRIVER, host="elsewhere", pid=7, written=1)
    write_pulse(tmp_path, pulse)
    with holding(tmp_path, hear_s=0.3):
        pass
    (tmp_path / lock.LOCK).write_text("process 7 on host elsewhere, since noon")
    silent = threading.Event()

    def go_on():
        written = 1
        while not silent.wait(0.05):
            written += 1
            write_pulse(tmp_path, dataclasses.replace(pulse, written=written))

    driver = threading.Thread(target=go_on)
    driver.start()
    try:
        with pytest.raises(InUse, match="in use by process 7 on host elsewhere, since noon"):
            with holding(tmp_path, hear_s=60):
                pass
    finally:
        silent.set()
        driver.join()
    with holding(tmp_path, hear_s=0.3):
        pass


def test_driver_of_this_host_is_told_by_its_lock_alone(tmp_path, monkeypatch):
    write_pulse(tmp_path, Pulse(name=DRIVER, host=socket.gethostname(), pid=7))
    monkeypatch.delattr(lock.time, "sleep")
    with holding(tmp_path):
        assert f"process {os.getpid()} on host" in (tmp_path / "lock").read_text()
