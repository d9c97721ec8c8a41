"""The report of a stall: who is stuck where, who waits for whom, and the stacks of every process."""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from rlpost.heartbeat import file_name
from rlpost.trainer import stacks
from rlpost.trainer.watchdog import DRIVER, Seen, Stall, Watchdog

NO_STACKS = "its stacks could not be had"


def write_report(stalls: Sequence[Stall], dog: Watchdog, heartbeats: Path, folder: Path) -> str:
    """Write `<folder>/report.txt` and a file of stacks for each process; returns the report's first lines.

    Args:
        stalls: who has stalled, the likely cause first.
        dog: what it has seen.
        heartbeats: folder of the heartbeats.
        folder: of the report; what is in it is removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    host = socket.gethostname()
    known = [one for one in dog.seen.values() if dog.is_heard(one) or one.pulse.phase]
    texts = stacks.collect([one.pulse for one in known], heartbeats, host)
    for one in known:
        spied = stacks.py_spy(one.pulse.pid) if one.pulse.host == host else ""
        text = "\n".join(filter(None, (texts.get(one.pulse.name, ""), spied)))
        if text:
            (folder / f"{file_name(one.pulse.name)}.txt").write_text(text)
    threads = {name: stacks.parse(text) for name, text in texts.items()}
    waits = {name: frame for name, found in threads.items() if (frame := stacks.collective(found)) is not None}
    head = headline(stalls, waits, threads)
    lines = [*head, "", *table(known, dog, waits, threads), "", *others(known, folder)]
    (folder / "report.txt").write_text("\n".join(lines) + "\n")
    return "\n".join([*head, f"report and stacks: {folder}"])


def headline(
    stalls: Sequence[Stall], waits: dict[str, stacks.Frame], threads: dict[str, list[list[stacks.Frame]]]
) -> list[str]:
    """Who is to blame, and who waits for it. Of processes in one phase those in a collective wait for the others."""
    culprits = [stall for stall in stalls if stall.pulse.name not in waits] or list(stalls)
    if len(culprits) > 1:  # the driver waits for whoever else is stuck
        culprits = [stall for stall in culprits if stall.pulse.name != DRIVER] or culprits
    steps = [stall.pulse.step for stall in stalls if stall.pulse.step is not None]
    lines = []
    for stall in culprits:
        pulse, key = stall.pulse, f"trainer.timeouts.{stall.pulse.phase}_s={stall.limit_s:g}"
        doing = f" ({pulse.doing})" if pulse.doing else ""
        step = f" of step {max(steps)}" if steps else ""
        lines.append(
            f"{pulse.name} made no progress in phase '{pulse.phase}'{doing}{step} for {stall.stuck_s:.0f} s ({key}); "
            f"it is in {where(threads.get(pulse.name, []))}"
        )
    lines += [f"{name} waits for other ranks in {frame}" for name, frame in sorted(waits.items())]
    return lines


def where(threads: list[list[stacks.Frame]]) -> str:
    """The innermost line of the work of a process, and rlpost's line that led there."""
    if (frame := stacks.collective(threads)) is not None:
        return f"the collective {frame}"
    thread = stacks.working(threads)
    if not thread:
        return "no code of rlpost's: it waits" if threads else NO_STACKS
    ours = next(frame for frame in thread if "rlpost/" in frame.file)
    return str(thread[0]) if ours is thread[0] else f"{thread[0]}, called from {ours}"


def table(
    known: Sequence[Seen], dog: Watchdog, waits: dict[str, stacks.Frame], threads: dict[str, list[list[stacks.Frame]]]
) -> list[str]:
    """Every process: what it is in, since when, and where."""
    now = max((one.heard for one in known), default=0.0)
    lines = ["every process (name, host:pid, phase, step, seconds without progress, where):"]
    for one in sorted(known, key=lambda one: one.pulse.name):
        pulse = one.pulse
        silent = "" if dog.is_heard(one) else f", silent for {now - one.heard:.0f} s"
        lines.append(
            f"  {pulse.name}  {pulse.host}:{pulse.pid}  {pulse.phase or 'waits for work'} {pulse.doing}  "
            f"{'-' if pulse.step is None else pulse.step}  {now - one.moved:.0f}{silent}  "
            f"{where(threads.get(pulse.name, []))}"
        )
    return lines


def others(known: Sequence[Seen], folder: Path) -> list[str]:
    """Processes of this run on this node that have no heartbeat, such as an engine's own; with py-spy their stacks."""
    named = {one.pulse.pid for one in known}
    lines = ["other processes started by the driver:"]
    for process in psutil.Process().children(recursive=True):
        if process.pid in named:
            continue
        try:
            command, status = " ".join(process.cmdline())[:100], process.status()
        except psutil.Error:
            continue
        lines.append(f"  {process.pid}  {status}  {command}")
        if text := stacks.py_spy(process.pid):
            (folder / f"{process.pid}.txt").write_text(text)
    return lines
