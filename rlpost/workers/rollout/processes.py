"""The processes an engine starts: what they said before they died, and that none of them outlives us."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from rlpost.workers.rollout.base import EngineLost

WATCH_S = 0.5  # between two looks at an engine's processes

_CAUSE = re.compile(r"\b\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b: .+")
_FOLLOWS = re.compile(r"EngineDeadError|Engine core initialization failed|EngineCore encountered an issue")


class ProcessLog:
    """Passes on what child processes write, and remembers the last lines."""

    def __init__(self, num_lines: int = 400):
        self._lines: deque[str] = deque(maxlen=num_lines)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Children started inside inherit a pipe as stdout and stderr, for as long as they live."""
        sys.stdout.flush()
        sys.stderr.flush()
        read, write = os.pipe()
        saved = [os.dup(1), os.dup(2)]
        threading.Thread(target=self._pump, args=(read, os.dup(2)), daemon=True, name="engine-log").start()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in enumerate(saved, start=1):
                os.dup2(original, number)
                os.close(original)

    def _pump(self, read: int, out: int) -> None:
        with os.fdopen(read, "r", errors="replace") as stream, os.fdopen(out, "w") as sink:
            for line in stream:
                self._lines.append(line.rstrip())
                sink.write(line)
                sink.flush()

    def cause(self) -> str:
        """The last error that was written, save those which only report that another process failed; "" if none."""
        errors = [match.group(0) for line in self._lines if (match := _CAUSE.search(line))]
        return next((error for error in reversed(errors) if not _FOLLOWS.search(error)), "")


class Guard:
    """Kills `processes` when this process ends, however it ends: SIGKILL leaves no other chance.

    A shell waits for the end of a pipe whose other end is ours alone.
    """

    _SCRIPT = 'while read -r pid; do pids="$pids $pid"; done; kill -9 $pids'

    def __init__(self, processes: Iterable[psutil.Process]):
        self._shell = subprocess.Popen(
            ["sh", "-c", self._SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C or a killed process group must not end it first
        )
        assert self._shell.stdin is not None
        self._shell.stdin.write("".join(f"{process.pid}\n" for process in processes).encode())
        self._shell.stdin.flush()

    def dismiss(self) -> None:
        """The processes have ended."""
        self._shell.kill()
        self._shell.wait()


class EngineProcesses:
    """The processes of one engine: started within a time limit, watched while it runs, ended with it.

    Args:
        name: what messages call the engine.
    """

    def __init__(self, name: str):
        self._name = name
        self._log = ProcessLog()
        self._children: set[psutil.Process] = set()
        self._guard: Guard | None = None
        self._death: asyncio.Task[None] | None = None  # done when a process of the engine has ended
        self._calls: set[asyncio.Future[Any]] = set()  # under way

    @contextmanager
    def starting(self, timeout_s: float) -> Iterator[None]:
        """What is started inside belongs to the engine; its processes are ended when that fails or takes too long.

        Raises:
            RuntimeError: the engine did not start; holds its own error.
        """
        before = children()
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            end(children() - before)

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            with self._log.capture():
                yield
        except Exception as error:  # engines raise many kinds, and the cause is often only in their processes' log
            end(children() - before)
            if expired.is_set():
                raise RuntimeError(
                    f"{self._name} did not start within rollout.startup_timeout_s={timeout_s}; "
                    f"its last words: {self._log.cause()}"
                ) from error
            raise RuntimeError(f"{self._name} did not start: {self._log.cause() or error}") from error
        finally:
            timer.cancel()
        self._children = children() - before
        self._guard = Guard(self._children)
        self._death = asyncio.create_task(self._watch())

    async def call(self, work: Awaitable[Any], failed: Callable[[], bool] = lambda: False) -> Any:
        """Await something of the engine's, but not for ever: engines do not always notice that a process is gone.

        Raises:
            EngineLost: a process of the engine has ended, or it says itself that it `failed`; holds its own error.
        """
        assert self._death is not None, "start the engine first"
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        if self._death.done():
            task.cancel()
        try:
            await asyncio.gather(task, return_exceptions=True)
        finally:
            self._calls.discard(task)
        if self._death.done() or failed():
            reason = task.exception() if task.done() and not task.cancelled() else None
            silent = "its process is gone without a word, as when the system kills it for memory"
            raise EngineLost(f"the {self._name} engine died: {self._log.cause() or reason or silent}") from reason
        return task.result()

    def end(self) -> None:
        """End all of them."""
        if self._death is not None:
            self._death.cancel()
        end(self._children)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None

    async def _watch(self) -> None:
        """Return when a process of the engine has ended; whoever waits for the engine waits no longer."""
        while all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self._children):
            await asyncio.sleep(WATCH_S)
        for call in self._calls:
            call.cancel()


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Undo what an engine does to signal handlers while it starts: some install ones that kill this process too.

    SIGQUIT is ignored for good, since a failing process of SGLang's sends it to its parent: `EngineProcesses` notices
    failures by itself, and says why.
    """
    ignore(signal.SIGQUIT)
    if threading.current_thread() is not threading.main_thread():  # handlers can only be installed there
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
        ignore(signal.SIGQUIT)


def ignore(number: int) -> None:
    """Ignore a signal. Python's own `signal.signal` may only be called in the main thread, where Ray runs no actor."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(number, signal.SIG_IGN.value)


def children() -> set[psutil.Process]:
    """All processes that descend from this one."""
    return set(psutil.Process().children(recursive=True))


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill them and all that they have started, and wait.

    Each is stopped before its children are looked up: none can start another meanwhile.
    """
    ahead, found = list(processes), set[psutil.Process]()
    while ahead:
        process = ahead.pop()
        try:
            process.suspend()
            ahead += set(process.children()) - found
        except psutil.NoSuchProcess:
            continue
        found.add(process)
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=10)
