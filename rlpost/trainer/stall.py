"""The report of a stall: who is stuck where, who waits for whom, and the stacks of every process."""

import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rlpost.heartbeat import DRIVER, file_name
from rlpost.trainer import stacks
from rlpost.trainer.watchdog import Seen, Stall, Watchdog

SPY_S = 60.0  # for py-spy, over all processes


def write_report(stalls: Sequence[Stall], dog: Watchdog, heartbeats: Path, folder: Path) -> str:
    """Write `<folder>/report.txt` and a file of stacks for each process; returns the report's first lines.

    Args:
        stalls: who has stalled.
        dog: what it has seen.
        heartbeats: folder of the heartbeats.
        folder: of the report; what is in it is removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    host, deadline = socket.gethostname(), time.monotonic() + SPY_S

    def spy(pid: int) -> str:
        return stacks.py_spy(pid) if time.monotonic() < deadline else ""

    known = list(dog.alive())
    texts = stacks.collect([one.pulse for one in known], heartbeats, host)
    report = Report(stalls, dog, {name: stacks.parse(text) for name, text in texts.items()})
    for one in known:
        spied = spy(one.pulse.pid) if one.pulse.host == host else ""
        if text := "\n".join(filter(None, (texts.get(one.pulse.name, ""), spied))):
            (folder / f"{file_name(one.pulse.name)}.txt").write_text(text)
    lines = [*report.headline(), "", *report.table(), "", "other processes started by the driver:"]
    for process in others(known):
        lines.append(f"  {process}")
        if text := spy(int(process.split()[0])):
            (folder / f"{process.split()[0]}.txt").write_text(text)
    (folder / "report.txt").write_text("\n".join(lines) + "\n")
    return "\n".join([*report.headline(), f"report and stacks: {folder}"])


class Report:
    """What is said about `stalls`, given the `threads` of each process by its name.

    Of processes in one phase, those in a collective wait for the others, though these have moved a moment later and are
    not over the limit yet; and the driver waits for whoever is stuck.
    """

    def __init__(self, stalls: Sequence[Stall], dog: Watchdog, threads: dict[str, list[list[stacks.Frame]]]):
        self._dog, self._threads = dog, threads
        frames = {name: stacks.collective(found) for name, found in threads.items()}
        self.waits = {name: frame for name, frame in frames.items() if frame is not None}
        workers = [stall for stall in stalls if stall.pulse.name != DRIVER]
        stuck = [stall for stall in workers if stall.pulse.name not in self.waits]
        self.culprits = stuck or self._awaited(workers) or workers or list(stalls)
        driver = dog.seen.get(DRIVER)
        self._step = None if driver is None else driver.pulse.step

    def _awaited(self, waiting: Sequence[Stall]) -> list[Stall]:
        """Those in the phase of processes that wait in a collective, who are in none themselves."""
        limits = {stall.pulse.phase: stall.limit_s for stall in waiting}
        return [
            Stall(pulse=one.pulse, stuck_s=self._dog.looked - one.moved, limit_s=limits[one.pulse.phase])
            for one in self._dog.alive()
            if one.pulse.phase in limits and one.pulse.name not in {*self.waits, DRIVER}
        ]

    def headline(self) -> list[str]:
        """Who is to blame, what runs on its behalf, and who waits for it."""
        step = "" if self._step is None else f" of step {self._step}"
        lines = []
        for stall in self.culprits:
            pulse = stall.pulse
            lines.append(
                f"{pulse.name} made no progress in phase '{pulse.phase}'{f' ({pulse.doing})' if pulse.doing else ''}"
                f"{step} for {stall.stuck_s:.0f} s (trainer.timeouts.{pulse.phase}_s={stall.limit_s:g}); "
                f"it is in {self.where(pulse.name)}"
            )
        for one in self._dog.alive():
            if one.pulse.phase == "reward":
                lines.append(f"{one.pulse.name} runs {one.pulse.doing}; it is in {self.where(one.pulse.name)}")
        return [*lines, *(f"{name} waits for other ranks in {frame}" for name, frame in sorted(self.waits.items()))]

    def table(self) -> list[str]:
        """Every process: what it is in, for how long without progress, and where."""
        lines = ["every process (name, host:pid, phase, step, seconds without progress, where):"]
        for one in sorted(self._dog.alive(), key=lambda one: one.pulse.name):
            pulse, silent_s = one.pulse, self._dog.looked - one.heard
            silent = "" if self._dog.is_heard(one) else f", silent for {silent_s:.0f} s"
            lines.append(
                f"  {pulse.name}  {pulse.host}:{pulse.pid}  {pulse.phase or 'waits for work'} {pulse.doing}  "
                f"{'-' if pulse.step is None else pulse.step}  {self._dog.looked - one.moved:.0f}{silent}  "
                f"{self.where(pulse.name)}"
            )
        return lines

    def where(self, name: str) -> str:
        """The innermost line of a process's work, and rlpost's line that led there."""
        threads = self._threads.get(name)
        if threads is None:
            return "an unknown place: its stacks could not be had"
        if (frame := self.waits.get(name)) is not None:
            return f"the collective {frame}"
        thread = stacks.working(threads)
        if not thread:
            return "no code of rlpost's: it waits for work"
        if len(thread) > 1 and thread[1].file.endswith("asyncio/base_events.py"):
            return "its event loop: it waits for others"
        ours = next(frame for frame in thread if frame.is_ours)
        return str(thread[0]) if ours is thread[0] else f"{thread[0]}, called from {ours}"


def others(known: Sequence[Seen]) -> list[str]:
    """Processes of this run on this node that have no heartbeat, such as an engine's own: pid, state, command."""
    named, found = {one.pulse.pid for one in known}, []
    for process in psutil.Process().children(recursive=True):
        if process.pid not in named:
            try:
                found.append(f"{process.pid}  {process.status()}  {' '.join(process.cmdline())[:100]}")
            except psutil.Error:  # it has ended
                continue
    return found
