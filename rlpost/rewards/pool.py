"""Processes for functions that may hang or crash: killed on a time-out, started again, gone after `close`."""

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

from rlpost import heartbeat
from rlpost.rewards.child import Call
from rlpost.rewards.limits import MIB, ErrorKind

_START = "import sys; sys.path[:] = {path!r}; from rlpost.rewards.child import serve; serve({fd}, {heartbeats!r})"


class PoolError(Exception):
    """A call did not come back: it raised, timed out, went beyond a limit, or took its process with it."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.CRASH):
        super().__init__(message)
        self.kind = kind


class _Killed(PoolError):
    """Somebody has sent its process SIGKILL, which is no doing of the call's."""


class ProcessPool:
    """`num_processes` fresh interpreters that run functions given by dotted path.

    They are started with `python -c`, not by forking or `multiprocessing`: threads and locks of this process are not
    copied and its `__main__` is not run again, so the pool works in scripts without a guard and inside Ray actors. Each
    heads a session of its own, and is killed together with whatever it started.

    A call that hangs or crashes costs only itself: its process is replaced before the next call. One whose process was
    killed by somebody else (by hand, or by the kernel for want of memory) is made once more. A process starts with
    the first call that needs it; starting and importing count against `startup_timeout_s`, not against the call's time.

    Args:
        memory_bytes: what a process may allocate once its imports are done; beyond it calls get a `MemoryError`.
        max_output_bytes: of text that a call may print, and of its pickled result. What is printed goes to stderr.
    """

    def __init__(
        self,
        num_processes: int,
        startup_timeout_s: float = 120.0,
        memory_bytes: int | None = None,
        max_output_bytes: int = 16 * MIB,
    ):
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="reward-pool")
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children = [_Child(startup_timeout_s, memory_bytes, max_output_bytes) for _ in range(num_processes)]
        for child in self._children:
            self._idle.put(child)

    async def run(
        self, path: str, args: Sequence[Any], kwargs: dict[str, Any], timeout_s: float, imports: Sequence[str] = ()
    ) -> Any:
        """Result of `path(*args, **kwargs)`; waits for an idle process, and then at most `timeout_s`.

        Args:
            path: dotted path of the function, importable with this process's `sys.path`.
            imports: modules to import before the time begins.

        Raises:
            PoolError: the function raised, timed out, died or took too much, or the pool was closed; says which.
        """
        call = Call(path=path, args=args, kwargs=kwargs, timeout_s=timeout_s)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, call, tuple(imports))
        except RuntimeError as error:
            raise PoolError(f"the pool is closed ({error})") from error

    def _run(self, call: Call, imports: tuple[str, ...]) -> Any:
        child = self._idle.get()
        try:
            return child.call(call, imports)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """Kill every process; calls in progress or waiting end with a `PoolError`. May be called again."""
        for child in self._children:
            child.interrupt()
        self._threads.shutdown(wait=True)
        for child in self._children:
            child.stop()


class _Child:
    """One process, started when needed. Used by one thread at a time, except `interrupt`."""

    def __init__(self, startup_timeout_s: float, memory_bytes: int | None, max_output_bytes: int):
        self._startup_timeout_s = startup_timeout_s
        self._memory_bytes, self._max_output_bytes = memory_bytes, max_output_bytes
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._loaded: set[str] = set()
        self._closed = False
        self._lock = threading.Lock()  # no process is started once the pool is closed

    def call(self, call: Call, imports: tuple[str, ...]) -> Any:
        try:
            return self._call(call, imports)
        except _Killed:
            return self._call(call, imports)

    def _call(self, call: Call, imports: tuple[str, ...]) -> Any:
        if self._connection is not None and self._connection.poll():
            self.stop()  # end of file: it died between two calls, which is not the fault of this one
        if self._process is None:
            self._start()
        if call.path not in self._loaded:
            first = Call(
                path=call.path, timeout_s=self._startup_timeout_s, imports=imports, memory_bytes=self._memory_bytes
            )
            self._exchange(first, "starting and importing")
            self._loaded.add(call.path)
        return self._exchange(call, "the call")

    def interrupt(self) -> None:
        """Kill the process for good; the thread that waits for it then gets an error."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill_session(self._process)

    def stop(self) -> int:
        """Kill the process, and what it started; its exit status (negative: a signal)."""
        process, connection = self._process, self._connection
        if process is None or connection is None:
            return 0
        _kill_session(process)
        status = process.wait()
        connection.close()
        if process.stdout is not None:
            process.stdout.close()
        with self._lock:
            self._process = self._connection = None
        self._loaded.clear()
        return status

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise PoolError("the pool is closed")
            self._connection, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START.format(path=sys.path, fd=theirs.fileno(), heartbeats=_heartbeats())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )

    def _exchange(self, call: Call, what: str) -> Any:
        """Send a call and wait for its reply; on silence, a flood or death the process is killed."""
        connection = self._connection
        assert connection is not None
        try:
            connection.send(call)
            self._await_reply(connection, call.timeout_s, what)
            kind, reply = pickle.loads(self._receive(connection, what))
        except (EOFError, OSError) as error:
            killed = self._await_end() == -signal.SIGKILL and not self._closed
            status = self.stop()
            said = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
            raise (_Killed if killed else PoolError)(f"its process died during {what} ({said})") from error
        if kind is ErrorKind.MEMORY:
            self.stop()  # what it holds may be what leaves no room
            limit = f"; reward.memory_limit_mb allows {self._memory_bytes // MIB} MiB" if self._memory_bytes else ""
            raise PoolError(reply + limit, kind)
        if kind is not None:
            raise PoolError(reply, kind)
        return reply

    def _await_end(self, limit_s: float = 1.0) -> int | None:
        """Exit status of a process that is ending, which tells more than that of our own kill; None: it goes on."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self._process.returncode

    def _await_reply(self, connection: Connection, timeout_s: float, what: str) -> None:
        """Until the reply begins; passes on what is printed meanwhile."""
        assert self._process is not None and self._process.stdout is not None
        printed, num_printed, deadline = self._process.stdout, 0, time.monotonic() + timeout_s
        sources: list[Any] = [connection, printed]
        while connection not in (ready := wait(sources, max(0.0, deadline - time.monotonic()))):
            if not ready or time.monotonic() > deadline:
                self.stop()
                message = f"timed out: {what} took more than {timeout_s:g} s; its process was killed"
                raise PoolError(message, ErrorKind.TIMEOUT)
            num_read = _pass_on(printed)
            num_printed += num_read
            if num_printed > self._max_output_bytes:
                self.stop()
                raise PoolError(self._too_much(f"{what} printed"), ErrorKind.OUTPUT)
            if not num_read:
                sources.remove(printed)
        if printed in ready:
            _pass_on(printed)

    def _receive(self, connection: Connection, what: str) -> bytes:
        try:
            return connection.recv_bytes(self._max_output_bytes)
        except OSError as error:
            if not connection.readable:  # which a message above the limit ends
                self.stop()
                raise PoolError(self._too_much(f"{what} returned"), ErrorKind.OUTPUT) from error
            raise

    def _too_much(self, what: str) -> str:
        return f"{what} more than {self._max_output_bytes} bytes (reward.max_output_mb); its process was killed"


def _pass_on(printed: IO[bytes]) -> int:
    """Copy what was printed to standard error; number of bytes, 0 at its end."""
    chunk = os.read(printed.fileno(), 65536)
    sys.stderr.write(chunk.decode(errors="replace"))
    return len(chunk)


def _heartbeats() -> str | None:
    folder = heartbeat.current().folder
    return None if folder is None else str(folder)


def _kill_session(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nothing is left of it (macOS answers the latter for zombies)
