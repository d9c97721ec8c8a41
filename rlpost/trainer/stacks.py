"""Stacks of a run's processes: collected where they are, and read for what they wait in."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlpost.heartbeat import DUMP_REQUEST, DUMP_SIGNAL, WRITE_S, Pulse, stacks_path

ANSWER_S = 10 * WRITE_S  # for processes to write their stacks
PY_SPY_S = 20.0  # for one process
PACKAGE = Path(__file__).parents[1]
WATCHERS = (("rlpost/heartbeat.py", "_keep_writing"), ("rlpost/trainer/watch.py", "_run"))  # threads that only watch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')


@dataclass(slots=True, frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_ours(self) -> bool:
        """Whether the file is one of rlpost's, wherever that is installed on the process's node."""
        _, found, inside = self.file.rpartition("/rlpost/")
        return bool(found) and (PACKAGE / inside).is_file()

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.rsplit('/', 3)[1:])}:{self.line})"


def collect(pulses: Iterable[Pulse], folder: Path, host: str) -> dict[str, str]:
    """Ask all processes for the stacks of all their threads; what came within `ANSWER_S`, by name.

    First by a file, for which their heartbeats look, on any node. Those of this host that do not answer hold the
    interpreter's lock; they are asked by a signal, which may end a process whose stacks change while they are read.
    """
    pulses = list(pulses)
    (folder / DUMP_REQUEST).touch()
    answers = _wait(pulses, folder)
    here = [pulse for pulse in pulses if pulse.host == host and pulse.pid != os.getpid()]
    silent = [pulse for pulse in here if pulse.name not in answers and _takes_signal(pulse.pid)]
    for pulse in silent:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pulse.pid, DUMP_SIGNAL)
    return answers | (_wait(silent, folder) if silent else {})


def _wait(pulses: list[Pulse], folder: Path) -> dict[str, str]:
    """What these have written by now or within `ANSWER_S`."""
    deadline = time.monotonic() + ANSWER_S
    texts: dict[str, str] = {}
    while time.monotonic() < deadline:
        before = texts
        time.sleep(WRITE_S / 2)
        texts = {pulse.name: _read(stacks_path(folder, pulse.name)) for pulse in pulses}
        if all(texts.values()) and texts == before:  # whole, as far as can be told
            break
    return {name: text for name, text in texts.items() if text}


def _takes_signal(pid: int) -> bool:
    """Whether the process has asked for the signal, which would end any other: it may have ended, and its number been
    given to another."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (DUMP_SIGNAL - 1) & 1)


def py_spy(pid: int) -> str:
    """What `py-spy dump --native` says of a process, which needs no help of its own; "" where it is not to be had."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    for flags in (["--native"], []):
        command = [program, "dump", "--pid", str(pid), *flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode == 0:
            return done.stdout
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def parse(text: str) -> list[list[Frame]]:
    """Threads of a `faulthandler` dump, innermost frame first."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        elif threads and (match := _FRAME.search(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return threads


def working(threads: list[list[Frame]]) -> list[Frame]:
    """The thread with the most frames of rlpost's, those that only watch left out; [] if no thread has one."""

    def watches(frame: Frame) -> bool:
        return any(frame.file.endswith(file) and frame.function == function for file, function in WATCHERS)

    busy = [thread for thread in threads if not any(map(watches, thread))]
    best = max(busy, key=lambda thread: sum(frame.is_ours for frame in thread), default=[])
    return best if any(frame.is_ours for frame in best) else []


def collective(threads: list[list[Frame]]) -> Frame | None:
    """The call of torch's that waits for other ranks; None if no thread is in one.

    Waiting itself is no Python, so the innermost frame is that of the module which asked for it.
    """
    return next((thread[0] for thread in threads if thread and "torch/distributed/" in thread[0].file), None)
