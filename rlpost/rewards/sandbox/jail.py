"""Run code that nobody trusts: `run_script` and `run_tests`, and `check`, which says what this host cannot prevent."""

import contextlib
import functools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from rlpost.rewards.limits import CallLimits, ErrorKind, Sandbox

logger = logging.getLogger(__name__)

_ROOT = str(Path(__file__).parents[3])
_START = f"import sys; sys.path.insert(0, {_ROOT!r}); from rlpost.rewards.sandbox.child import main; main()"
_STARTUP_S = 60.0
_TICK_S = 0.05  # how often threads and files are counted
_MAX_THREADS, _MAX_FILES, _MAX_OPEN = 64, 1000, 64
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the same code prints the same, also where it prints a set
}
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/urandom", "/dev/zero")

# What a program in the sandbox must not manage; it prints what it managed.
_PROBE = """
import os, socket
def attempt(name, act):
    try:
        act()
    except OSError:
        return
    print(name)
attempt("files", lambda: open("/etc/passwd").close())
attempt("files", lambda: os.listdir("/"))
attempt("network", lambda: socket.socket().close())
attempt("processes", lambda: os.fork() or os._exit(0))
"""


class SandboxError(Exception):
    """The sandbox itself failed, before any of the code in it ran."""

    kind = ErrorKind.SANDBOX


@dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        output: what it printed, up to the limit.
        fine: it ended by itself with exit status 0, within all limits.
        timed_out: it was ended at its time limit.
        complaint: the last line it wrote to standard error.
    """

    output: bytes
    fine: bool
    timed_out: bool = False
    complaint: str = ""


def check(sandbox: Sandbox) -> None:
    """See that this host can do what `reward.sandbox` demands.

    Raises:
        ValueError: it cannot; says what is missing.
    """
    if problem := _probe(sandbox):
        raise ValueError(
            f"reward.sandbox={sandbox}: this host cannot shut the model's code in: {problem}. It takes Linux >= 5.13 "
            "with Landlock, and libseccomp (apt-get install libseccomp2), both allowed by the container's own profile. "
            "reward.sandbox=limits runs the code with limits of time, memory and output alone: it can then read your "
            "files, use the network and start processes"
        )
    if sandbox is Sandbox.LIMITS:
        logger.warning("reward.sandbox=limits: the model's code can read your files, use the network, start processes")


@functools.cache
def _probe(sandbox: Sandbox) -> str:
    try:
        outcome = run_script(_PROBE, b"", CallLimits(timeout_s=10.0, sandbox=sandbox))
    except SandboxError as error:
        return str(error)
    if not outcome.fine:
        return f"a trial program did not come to its end ({outcome.complaint})"
    open_ways = sorted(set(outcome.output.decode().split()))
    return f"a trial program could reach: {', '.join(open_ways)}" if open_ways and sandbox is Sandbox.FULL else ""


def run_script(source: str, stdin: bytes, limits: CallLimits) -> Outcome:
    """Run `source` as a program that reads `stdin`.

    Raises:
        SandboxError: it was not started.
    """
    with _Process("script", source, limits, stdin=stdin) as process:
        process.wait_ready()
        timed_out = _watch(process, [process], limits)
        return process.outcome(timed_out)


def run_tests(source: str, tests: str, limits: CallLimits) -> Outcome:
    """Run `tests` against what `source` defines, each in a sandbox of its own; `fine`: the tests came to their end.

    Raises:
        SandboxError: they were not started.
        ValueError: the tests pass something to the code that cannot travel between processes, or do not use it.
    """
    with contextlib.ExitStack() as stack:
        (read_request, write_request), (read_reply, write_reply) = os.pipe(), os.pipe()
        fds = [read_request, write_request, read_reply, write_reply]
        stack.callback(_close, fds)
        code = stack.enter_context(_Process("candidate", source, limits, read=read_request, write=write_reply))
        tester = stack.enter_context(_Process("tester", tests, limits, read=read_reply, write=write_request))
        _close(fds)
        code.wait_ready()
        tester.wait_ready()
        timed_out = _watch(tester, [code, tester], limits)
        outcome = tester.outcome(timed_out)
    is_told = outcome.fine and outcome.output  # tests may end their process as they like, which is no verdict
    verdict = json.loads(outcome.output) if is_told else {"failed": "the tests did not come to their end"}
    if "unsupported" in verdict:
        raise ValueError(verdict["unsupported"])
    return Outcome(output=verdict.get("failed", "").encode(), fine=verdict == {}, timed_out=timed_out)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


class _Process:
    """A process in its sandbox, with an empty folder; both are gone at the end of the context."""

    def __init__(
        self, role: str, source: str, limits: CallLimits, stdin: bytes = b"", read: int | None = None,
        write: int | None = None,
    ):  # fmt: skip
        self.limits = limits
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:  # undone should the start fail
            self.folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            Path(self.folder, "main.py").write_text(source, encoding="utf-8", errors="surrogatepass")
            self.stdout: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self.stderr: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            given = stack.enter_context(_readable(stdin))
            self._ready, ready = os.pipe()
            stack.callback(os.close, self._ready)
            spec = _spec(limits) | {"role": role, "folder": self.folder, "ready_fd": ready}
            spec |= {"read_fd": read, "write_fd": write}
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-S", "-s", "-B", "-P", "-X", "utf8", "-c", _START, json.dumps(spec)],
                    stdin=given,
                    stdout=self.stdout,
                    stderr=self.stderr,
                    pass_fds=[fd for fd in (ready, read, write) if fd is not None],
                    env=_ENVIRONMENT | {"HOME": self.folder, "TMPDIR": self.folder},
                    start_new_session=True,
                )
            finally:
                os.close(ready)
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_ready(self) -> None:
        """Until it has shut itself in; only then it looks at the code."""
        if wait([self._ready], _STARTUP_S) and os.read(self._ready, 1):
            return
        self._end()
        raise SandboxError(f"it did not start ({self._complaint() or f'not within {_STARTUP_S:g} s'})")

    def exceeds(self) -> bool:
        """Whether it has too many threads, or too much in its folder."""
        return _num_threads(self.process.pid) > _MAX_THREADS or _is_full(self.folder, self.limits.max_output_bytes)

    def outcome(self, timed_out: bool) -> Outcome:
        """How it ended, once it has."""
        output = self._read(self.stdout, self.limits.max_output_bytes)
        is_cut = len(output) >= self.limits.max_output_bytes
        fine = self.process.returncode == 0 and not is_cut
        return Outcome(output=output, fine=fine, timed_out=timed_out, complaint=self._complaint())

    def _complaint(self) -> str:
        lines = self._read(self.stderr, 20_000).decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    @staticmethod
    def _read(file: IO[bytes], num_bytes: int) -> bytes:
        file.seek(0)
        return file.read(num_bytes)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _watch(main: _Process, processes: list[_Process], limits: CallLimits) -> bool:
    """Wait until `main` ends; end it at its time limit, or when one of `processes` takes too much. Was it the time?"""
    deadline = time.monotonic() + limits.timeout_s
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            main.process.wait(min(_TICK_S, left))
            return False
        if any(process.exceeds() for process in processes):
            break
    main._end()
    return left <= 0


def _spec(limits: CallLimits) -> dict[str, Any]:
    """What `child.py` is told about any process."""
    known = sysconfig.get_paths()
    standard = [known["stdlib"], os.path.join(known["stdlib"], "lib-dynload")]
    path = list(dict.fromkeys([*standard, known["purelib"], known["platlib"]]))
    prefixes = (os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, "lib"))
    return {
        "parent": os.getpid(),
        "isolate": limits.sandbox is Sandbox.FULL,
        "memory_bytes": limits.memory_bytes,
        "cpu_s": math.ceil(limits.timeout_s) + 1,
        "max_output_bytes": limits.max_output_bytes,
        "max_files": _MAX_OPEN,
        "path": path,
        "readable": list(dict.fromkeys([*path, *prefixes, *_SYSTEM, *_DEVICES])),
    }


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[IO[bytes]]:
    """`content` as a file that can only be read."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with open(file.name, "rb") as again:
            yield again


def _num_threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) for line in status if line.startswith("Threads:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _is_full(folder: str, max_bytes: int) -> bool:
    """Whether there are more than `_MAX_FILES` files, or more than `max_bytes` in them."""
    num_files = num_bytes = 0
    for parent, folders, files in os.walk(folder):
        num_files += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                num_bytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
        if num_files > _MAX_FILES or num_bytes > max_bytes:
            return True
    return False
