"""`cluster=ray`: a run joins a Ray cluster that was there before, and leaves it as it was."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlpost.platform import RAY_ENV
from tests.e2e.runs import ROOT, Run, small


class Cluster:
    """`ray start` in a process group of its own; `folder` must have a short path, for sockets lie below it."""

    def __init__(self, folder: Path):
        command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--port=0", "--num-cpus=2"]
        command += [f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
        environment = os.environ | RAY_ENV | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(folder / "start.txt", "w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        running = folder / "ray_current_cluster"
        try:
            wait_until(lambda: running.exists() or self.process.poll() is not None, "the cluster starts")
            assert self.process.poll() is None, (folder / "start.txt").read_text()
        except AssertionError:
            self.stop()
            raise
        self.address = running.read_text()

    def actors(self) -> list[str]:
        """Those of our processes that run here."""
        running = psutil.Process(self.process.pid).children(recursive=True)
        names = [" ".join(process.cmdline()) for process in running if process.is_running()]
        return [name for name in names if name.startswith("ray::") and "Work" in name]

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        started = Cluster(Path(folder))
        yield started
        started.stop()


def test_run_joins_a_cluster_and_leaves_it_running_without_its_own_processes(cluster, checkpoint, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    run = Run(
        tmp_path / "a",
        *small(
            checkpoint,
            "cluster=ray",
            f"cluster.address={cluster.address}",
            "data.val_files=null",
            "trainer.total_training_steps=1",
            f"+reward.terms.accuracy.kwargs.hold={hold}",
        ),
    )
    run.wait_until(lambda: hold.with_suffix(".reached").exists())
    for actor in ("ModelWorker", "RolloutWorker", "WorkflowWorker"):
        assert any(actor in name for name in cluster.actors())
    assert not any("raylet" in process for process in run.processes())  # it started no Ray of its own
    hold.unlink()
    assert run.succeed()["finished"] is True
    assert list(run.steps()) == [1] and run.has_checkpoint(1)
    wait_until(lambda: cluster.actors() == [], "the run's actors end")
    assert run.left_behind() == [] and cluster.process.poll() is None
