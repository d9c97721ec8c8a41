"""What each process of a run is doing, in one small file a process: phase, step, progress; and its stacks on demand.

On request each process also writes down every phase that has ended, for `rlpost.tools.timeline`. What all
but the driver warn of lies there too (`notices.py`).

A thread writes the files every `WRITE_S`, so that it costs the work nothing and depends neither on Ray nor on an event
loop. Files lie in the run folder: on several nodes it must be on a file system that all of them share, or the driver
sees the processes of its own node only. Standard library only: reward processes import it too.
"""

import faulthandler
import functools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rlpost import notices

logger = logging.getLogger(__name__)

FOLDER = "heartbeats"  # in the run folder
VARIABLE = "RLPOST_HEARTBEATS"  # the folder, for processes that the driver starts
DRIVER = "driver"  # the name of the process that drives the run
WRITE_S = 1.0
DUMP_SIGNAL = signal.SIGUSR2  # writes this process's stacks, also while it holds the interpreter's lock
DUMP_REQUEST = "dump"  # a file of this name in the folder asks all processes for their stacks, on any node
KEEP_REQUEST = "keep_phases"  # and this one, when they start, to write down their phases
SETTLE_S = 2 * WRITE_S  # after which what has ended is written, also on a busy machine
SPANS_SUFFIX = ".phases.jsonl"
STEP = (DRIVER, "step")  # name and doing of the phase that holds a whole step of the trainer


@dataclass(slots=True, frozen=True, kw_only=True)
class Pulse:
    """What a process last said.

    Attributes:
        name: such as "driver" or "rank 0".
        host, pid: where it is.
        phase: what it is in, "" while it waits for work.
        doing: more about it, such as "train actor".
        step: of the trainer, None where it is not known.
        since: when the phase began, in seconds since 1970 by this process's clock.
        beats: goes up with every progress.
        written: goes up with every writing: a process that lives is heard of.
    """

    name: str
    host: str
    pid: int
    phase: str = ""
    doing: str = ""
    step: int | None = None
    since: float = 0.0
    beats: int = 0
    written: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class Span:
    """A phase that has ended.

    Attributes:
        process: such as "driver" or "rank 0".
        name: of the phase.
        doing: more about it, such as "train actor".
        step: of the trainer when it began, None where it is not known.
        begin, end: in seconds since 1970 by the process's clock.
    """

    process: str
    name: str
    doing: str = ""
    step: int | None = None
    begin: float
    end: float


@dataclass(slots=True, eq=False)
class _Phase:
    name: str
    doing: str
    since: float
    step: int | None = None


class Heartbeat:
    """One process's. Without a folder nothing is written.

    Phases nest, and those of concurrent tasks overlap: the last that began and has not ended is shown.

    Args:
        folder: where everybody writes.
        name: of this process.
        keep_phases: ask all processes that start with this folder from now on, this one first, to write down each phase
            that has ended.
    """

    def __init__(self, folder: Path | None = None, name: str = "", keep_phases: bool = False):
        self.folder, self.name = folder, name
        self._open: list[_Phase] = []
        self._ended: deque[Span] | None = None  # not written yet; None: they are not kept
        self._step: int | None = None
        self._beats = self._written = 0
        self._closed = threading.Event()
        self._appending = threading.Lock()
        self._dumped = False
        self._stacks: TextIO | None = None
        self._notices: notices.NoticeWriter | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if keep_phases:
                (folder / KEEP_REQUEST).touch()
            if (folder / KEEP_REQUEST).exists():
                self._ended = deque()
            self._stacks = open(stacks_path(folder, name), "w")
            faulthandler.register(DUMP_SIGNAL, self._stacks, all_threads=True)
            self._write(folder)
            if name != DRIVER:
                self._notices = notices.NoticeWriter(folder / f"{file_name(name)}{notices.SUFFIX}", name)
                self._notices.attach()
            threading.Thread(target=self._keep_writing, args=(folder,), daemon=True, name="heartbeat").start()

    @contextmanager
    def phase(self, name: str, doing: str = "", step: int | None = None) -> Iterator[None]:
        """This process is in phase `name` inside."""
        if step is not None:
            self._step = step
        entry = _Phase(name, doing, time.time(), self._step)
        self._open.append(entry)
        self._beats += 1
        try:
            yield
        finally:
            self._open.remove(entry)
            self._beats += 1
            if self._ended is not None and name:
                self._ended.append(self._span(entry))

    def beat(self) -> None:
        """Progress was made."""
        self._beats += 1

    def pulse(self) -> Pulse:
        """The present state."""
        try:
            now = self._open[-1]
        except IndexError:
            now = _Phase("", "", 0.0)
        return Pulse(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=now.name,
            doing=now.doing,
            step=self._step,
            since=now.since,
            beats=self._beats,
            written=self._written,
        )

    def dump(self) -> None:
        """Write the stacks of all threads to `stacks_path`."""
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def close(self) -> None:
        """Write what is left, and then no more."""
        self._closed.set()
        if self.folder is not None:
            with suppress(OSError):  # the folder may be gone
                self._write_ended(self.folder)
        if self._stacks is not None:
            faulthandler.unregister(DUMP_SIGNAL)
            self._stacks.close()
            self._stacks = None
        if self._notices is not None:
            self._notices.detach()

    def _keep_writing(self, folder: Path) -> None:
        told = False
        while not self._closed.wait(WRITE_S):
            try:
                self._write(folder)
                self._write_ended(folder)
                self._answer_request(folder)
            except (OSError, ValueError) as error:  # a full disk; or closed this moment
                if not told and not self._closed.is_set():
                    logger.warning("%s cannot write its heartbeat: %s", self.name, error)
                told = True

    def _write(self, folder: Path) -> None:
        self._written += 1
        path = folder / f"{file_name(self.name)}.json"
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(asdict(self.pulse())))
        os.replace(partial, path)

    def _span(self, entry: _Phase) -> Span:
        return Span(
            process=self.name,
            name=entry.name,
            doing=entry.doing,
            step=entry.step,
            begin=entry.since,
            end=time.time(),
        )

    def _write_ended(self, folder: Path) -> None:
        with self._appending:
            lines = []
            while self._ended:  # phases end meanwhile
                lines.append(json.dumps(asdict(self._ended.popleft())) + "\n")
            if lines:
                with open(folder / f"{file_name(self.name)}{SPANS_SUFFIX}", "a") as file:
                    file.write("".join(lines))

    def _answer_request(self, folder: Path) -> None:
        if not self._dumped and (folder / DUMP_REQUEST).exists():
            self._dumped = True
            self.dump()


_of_this_process = Heartbeat()


def start(folder: str | Path | None, name: str, keep_phases: bool = False) -> Heartbeat:
    """Begin the heartbeat of this process, in place of an earlier one; None: keep it to oneself. See `Heartbeat`.

    So it is where the folder cannot be made, as on a node that does not share it: the run itself may do without.
    """
    global _of_this_process
    _of_this_process.close()
    try:
        _of_this_process = Heartbeat(Path(folder) if folder else None, name, keep_phases)
    except OSError as error:
        logger.warning("%s has no heartbeat: %s", name, error)
        _of_this_process = Heartbeat(None, name)
    return _of_this_process


def current() -> Heartbeat:
    """That of this process."""
    return _of_this_process


def phase(name: str, doing: str = "", step: int | None = None) -> AbstractContextManager[None]:
    """See `Heartbeat.phase`."""
    return _of_this_process.phase(name, doing, step)


def beat() -> None:
    """See `Heartbeat.beat`."""
    _of_this_process.beat()


def during(name: str) -> Callable[[Callable], Callable]:
    """A method as a phase; `doing` is its name and those of its arguments that are words."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            doing = " ".join([method.__name__, *(a for a in args if isinstance(a, str))])
            with phase(name, doing):
                return method(self, *args, **kwargs)

        return wrapped

    return decorate


def read_pulses(folder: Path) -> list[Pulse]:
    """The last word of every process that has spoken; what cannot be read is left out."""
    pulses = []
    for path in sorted(folder.glob("*.json")):
        try:
            pulses.append(Pulse(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # gone, or not ours
            continue
    return pulses


def numberless(kind: str) -> str:
    """The name of one of several processes that have no number."""
    return f"{kind} {os.getpid()}@{socket.gethostname()}"


def stacks_path(folder: Path, name: str) -> Path:
    """Where a process writes its stacks."""
    return folder / f"{file_name(name)}.stacks"


def file_name(name: str) -> str:
    """A process's name as that of a file."""
    return name.replace(" ", "_").replace("/", "_")
