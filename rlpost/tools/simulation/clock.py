"""An asyncio event loop whose clock jumps: whoever sleeps wakes at once, at the time it asked for."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits, and no event is due that could wake one."""


class JumpingSelector(selectors.SelectSelector):
    """Never waits for a file: tells how long the loop meant to wait, and returns.

    Args:
        passed: called with seconds.
    """

    def __init__(self, passed: Callable[[float], None]):
        super().__init__()
        self._passed = passed

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector.select`; nothing is ever ready.

        Raises:
            Deadlock: the loop would wait forever.
        """
        if timeout is None:
            raise Deadlock("every task waits for another one")
        self._passed(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Tasks run in the order in which a real loop would run them, were they infinitely fast."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(JumpingSelector(self._pass))

    def time(self) -> float:
        """Seconds since the start."""
        return self._virtual_s

    def _pass(self, seconds: float) -> None:
        self._virtual_s += max(0.0, seconds)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time.

    Raises:
        Deadlock: see there.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
