"""Notices that a run makes no progress: compares the heartbeats of all processes with `trainer.timeouts`.

Times are those at which the driver's own clock saw a heartbeat change, so clocks of nodes need not agree.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlpost.heartbeat import DRIVER, Pulse

logger = logging.getLogger(__name__)

SILENT_S = 30.0  # a process that is not heard of for longer is stopped, dead, or on a node without the run folder
PAUSE_S = 20.0  # between two looks: this process was stopped itself (Ctrl-Z, a moved machine)

# whose progress is also that of the driver, which waits for them in this phase
FEEDS = {
    "start": {"start", "generate", "infer", "publish"},
    "generate": {"generate", "publish"},
    "validate": {"generate", "infer", "publish"},
    "infer": {"infer"},
    "train": {"train"},
    "publish": {"publish"},
    "save": {"save"},
}


@dataclass(slots=True, kw_only=True)
class Seen:
    """A process as the watchdog saw it last.

    Attributes:
        moved: when it last made progress, by the watchdog's clock.
        heard: when it last wrote.
    """

    pulse: Pulse
    moved: float
    heard: float


@dataclass(slots=True, frozen=True, kw_only=True)
class Stall:
    """A process that has made no progress for `stuck_s`, longer than `limit_s` of its phase."""

    pulse: Pulse
    stuck_s: float
    limit_s: float


class Watchdog:
    """Looks at all processes again and again.

    A process stalls when it is in a phase and makes no progress for longer than the phase's limit. The driver mostly
    waits for others: what they achieve in the phase for which it waits is its progress too (`FEEDS`). One that is not
    heard of is not judged by itself, since it may have been ended on purpose; the driver, who waits for it, is.

    Args:
        limits: phase -> seconds; None or no entry: no limit.
        read: what all processes say, the driver among them.
        clock: seconds.

    Attributes:
        seen: every process by name.
        looked: when `look` was called last.
    """

    def __init__(
        self,
        limits: Mapping[str, float | None],
        read: Callable[[], Iterable[Pulse]],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limits, self._read, self._clock = limits, read, clock
        self.looked = clock()
        self.seen: dict[str, Seen] = {}

    def look(self) -> list[Stall]:
        """Who has stalled by now; the driver last, since others are more likely the cause."""
        now = self._clock()
        if now - self.looked > PAUSE_S:
            self._forgive(now - self.looked)
        self.looked = now
        for pulse in self._read():
            self._note(pulse, now)
        self._feed_driver()
        stalls = [self._judge(one, now) for one in self.seen.values()]
        return sorted(filter(None, stalls), key=lambda stall: (stall.pulse.name == DRIVER, stall.pulse.name))

    def alive(self) -> list[Seen]:
        """Processes that matter: not those that have fallen silent while they waited for work or scored an answer."""
        return [one for one in self.seen.values() if self.is_heard(one) or one.pulse.phase in self._limits]

    def is_heard(self, one: Seen) -> bool:
        """Whether it lives and its files reach us."""
        return self.looked - one.heard < SILENT_S

    def _note(self, pulse: Pulse, now: float) -> None:
        before = self.seen.get(pulse.name)
        if before is None or before.pulse.pid != pulse.pid:
            self.seen[pulse.name] = Seen(pulse=pulse, moved=now, heard=now)
            return
        if pulse.beats != before.pulse.beats:
            before.moved = now
        if pulse.written != before.pulse.written:
            before.heard = now
        before.pulse = pulse

    def _feed_driver(self) -> None:
        driver = self.seen.get(DRIVER)
        if driver is not None:
            feeding = FEEDS.get(driver.pulse.phase, set())
            moved = [one.moved for one in self.seen.values() if one.pulse.phase in feeding]
            driver.moved = max([driver.moved, *moved])

    def _judge(self, one: Seen, now: float) -> Stall | None:
        limit_s = self._limits.get(one.pulse.phase)
        stuck_s = now - one.moved
        if limit_s is None or stuck_s <= limit_s:
            return None
        if one.pulse.name != DRIVER and not self.is_heard(one):
            return None
        return Stall(pulse=one.pulse, stuck_s=stuck_s, limit_s=limit_s)

    def _forgive(self, pause_s: float) -> None:
        logger.warning("the driver was stopped for %.0f s; no process is blamed for that", pause_s)
        for one in self.seen.values():
            one.moved += pause_s
            one.heard += pause_s
