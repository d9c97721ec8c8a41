"""Groups between rollout and training: which may start, in which order they are delivered, and how old they may be.

A pure state machine without clock, tasks or processes: `fully_async.py` drives it with real ones and
`rlpost.tools.simulate` with simulated ones.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlpost.trainer.limits import Limits, OnStale
from rlpost.trajectory import Group, Prompt


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
