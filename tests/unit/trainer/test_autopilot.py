"""The autopilot: its advice by hand, that it never breaks what the user set, and that it comes to rest."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.tools.simulation.runs import simulate_async
from rlpost.tools.simulation.scenario import Scenario
from rlpost.trainer.autopilot import MIN_STEPS, Autopilot, Shares, adjusted, balanced_rollout_share
from rlpost.trainer.limits import Limits

USER = Limits(groups_per_step=100, sync_every=2, staleness_threshold=1.0)  # 400 in flight, at most 3 versions behind


def shares(**given):
    return Shares(**({"trainer_idle": 0.0, "rollout_idle": 0.0, "blocked": 0.0, "sync": 0.03} | given))


def test_balanced_share_by_hand():
    """Rollout uses half of 3/4 of the devices, the trainer all of 1/4: 0.375 to 0.25."""
    assert balanced_rollout_share(shares(rollout_idle=0.5), 0.75) == pytest.approx(0.6)
    assert balanced_rollout_share(shares(rollout_idle=0.2, trainer_idle=0.2), 0.5) == pytest.approx(0.5)
    assert balanced_rollout_share(shares(rollout_idle=1.0, trainer_idle=1.0), 0.3) == 0.3


@pytest.mark.parametrize(
    ("now", "capacity", "every"),
    [
        (shares(blocked=1.0), 285, 2),  # no one waits for groups: 5% fewer
        (shares(blocked=0.02), 294, 2),  # hardly blocked: 2% fewer
        (shares(blocked=1.0, trainer_idle=0.02), 300, 2),  # between the thresholds
        (shares(blocked=1.0, trainer_idle=0.1), 330, 2),
        (shares(blocked=1.0, trainer_idle=0.9), 360, 2),  # at most 20% more
        (shares(blocked=1.0, sync=0.2), 300, 3),  # rarer, and nothing else at once
        (shares(blocked=1.0, sync=0.004), 300, 1),
        (shares(blocked=1.0, sync=0.015), 285, 2),  # twice as many syncs would take 3%
    ],
)
def test_one_change_by_hand(now, capacity, every):
    """300 of the user's 400 in flight."""
    changed = adjusted(now, dataclasses.replace(USER, staleness_threshold=0.5), USER)
    assert (changed.capacity, changed.sync_every) == (capacity, every)


def test_capacity_never_falls_below_what_a_sync_interval_needs():
    limits = dataclasses.replace(USER, staleness_threshold=0.0)
    assert adjusted(shares(blocked=1.0), limits, USER).capacity == 200


@given(
    groups=st.integers(1, 600),
    every=st.integers(1, 8),
    threshold=st.floats(0, 4),
    extra=st.none() | st.integers(0, 8),
    running=st.none() | st.integers(1, 500),
    readings=st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=60),
)
def test_limits_stay_within_the_users(groups, every, threshold, extra, running, readings):
    user = limits = Limits(
        groups_per_step=groups,
        sync_every=every,
        staleness_threshold=threshold,
        max_staleness=None if extra is None else every - 1 + extra,
        max_running=running,
    )
    for idle, unused, blocked, sync in readings:
        before = limits
        now = Shares(trainer_idle=idle, rollout_idle=unused, blocked=blocked, sync=sync)
        limits = adjusted(now, limits, user)  # `Limits` refuses a bound that cannot be kept
        assert limits.bound <= user.bound and limits.capacity <= user.capacity
        assert limits.capacity >= limits.sync_every * groups and abs(limits.sync_every - before.sync_every) <= 1
        assert (limits.max_running, limits.on_stale) == (user.max_running, user.on_stale)


def test_autopilot_reports_at_once_and_changes_on_averages():
    pilot, only = (Autopilot(USER, rollout_share=0.5, adjust=adjust) for adjust in (True, False))
    step = {"trainer_idle": 0.0, "rollout_idle": 0.5, "blocked_capacity": 0.6, "blocked_sync": 0.03}
    assert only(step, USER) == (USER, {"balanced_rollout_share": pytest.approx(1 / 3)})
    for _ in range(MIN_STEPS - 1):
        limits, report = pilot(step, USER)
        assert limits is USER and report["capacity"] == 400
    limits, report = pilot(step, USER)
    assert limits.capacity == report["capacity"] == 380 and report["sync_every"] == 2


FAST_ROLLOUT = Scenario(
    devices=8,
    devices_per_replica=1,
    rollout_share=0.75,
    batch=32,
    n=2,
    mean_length=100,
    tail=2.0,
    max_length=1000,
    decode_step_s=0.02,
    train_token_s=5e-3,
    updates=1,
    sync_s=0.1,
    weight_bytes=0.0,
    steps_per_batch=1,
    trigger_parameter_sync_step=2,
    staleness_threshold=2.0,
    batches=30,
    warmup=60,
)


def test_fresher_samples_at_no_cost_where_rollout_is_fast():
    fixed = simulate_async(FAST_ROLLOUT)
    tuned = simulate_async(dataclasses.replace(FAST_ROLLOUT, autobalance=True))
    assert tuned.mean_lag < fixed.mean_lag - 2 and tuned.capacity < 0.5 * FAST_ROLLOUT.limits.capacity
    assert tuned.batch_s < 1.05 * fixed.batch_s
    assert max(tuned.groups_lag) <= FAST_ROLLOUT.limits.bound


def test_nothing_is_taken_from_a_trainer_that_waits():
    slow = dataclasses.replace(FAST_ROLLOUT, rollout_share=0.25, decode_step_s=0.5, warmup=20, batches=20)
    fixed, tuned = simulate_async(slow), simulate_async(dataclasses.replace(slow, autobalance=True))
    assert tuned.capacity == slow.limits.capacity and tuned.batch_s <= 1.01 * fixed.batch_s
