"""What a process of the pool runs: functions by dotted path, one call after the other, in its main thread."""

import faulthandler
import importlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from rlpost import heartbeat
from rlpost.registry import load_dotted

_GRACE_S = 2.0  # beyond its time limit, a call ends this process even if nobody is left to kill it


@dataclass(slots=True, kw_only=True)
class Call:
    """`path(*args, **kwargs)`, or, with `imports`, what makes its first call quick."""

    path: str
    timeout_s: float
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    imports: Sequence[str] | None = None


def serve(fd: int, heartbeats: str | None = None) -> None:
    """Answer each `Call` on the connection `fd` with `(True, result)` or `(False, message)`, until the end of file."""
    heartbeat.start(heartbeats, heartbeat.numberless("reward"))
    connection = Connection(fd)
    while True:
        try:
            call = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        except Exception as error:  # an argument that does not unpickle here
            connection.send((False, f"{type(error).__name__}: {error}"))
            continue
        faulthandler.dump_traceback_later(call.timeout_s + _GRACE_S, exit=True)
        try:
            with heartbeat.phase("reward", call.path):
                connection.send((True, _answer(call)))
        except BaseException as error:  # the edge of the process: whatever the user's code raises is reported
            where = traceback.extract_tb(error.__traceback__)[-1]
            connection.send((False, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"))
        faulthandler.cancel_dump_traceback_later()


def _answer(call: Call) -> object:
    for module in call.imports or ():
        importlib.import_module(module)
    function = load_dotted(call.path, "reward function")
    assert callable(function), f"{call.path} is not a function"
    return None if call.imports is not None else function(*call.args, **call.kwargs)
