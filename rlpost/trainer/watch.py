"""The watchdog at work: a thread of the driver that ends a run which has stalled, and says where.

Meanwhile it tells what other processes warn of. It relies neither on Ray nor on the event loop. First the run is asked
to end as after an error, so that a sweep can go on; if that takes too long, or the loop does not even hear of it, the
thread ends all processes by itself.
"""

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rlpost import heartbeat
from rlpost.endings import STALLED
from rlpost.files import set_aside
from rlpost.heartbeat import DRIVER
from rlpost.notices import NoticeReader
from rlpost.trainer.config import TimeoutsConfig
from rlpost.trainer.stall import Report, write_report
from rlpost.trainer.watchdog import Stall, Watchdog

LOOK_S = 1.0
HEAR_S = 5.0  # for the event loop to notice that it shall end
CLEAN_UP_S = 60.0  # for everything to be ended in good order


class Watch:
    """Heartbeat and watchdog of one run. See `watching`.

    Args:
        run_dir: the run's folder.
        timeouts: how long phases may take.
        timeline: all processes write down their phases.

    Attributes:
        stalled: what the report says in short, once the run has stalled.
        folder: of the heartbeats.
    """

    def __init__(self, run_dir: Path, timeouts: TimeoutsConfig, timeline: bool = False):
        self.stalled: str | None = None
        self.folder = (run_dir / heartbeat.FOLDER).resolve()
        self._report = run_dir / "stall"
        shutil.rmtree(self.folder, ignore_errors=True)  # those of an earlier run in this folder
        set_aside(self._report)
        self._mine = heartbeat.start(self.folder, DRIVER, keep_phases=timeline)
        self._notices = NoticeReader(self.folder)
        self._notices.attach()
        self._dog = Watchdog(timeouts.by_phase(), self._pulses)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")
        self._thread.start()

    def guard(self) -> None:
        """The task that calls this is the run: cancelled when it stalls."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._thread.join(timeout=2 * LOOK_S)
        self._notices.tell()
        self._notices.detach()
        heartbeat.start(None, "")

    def _pulses(self) -> list[heartbeat.Pulse]:
        others = [pulse for pulse in heartbeat.read_pulses(self.folder) if pulse.name != DRIVER]
        return [*others, self._mine.pulse()]

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._notices.tell()
            stalls = self._dog.look()
            if stalls:
                self.stalled = self._explain(stalls)
                return self._end()

    def _explain(self, stalls: list[Stall]) -> str:
        try:
            return write_report(stalls, self._dog, self.folder, self._report)
        except Exception as error:  # a full disk, say: the run must end all the same
            return "\n".join([*Report(stalls, self._dog, {}).headline(), f"the report could not be written: {error!r}"])

    def _end(self) -> None:
        heard = threading.Event()

        def cancel() -> None:
            heard.set()
            if self._task is not None:
                self._task.cancel()

        patience_s = CLEAN_UP_S
        if self._loop is not None and not self._loop.is_closed():  # else it ends already
            with suppress(RuntimeError):  # closed this moment
                self._loop.call_soon_threadsafe(cancel)
            patience_s = CLEAN_UP_S if heard.wait(HEAR_S) or self._loop.is_closed() else 0.0
        if self._closed.wait(patience_s):
            return
        end_now(STALLED, f"{self.stalled}\n(the driver could not end by itself)")


@contextmanager
def watching(run_dir: Path, timeouts: TimeoutsConfig, timeline: bool = False) -> Iterator[Watch]:
    """This process drives a run inside. See `Watch`."""
    watch = Watch(run_dir, timeouts, timeline)
    try:
        with heartbeat.phase("driver"):
            yield watch
    finally:
        watch.close()


def end_now(status: int, message: str) -> None:
    """End this process and all that it has started, in whatever state they are."""
    print(f"rlpost: {message}", file=sys.stderr, flush=True)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(status)
