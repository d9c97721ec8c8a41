"""What bounds the groups between rollout and training; no torch here, so that a config can be checked by it."""

import math
from dataclasses import dataclass
from enum import StrEnum


class OnStale(StrEnum):
    """What becomes of a group that would be trained more than `max_staleness` versions after its first token."""

    WAIT = "wait"  # it is not started before a sync makes it young enough
    DROP = "drop"  # when its turn comes it is dropped, and its prompt issued anew
    ABORT = "abort"  # the sync that makes it too old cuts it off (or drops it), and its prompt is issued anew


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
