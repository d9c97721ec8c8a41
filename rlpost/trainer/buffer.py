"""Groups between rollout and training: which may start, in which order they are delivered, and how old they may be.

A pure state machine without clock, tasks or processes: `fully_async.py` drives it with real ones and
`rlpost.tools.simulate` with simulated ones.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlpost.batch import Group, Prompt


class OnStale(StrEnum):
    """What becomes of a group that would be trained more than `max_staleness` versions after its first token."""

    WAIT = "wait"  # it is not started before a sync makes it young enough
    DROP = "drop"  # when its turn comes it is dropped, and its prompt issued anew
    ABORT = "abort"  # the sync that makes it too old cuts it off (or drops it), and its prompt is issued anew


class Blocked(StrEnum):
    """Why no group may be started."""

    CAPACITY = "capacity"  # `Limits.capacity` are in flight
    STALENESS = "staleness"  # one started now would be too old when its turn comes
    CONCURRENCY = "concurrency"  # `Limits.max_running` are running


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one group in the order of issue. It is running, finished (`group`), or waits to be run again."""

    prompt: Prompt
    version: int  # of the engines' weights when it was last started: no token of it is older
    running: bool = True
    group: Group | None = None
    gone: bool = False  # delivered or dropped: what still arrives for it is ignored

    @property
    def waiting(self) -> bool:
        """Neither running nor finished."""
        return not self.running and self.group is None

    @property
    def first_version(self) -> int:
        """Version of its oldest token, or of the weights it started under while that is not known."""
        if self.group is None:
            return self.version
        sampled = [t.versions[t.versions >= 0] for t in self.group.trajectories]
        return min((int(versions.min()) for versions in sampled if len(versions)), default=self.version)


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """What bounds the buffer. Versions count training steps: version v is what step v left behind.

    Attributes:
        groups_per_step: G, groups that one step trains.
        sync_every: k, steps from one weight sync to the next (`trainer.trigger_parameter_sync_step`).
        staleness_threshold: share of a sync interval's groups that may be generated ahead (verl's term).
        max_staleness: versions between a group's first token and the weights it trains; None: what the capacity allows.
        on_stale: see `OnStale`.
        max_running: groups that run at once; None: as many as are in flight.

    Raises:
        ValueError: a bound that the last step before a sync could not keep.
    """

    groups_per_step: int
    sync_every: int = 1
    staleness_threshold: float = 0.0
    max_staleness: int | None = None
    on_stale: OnStale = OnStale.WAIT
    max_running: int | None = None

    def __post_init__(self) -> None:
        assert min(self.groups_per_step, self.sync_every, self.max_running or 1) >= 1 and self.staleness_threshold >= 0
        if self.max_staleness is not None and self.max_staleness < self.sync_every - 1:
            raise ValueError(
                f"trainer.max_staleness={self.max_staleness} with trainer.trigger_parameter_sync_step="
                f"{self.sync_every}: the last step before a sync trains on samples of weights that are "
                f"{self.sync_every - 1} versions behind. Raise max_staleness to at least {self.sync_every - 1}, or "
                f"sync every {self.max_staleness + 1} steps or oftener"
            )

    @property
    def capacity(self) -> int:
        """Groups started and not yet part of weights that the engines hold: (1 + threshold) k G, rounded down."""
        return math.floor((1 + self.staleness_threshold) * self.sync_every * self.groups_per_step + 1e-9)

    @property
    def bound(self) -> int:
        """Versions that no delivered group exceeds: `max_staleness`, or what the capacity implies where that is less.

        In flight after a sync are at most `capacity` groups; the last of them is trained ceil(capacity / G) steps on.
        """
        by_capacity = math.ceil(self.capacity / self.groups_per_step) - 1
        return by_capacity if self.max_staleness is None else min(by_capacity, self.max_staleness)


class GroupBuffer:
    """Slots in the order of issue; groups leave in that order, however long each took.

    "First finished, first trained" would favour short answers. A slot counts against the capacity until the step that
    trained it has been synced: only then may rollout run further ahead.

    Attributes:
        limits: may be replaced between steps; smaller ones take effect as slots become free.
        version: of the weights that the engines hold.
        step: which the next delivered groups are for.
        counts: what happened to groups, by name; whoever reads it may clear it.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.version = 0
        self.step = 1
        self.counts: Counter[str] = Counter()
        self._slots: deque[Slot] = deque()
        # of those, so that no call looks at all slots: there are tens of thousands on a large cluster
        self._running: set[Slot] = set()
        self._waiting: set[Slot] = set()
        self._reissued: deque[Prompt] = deque()
        self._delivered: Counter[int] = Counter()  # by step, those that are not part of the engines' weights yet

    @property
    def slots(self) -> list[Slot]:
        """Undelivered slots in the order of issue."""
        return list(self._slots)

    @property
    def num_running(self) -> int:
        """Groups being generated."""
        return len(self._running)

    @property
    def in_flight(self) -> int:
        """What counts against the capacity."""
        return len(self._slots) + self._delivered.total()

    def blocked(self) -> Blocked | None:
        """Why no new group may be started; None: one may."""
        if self._all_running():
            return Blocked.CONCURRENCY
        if self.in_flight >= self.limits.capacity:
            return Blocked.CAPACITY
        if self.limits.on_stale is OnStale.WAIT and self._staleness(len(self._slots), self.version) > self.limits.bound:
            return Blocked.STALENESS
        return None

    def waiting(self) -> Slot | None:
        """The first slot to be run again, before any new one is issued; None: there is none, or none may run now."""
        if not self._waiting or self._all_running():
            return None
        return next(slot for slot in self._slots if slot in self._waiting)

    def issue(self, prompt: Prompt) -> Slot:
        """A new slot, running. Ask `blocked` first."""
        reason = self.blocked()
        assert reason is None, f"issued although blocked by {reason}"
        self._slots.append(slot := Slot(prompt, self.version))
        self._running.add(slot)
        return slot

    def restart(self, slot: Slot) -> None:
        """Run a `waiting` slot."""
        assert slot.waiting and not slot.gone
        slot.running, slot.version = True, self.version
        self._waiting.remove(slot)
        self._running.add(slot)

    def put(self, slot: Slot, group: Group) -> None:
        """The finished group of a running slot; ignored where the slot is gone."""
        if slot.gone:
            return
        assert slot.running, f"group '{group.id}' arrived twice"
        slot.running, slot.group = False, group
        self._running.discard(slot)

    def fail(self, slot: Slot, *, drop: bool) -> None:
        """The group could not be made: `drop` its slot, or let it wait to be run again in its place."""
        if slot.gone:
            return
        slot.running = False
        self.counts["failed_dropped" if drop else "failed_reissued"] += 1
        if drop:
            self._remove(slot)
        else:
            self._running.discard(slot)
            self._waiting.add(slot)

    def take(self) -> Group | None:
        """The next group in the order of issue; None while it is not finished.

        A group that has become too old is dropped instead, and its prompt comes out of `reissued`.
        """
        while self._slots and self._slots[0].group is not None:
            slot = self._slots[0]
            if self._staleness(0, slot.first_version) > self.limits.bound:
                self._reissue(slot, "dropped_stale")
                continue
            self._remove(slot)
            self._delivered[self.step] += 1
            return slot.group
        return None

    def put_back(self) -> None:
        """The group just taken is not trained after all: its slot becomes free."""
        self._delivered[self.step] -= 1

    def end_step(self) -> None:
        """`step` has its groups; what is taken from now on is for the next one."""
        self.step += 1

    def publish(self, version: int) -> list[Slot]:
        """The engines hold `version`: slots of trained groups become free. Returns running slots that are cut off."""
        self.version = version
        self._delivered = Counter({step: count for step, count in self._delivered.items() if step > version})
        cut_off: list[Slot] = []
        if self.limits.on_stale is OnStale.ABORT:
            position = 0
            for slot in self.slots:
                if slot.waiting or self._staleness(position, slot.first_version) <= self.limits.bound:
                    position += 1
                    continue
                if slot.running:
                    cut_off.append(slot)
                self._reissue(slot, "aborted_stale" if slot.running else "dropped_stale")
        return cut_off

    def reissued(self) -> Prompt | None:
        """A prompt whose group was too old, to be issued before new ones; removes it."""
        return self._reissued.popleft() if self._reissued else None

    def rewind(self, prompts: Sequence[Prompt]) -> None:
        """Undo the last step: its `prompts` are to be run again, before all others."""
        self.step -= 1
        self._delivered.pop(self.step, None)
        again = [Slot(prompt, self.version, running=False) for prompt in prompts]
        self._slots.extendleft(reversed(again))
        self._waiting.update(again)

    def rerun(self) -> None:
        """All undelivered groups, finished or not, are to be run again in their places."""
        state = self.state_dict()
        self.load_state_dict(state | {"slots": [(prompt, version, None) for prompt, version, _ in state["slots"]]})

    def state_dict(self) -> dict[str, Any]:
        """All slots; those that run now will wait to be run again."""
        return {
            "version": self.version,
            "step": self.step,
            "delivered": list(self._delivered.items()),
            "slots": [(slot.prompt, slot.version, slot.group) for slot in self._slots],
            "reissued": list(self._reissued),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; slots of before are gone."""
        for slot in self._slots:
            slot.gone = True
        self.version, self.step = state["version"], state["step"]
        self._delivered = Counter(dict(state["delivered"]))
        self._slots = deque(Slot(prompt, version, False, group) for prompt, version, group in state["slots"])
        self._running = set()
        self._waiting = {slot for slot in self._slots if slot.waiting}
        self._reissued = deque(state["reissued"])

    def _all_running(self) -> bool:
        return self.limits.max_running is not None and self.num_running >= self.limits.max_running

    def _staleness(self, position: int, first_version: int) -> int:
        """Versions behind at its turn, for the undelivered slot number `position`."""
        step = self.step + (self._delivered[self.step] + position) // self.limits.groups_per_step
        return step - 1 - first_version

    def _reissue(self, slot: Slot, reason: str) -> None:
        self._remove(slot)
        self._reissued.append(slot.prompt)
        self.counts[reason] += 1

    def _remove(self, slot: Slot) -> None:
        slot.gone = True
        self._running.discard(slot)
        self._waiting.discard(slot)
        if self._slots[0] is slot:
            self._slots.popleft()
        else:
            self._slots.remove(slot)
