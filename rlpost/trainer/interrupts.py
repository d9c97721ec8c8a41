"""Ctrl-C and SIGTERM while a run trains."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from rlpost.endings import RESUMABLE
from rlpost.trainer.watch import end_now

AT_ONCE_S = 1.0  # signals closer together than this are one: `timeout` and terminals send several
CLEAN_UP_S = 10.0  # beyond the grace period, for processes to be ended in good order


class Stoppable(Protocol):
    """What ends after its present step, with a checkpoint, once it is asked to."""

    stop_requested: bool


class Interrupts:
    """First signal: end after the present step, with a checkpoint. Second Ctrl-C: at once.

    SIGTERM comes from a scheduler that will kill: a step that does not end within the grace period is given up, and
    `CLEAN_UP_S` later the process ends, whatever holds it up.

    Args:
        grace_period_s: None: wait for the step.
        end: called with an exit status and a message when nothing else ends the process.

    Attributes:
        stopped_by: name of the first signal, or SIGTERM once that has come.
        expired: whether the grace period was over first.
    """

    def __init__(self, grace_period_s: float | None, end: Callable[[int, str], object] = end_now):
        self.stopped_by: str | None = None
        self.expired = False
        self._grace_period_s, self._end = grace_period_s, end
        self._first: float | None = None
        self._deadline: threading.Timer | None = None

    @contextmanager
    def stop(self, trainer: Stoppable, note: Callable[[str], object]) -> Iterator[None]:
        """Signals stop `trainer`, which the present task runs; `note` tells the user."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def give_up() -> None:
            self.expired = True
            task.cancel()

        def handle(number: int) -> None:
            if self._first is None:
                self._first = time.monotonic()
                trainer.stop_requested = True
                note(f"{'interrupted' if number == signal.SIGINT else 'SIGTERM'}: {self._promise(number)}")
            elif number == signal.SIGINT and time.monotonic() - self._first > AT_ONCE_S:
                task.cancel()
            if number == signal.SIGTERM and self.stopped_by != "SIGTERM" and self._grace_period_s is not None:
                loop.call_later(self._grace_period_s, give_up)
            self.stopped_by = "SIGTERM" if "SIGTERM" in (self.stopped_by, signal.Signals(number).name) else "SIGINT"

        def receive(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGTERM:
                self._set_deadline()
            loop.call_soon_threadsafe(handle, number)

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            loop.add_signal_handler(number, lambda: None)  # wakes the loop
            signal.signal(number, receive)  # in place of asyncio's, which a loop that hangs would never come to
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler or signal.SIG_DFL)  # of asyncio and launch: end what was started

    def close(self) -> None:
        """The process ends by itself."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _promise(self, number: int) -> str:
        if number == signal.SIGINT:
            return "finishing this step and saving a checkpoint (once more to stop at once)"
        limit = "" if self._grace_period_s is None else f", within trainer.grace_period_s={self._grace_period_s:g}"
        return f"finishing this step and saving a checkpoint{limit}"

    def _set_deadline(self) -> None:
        if self._deadline is None and self._grace_period_s is not None:
            message = "SIGTERM: the run did not end within its grace period; the last checkpoint is kept"
            seconds = self._grace_period_s + CLEAN_UP_S
            self._deadline = threading.Timer(seconds, self._end, (RESUMABLE, message))
            self._deadline.daemon = True
            self._deadline.start()
