"""One system's process: its output with times, the card's memory meanwhile, and an end that leaves nothing behind."""

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "BENCHMARK_PEERS_RUN"  # in the environment of everything that a system starts
POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`ended` says how: done (it had trained enough and was stopped), exit STATUS or timeout."""

    ended: str
    started_s: float
    peak_memory_mib: int | None


class MemoryPoll:
    """The peak of what `nvidia-smi` calls used on one GPU, five times a second; None where there is no such tool."""

    def __init__(self, gpu: str):
        self.peak_mib: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            screen, terminal = pty.openpty()  # into a pipe it might keep its lines for minutes
            self._process = subprocess.Popen([*query, "-lms", "200"], stdout=terminal)
            os.close(terminal)
            self._reader = threading.Thread(target=self._read, args=(screen,), daemon=True)
            self._reader.start()

    def _read(self, screen: int) -> None:
        with suppress(OSError), open(screen, errors="replace") as lines:  # a terminal that closes is an error
            for line in lines:
                if line.strip().isdigit():
                    self.peak_mib = max(self.peak_mib or 0, int(line))

    def close(self) -> None:
        """Stop polling, and take in what has been said."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()


def gpu_name() -> str:
    """The first GPU that this process may use, as `nvidia-smi --id` takes it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


def run(
    command: Sequence[str], environment: dict[str, str], folder: Path, done: Callable[[], bool], timeout_s: float
) -> Outcome:
    """Run `command` in `folder` until it ends, `done()` or the time is over; then end all that it started.

    Its output goes to `log.txt`, each line as `<Unix time>\\t<line>`. It gets a folder of its own for Ray, so that
    two of these may run side by side.
    """
    token, scratch = uuid.uuid4().hex, tempfile.mkdtemp(prefix="peers")
    env = {**os.environ, **environment, MARK: token, "RAY_TMPDIR": scratch, "PYTHONUNBUFFERED": "1"}
    env.pop("RAY_ADDRESS", None)
    start, memory = time.time(), MemoryPoll(gpu_name())
    try:  # from before it starts: a signal may come at any time
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=_stamp, args=(process, folder / "log.txt"), daemon=True)
        reader.start()
        ended = _wait(process, done, start + timeout_s)
    finally:
        end_family(token)
        memory.close()
        shutil.rmtree(scratch, ignore_errors=True)
    process.wait()
    reader.join(timeout=10)
    return Outcome(ended=ended, started_s=start, peak_memory_mib=memory.peak_mib)


def _wait(process: subprocess.Popen[str], done: Callable[[], bool], deadline: float) -> str:
    while True:
        if done():
            return "done"
        if process.poll() is not None:
            return "done" if done() else f"exit {process.returncode}"
        if time.time() > deadline:
            return "timeout"
        time.sleep(POLL_S)


def _stamp(process: subprocess.Popen[str], path: Path) -> None:
    assert process.stdout is not None
    with open(path, "w") as log:
        for line in process.stdout:
            log.write(f"{time.time():.3f}\t{line}" if line.endswith("\n") else f"{time.time():.3f}\t{line}\n")
            log.flush()


@contextmanager
def turn(name: str) -> Iterator[None]:
    """Wait until no other process of this host is in a turn of that name."""
    with open(Path(tempfile.gettempdir()) / f"benchmark-peers-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def family(token: str, mark: str = MARK) -> set[int]:
    """Processes whose environment has `token` as `mark`, and their descendants (which may have overwritten theirs)."""
    needle, found, children = f"{mark}={token}".encode(), set(), defaultdict(list)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(path.name))
            if needle in (path / "environ").read_bytes():
                found.add(int(path.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    queue = list(found)
    while queue:
        young = [pid for pid in children[queue.pop()] if pid not in found]
        found.update(young)
        queue += young
    return found


def end_family(token: str, mark: str = MARK, patience_s: float = 30.0) -> None:
    """Kill them until none is left.

    Raises:
        RuntimeError: some stay.
    """
    deadline = time.time() + patience_s
    while pids := family(token, mark):
        if time.time() > deadline:
            raise RuntimeError(f"processes {sorted(pids)} do not end")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
