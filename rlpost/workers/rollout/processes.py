"""The processes an engine starts: what they said before they died, and that none of them outlives us."""

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil

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


def children() -> set[psutil.Process]:
    """All processes that descend from this one."""
    return set(psutil.Process().children(recursive=True))


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill and wait."""
    processes = list(processes)
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)
