"""How busy the two sides of an asynchronous run were: time integrals of what ran and what was blocked."""

import time
from collections import defaultdict
from collections.abc import Callable


class IdleMeter:
    """Shares of the time since the last `pop`.

    `set(running, room, blocked)` tells it of every change of state; `waiting(True)` and `waiting(False)` when the
    trainer begins and ends to wait for groups.

    Args:
        clock: seconds; a simulator has its own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since = self._started = clock()
        self._busy, self._waiting = 0.0, False
        self._blocked: str | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def set(self, running: int, room: int, blocked: str | None) -> None:
        """From now on `running` of `room` groups run; `blocked` says why no more are started, if so."""
        self._advance()
        self._busy, self._blocked = min(1.0, running / room), blocked

    def waiting(self, waiting: bool) -> None:
        """From now on the trainer does, or does not, wait for groups."""
        self._advance()
        self._waiting = waiting

    def pop(self) -> dict[str, float]:
        """`trainer_idle`, `rollout_idle` and `blocked_<reason>` as shares of the time since the last call."""
        self._advance()
        total = max(self._since - self._started, 1e-9)
        self._started = self._since
        shares = {name: seconds / total for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return {"trainer_idle": 0.0, "rollout_idle": 0.0} | shares

    def _advance(self) -> None:
        now = self._clock()
        passed, self._since = now - self._since, now
        self._seconds["rollout_idle"] += passed * (1 - self._busy)
        if self._blocked:
            self._seconds[f"blocked_{self._blocked}"] += passed
        if self._waiting:
            self._seconds["trainer_idle"] += passed
