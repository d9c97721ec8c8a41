"""What idle times say about an asynchronous run: how to divide the devices, and how far rollout should run ahead.

Nothing here makes samples older than the settings allow: capacity and staleness bound are never above the user's.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.trainer.limits import Limits

IDLE_LOW, IDLE_HIGH = 0.01, 0.03  # of the trainer: below, rollout is farther ahead than it need be; above, not enough
SYNC_LOW, SYNC_HIGH = 0.02, 0.05  # share of time in which weight syncs hold rollout
FEWER, MORE = 0.05, 0.2  # largest change of the groups in flight at once
MIN_STEPS = 4  # between two changes: the one before must have had an effect


@dataclass(slots=True, frozen=True, kw_only=True)
class Shares:
    """Shares of time, as `IdleMeter` names them.

    Attributes:
        trainer_idle: the trainer waited for groups.
        rollout_idle: room for groups was not used.
        blocked: capacity or staleness allowed no more groups.
        sync: rollout was held by weight syncs.
    """

    trainer_idle: float
    rollout_idle: float
    blocked: float
    sync: float

    @staticmethod
    def of(shares: Mapping[str, float]) -> "Shares":
        """Out of `IdleMeter.pop`."""
        return Shares(
            trainer_idle=shares["trainer_idle"],
            rollout_idle=shares["rollout_idle"],
            blocked=shares.get("blocked_capacity", 0.0) + shares.get("blocked_staleness", 0.0),
            sync=shares.get("blocked_sync", 0.0),
        )


def balanced_rollout_share(shares: Shares, rollout_share: float) -> float:
    """Share of the devices for rollout with which both sides would be equally busy.

    Busy device-time a batch is b_r = (1 - rollout_idle) R and b_t = (1 - trainer_idle) T for the shares R and T = 1 - R
    of now. Were it the same on other numbers of devices, both sides would be busy all the time at b_r / (b_r + b_t).
    """
    rollout = (1 - shares.rollout_idle) * rollout_share
    trainer = (1 - shares.trainer_idle) * (1 - rollout_share)
    return rollout / (rollout + trainer) if rollout + trainer > 0 else rollout_share


def adjusted(shares: Shares, limits: Limits, user: Limits) -> Limits:
    """`limits`, one bounded step nearer to a run whose trainer does not wait, on the freshest samples that allows.

    - The trainer does not wait, and capacity or staleness hold rollout back: it is farther ahead than it need be, so
      fewer groups in flight. They are trained sooner after they were started, at no cost.
    - The trainer waits: more groups in flight, up to the user's.
    - Syncs hold rollout for much of the time: rarer. For little, and little still if there were more: oftener, which
      frees slots earlier and makes running answers fresher.

    Between the thresholds nothing moves, so it comes to rest. Syncs come first: without a sync, all of an interval's
    groups must be in flight.

    Args:
        shares: since the last change.
        limits: of now: `user`, or what this function made of it.
        user: the settings; `capacity`, `bound` and `max_running` of what is returned are at most theirs.
    """
    every, longest = limits.sync_every, min(user.capacity // user.groups_per_step, user.bound + 1)
    if shares.sync > SYNC_HIGH:
        every += 1
    elif every > 1 and shares.sync * every / (every - 1) < SYNC_LOW:
        every -= 1
    every = max(1, min(every, longest))
    capacity = limits.capacity
    if shares.trainer_idle > IDLE_HIGH:
        capacity += math.ceil(capacity * min(shares.trainer_idle, MORE))
    elif shares.trainer_idle < IDLE_LOW and every == limits.sync_every:  # one thing at a time
        capacity -= math.ceil(capacity * min(shares.blocked, FEWER))
    capacity = max(every * user.groups_per_step, min(capacity, user.capacity))
    return dataclasses.replace(
        user,
        sync_every=every,
        staleness_threshold=capacity / (every * user.groups_per_step) - 1,
        max_staleness=user.bound,
    )


class Autopilot:
    """Called with the idle shares of each step; averages them and now and then changes the limits.

    Args:
        user: the settings.
        rollout_share: of the devices.
        adjust: change the limits (`trainer.autobalance`), or only report.
    """

    def __init__(self, user: Limits, *, rollout_share: float, adjust: bool):
        self._user, self._rollout_share, self._adjust = user, rollout_share, adjust
        self._sums: Counter[str] = Counter()
        self._steps = 0

    def __call__(self, shares: Mapping[str, float], limits: Limits) -> tuple[Limits, dict[str, float]]:
        """Limits for the next step, and what to report: the balanced split, and what may change."""
        report = {"balanced_rollout_share": balanced_rollout_share(Shares.of(shares), self._rollout_share)}
        if not self._adjust:
            return limits, report
        self._sums.update(shares)
        self._steps += 1
        if self._steps >= max(MIN_STEPS, 2 * limits.sync_every):  # a step with a sync is unlike one without
            mean = {name: total / self._steps for name, total in self._sums.items()}
            limits = adjusted(Shares.of(mean), limits, self._user)
            self._sums.clear()
            self._steps = 0
        return limits, report | {"capacity": float(limits.capacity), "sync_every": float(limits.sync_every)}
