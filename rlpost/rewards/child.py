"""What a process of the pool runs: functions by dotted path, one call after the other, in its main thread."""

import contextlib
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from rlpost import heartbeat
from rlpost.registry import load_dotted
from rlpost.rewards.limits import ErrorKind, limit_growth

_GRACE_S = 2.0  # beyond its time limit, a call ends this process even if nobody is left to kill it
_MAX_CHARS = 2000  # of an error's message


@dataclass(slots=True, kw_only=True)
class Call:
    """`path(*args, **kwargs)`, or, with `imports`, what makes its first call quick.

    `memory_bytes` limits, from the end of the imports on, what this and later calls allocate.
    """

    path: str
    timeout_s: float
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    imports: Sequence[str] | None = None
    memory_bytes: int | None = None


def serve(fd: int, heartbeats: str | None = None) -> None:
    """Answer each `Call` on the connection `fd` with `(None, result)` or `(kind of error, message)`, until it ends."""
    heartbeat.start(heartbeats, heartbeat.numberless("reward"))
    os.set_inheritable(fd, False)  # else what a call starts would keep the line open when this process is killed
    connection = Connection(fd)
    while True:
        try:
            call = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        except Exception as error:  # an argument that does not unpickle here
            connection.send((ErrorKind.EXCEPTION, f"{type(error).__name__}: {error}"))
            continue
        faulthandler.dump_traceback_later(call.timeout_s + _GRACE_S, exit=True)
        try:
            with heartbeat.phase("reward", call.path):
                result = _answer(call)
            with contextlib.suppress(ValueError):  # the function closed it
                sys.stdout.flush()  # what was printed belongs to this call
            connection.send((None, result))
        except BaseException as error:  # the edge of the process: whatever the user's code raises is reported
            connection.send((_kind(error), _describe(error)))
        faulthandler.cancel_dump_traceback_later()


def _answer(call: Call) -> object:
    for module in call.imports or ():
        importlib.import_module(module)
    function = load_dotted(call.path, "reward function")
    assert callable(function), f"{call.path} is not a function"
    if call.imports is None:
        return function(*call.args, **call.kwargs)
    if call.memory_bytes is not None:
        limit_growth(call.memory_bytes)
    return None


def _kind(error: BaseException) -> ErrorKind:
    if isinstance(error, MemoryError):
        return ErrorKind.MEMORY
    kind = getattr(error, "kind", None)
    return kind if isinstance(kind, ErrorKind) else ErrorKind.EXCEPTION


def _describe(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:_MAX_CHARS]} ({where.filename}:{where.lineno})"
