"""One run a folder: whoever runs in it holds its `lock`, which ends with the process, however that ends.

A child that is started as a program does not inherit it. Whether hosts see each other's locks is up to the file system;
a driver on another host is also told by its heartbeat, where the folder shows that.
"""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from rlpost import heartbeat

logger = logging.getLogger(__name__)

LOCK = "lock"
HEAR_S = 5 * heartbeat.WRITE_S  # in which a driver that lives writes its heartbeat anew
LOOK_S = 0.2


class InUse(ValueError):
    """Another run holds the folder; the message says which."""


@contextmanager
def holding(run_dir: Path, hear_s: float = HEAR_S) -> Iterator[None]:
    """Inside, no other run can hold `run_dir`, which must exist.

    Args:
        run_dir: the run's folder.
        hear_s: how long to listen for a driver of another host, where one has run here before.

    Raises:
        InUse: another run does already.
        OSError: no file can be made there.
    """
    path = run_dir / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(run_dir) from None
        except OSError as error:
            logger.warning("%s: this file system has no locks (%s); see that no other run uses the folder", path, error)
        if _heard_elsewhere(run_dir / heartbeat.FOLDER, hear_s):
            raise _in_use(run_dir)
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _who().encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _who() -> str:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return f"process {os.getpid()} on host {socket.gethostname()}, since {since}"


def _in_use(run_dir: Path) -> InUse:
    holder = (run_dir / LOCK).read_text() or "another process"
    return InUse(f"hydra.run.dir={run_dir} is in use by {holder}: end that run, or choose another folder")


def _heard_elsewhere(folder: Path, within_s: float) -> bool:
    """Whether a driver of another host writes its heartbeat: once more within that time, by no clock but ours."""
    last = _driver(folder)
    if last is None or last.host == socket.gethostname():
        return False
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        if _driver(folder) not in (None, last):
            return True
    return False


def _driver(folder: Path) -> heartbeat.Pulse | None:
    return next((pulse for pulse in heartbeat.read_pulses(folder) if pulse.name == heartbeat.DRIVER), None)
