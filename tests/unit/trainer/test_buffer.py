"""`GroupBuffer` by hand: capacity, bound, what may start, order, and what becomes of groups that are too old."""

import pickle

import pytest

from rlpost.trainer.buffer import Blocked, GroupBuffer
from rlpost.trainer.limits import Limits, OnStale
from tests.unit.trainer.rollouts import finish, prompt


def started(limits, num_groups):
    """A buffer and its first slots, running."""
    buffer = GroupBuffer(limits)
    return buffer, [buffer.issue(prompt(i)) for i in range(num_groups)]


def taken(buffer, num_groups):
    return [buffer.take().index for _ in range(num_groups)]


# --- Limits ---


@pytest.mark.parametrize(
    "groups_per_step, sync_every, threshold, capacity, bound",
    [
        (4, 1, 0.0, 4, 0),  # nothing ahead: synchronous
        (4, 1, 0.5, 6, 1),  # two groups of the next step
        (4, 1, 1.0, 8, 1),
        (4, 1, 1.25, 9, 2),
        (4, 3, 0.0, 12, 2),  # the third step trains on weights two versions behind
        (4, 3, 0.5, 18, 4),
        (3, 1, 0.5, 4, 1),  # 4.5, rounded down
        (10, 1, 0.1, 11, 1),  # 1.1 * 10 is more than 11 in floating point, 1.1 * 3 * 10 less than 33
        (10, 3, 0.1, 33, 3),
    ],
)
def test_capacity_and_bound_by_hand(groups_per_step, sync_every, threshold, capacity, bound):
    limits = Limits(groups_per_step=groups_per_step, sync_every=sync_every, staleness_threshold=threshold)
    assert (limits.capacity, limits.bound) == (capacity, bound)


def test_max_staleness_lowers_the_bound_and_never_raises_it():
    def bound(max_staleness):
        return Limits(groups_per_step=4, staleness_threshold=2.0, max_staleness=max_staleness).bound

    assert [bound(m) for m in (0, 1, 2, 9, None)] == [0, 1, 2, 2, 2]


def test_limits_refuse_a_staleness_that_the_sync_interval_exceeds():
    with pytest.raises(ValueError, match="max_staleness=1 with .*step=3: .*at least 2, or sync every 2 steps or"):
        Limits(groups_per_step=4, sync_every=3, max_staleness=1)
    assert Limits(groups_per_step=4, sync_every=3, max_staleness=2).bound == 2


# --- what may start ---


def test_blocked_by_capacity_until_trained_groups_are_part_of_the_engines_weights():
    buffer, slots = started(Limits(groups_per_step=2), 2)
    assert buffer.blocked() is Blocked.CAPACITY
    for slot in slots:
        finish(buffer, slot)
    assert taken(buffer, 2) == [0, 1]
    assert buffer.blocked() is Blocked.CAPACITY
    buffer.end_step()
    assert buffer.blocked() is Blocked.CAPACITY and buffer.in_flight == 2
    buffer.publish(1)
    assert buffer.blocked() is None and buffer.in_flight == 0


def test_a_group_put_back_makes_room_at_once():
    buffer, slots = started(Limits(groups_per_step=2), 2)
    finish(buffer, slots[0])
    buffer.take()
    buffer.put_back()
    assert buffer.blocked() is None and buffer.in_flight == 1


def test_blocked_by_staleness_where_capacity_would_allow_more():
    buffer, slots = started(Limits(groups_per_step=2, staleness_threshold=2.0, max_staleness=1), 4)
    assert buffer.blocked() is Blocked.STALENESS and buffer.limits.capacity == 6
    finish(buffer, slots[0])
    buffer.take()
    assert buffer.blocked() is Blocked.STALENESS  # its turn is in the third step still
    buffer.put_back()
    assert buffer.blocked() is None  # dynamic sampling: all that follow move up by one


def test_a_sync_makes_new_groups_young_enough():
    buffer, slots = started(Limits(groups_per_step=2, staleness_threshold=2.0, max_staleness=1), 4)
    for slot in slots[:2]:
        finish(buffer, slot)
    taken(buffer, 2)
    buffer.end_step()
    assert buffer.blocked() is Blocked.STALENESS
    buffer.publish(1)
    buffer.issue(prompt(4))
    buffer.issue(prompt(5))
    assert buffer.blocked() is Blocked.STALENESS


def test_blocked_by_concurrency_until_one_finishes():
    buffer, slots = started(Limits(groups_per_step=4, max_running=2), 2)
    assert buffer.blocked() is Blocked.CONCURRENCY
    finish(buffer, slots[1])
    assert buffer.blocked() is None and buffer.num_running == 1


# --- order and failures ---


def test_groups_leave_in_the_order_of_issue_whichever_finished_first():
    buffer, slots = started(Limits(groups_per_step=4), 4)
    for slot in (slots[3], slots[1]):
        finish(buffer, slot)
    assert buffer.take() is None
    finish(buffer, slots[0])
    assert taken(buffer, 2) == [0, 1] and buffer.take() is None
    finish(buffer, slots[2])
    assert taken(buffer, 2) == [2, 3]


def test_a_failed_group_is_dropped_or_runs_again_in_its_place():
    buffer, slots = started(Limits(groups_per_step=3), 3)
    for slot in slots[1:]:
        finish(buffer, slot)
    buffer.fail(slots[0], drop=False)
    assert buffer.waiting() is slots[0] and buffer.take() is None
    buffer.restart(slots[0])
    assert buffer.waiting() is None
    finish(buffer, slots[0])
    assert taken(buffer, 3) == [0, 1, 2]

    buffer, slots = started(Limits(groups_per_step=3), 3)
    finish(buffer, slots[1])
    buffer.fail(slots[0], drop=True)
    assert taken(buffer, 1) == [1] and buffer.blocked() is None
    assert buffer.counts == {"failed_dropped": 1}


def test_a_group_that_waits_is_not_run_again_beyond_max_running():
    buffer, slots = started(Limits(groups_per_step=3, max_running=2), 2)
    buffer.fail(slots[0], drop=False)
    buffer.issue(prompt(2))
    assert buffer.waiting() is None
    finish(buffer, slots[1])
    assert buffer.waiting() is slots[0]


# --- too old ---


def one_step_on(on_stale):
    """Four running groups of version 0 that may not be older than that; the first two were trained, and synced."""
    limits = Limits(groups_per_step=2, staleness_threshold=1.0, max_staleness=0, on_stale=on_stale)
    buffer, slots = started(limits, 4)
    for slot in slots[:2]:
        finish(buffer, slot)
    assert taken(buffer, 2) == [0, 1]
    buffer.end_step()
    return buffer, slots


def test_wait_does_not_start_what_would_become_too_old():
    buffer, _ = started(Limits(groups_per_step=2, staleness_threshold=1.0, max_staleness=0), 2)
    assert buffer.blocked() is Blocked.STALENESS


def test_drop_waits_for_a_stale_group_to_end_and_reissues_its_prompt():
    buffer, slots = one_step_on(OnStale.DROP)
    assert buffer.publish(1) == []
    finish(buffer, slots[2])
    assert buffer.take() is None and buffer.num_running == 1
    assert buffer.counts == {"dropped_stale": 1}
    finish(buffer, slots[3], versions=[1])  # it had not begun to sample when the weights came
    assert taken(buffer, 1) == [3]
    assert buffer.reissued().index == 2 and buffer.reissued() is None


def test_abort_cuts_off_what_runs_and_drops_what_is_finished():
    buffer, slots = one_step_on(OnStale.ABORT)
    finish(buffer, slots[3])
    assert buffer.publish(1) == [slots[2]]
    assert buffer.slots == [] and buffer.counts == {"aborted_stale": 1, "dropped_stale": 1}
    assert [buffer.reissued().index, buffer.reissued().index] == [2, 3]
    finish(buffer, slots[2])  # what still comes for it is ignored
    assert buffer.take() is None


def test_abort_keeps_what_is_young_enough_where_it_moves_up():
    limits = Limits(groups_per_step=2, staleness_threshold=2.0, max_staleness=1, on_stale=OnStale.ABORT)
    buffer, slots = started(limits, 6)
    for slot in slots[:2]:
        finish(buffer, slot)
    taken(buffer, 2)
    buffer.end_step()
    assert buffer.publish(1) == slots[4:]  # these would be trained two versions on
    assert buffer.slots == slots[2:4]


def test_abort_spares_groups_that_have_not_begun():
    """Restored after a restart they have no tokens, of whatever age."""
    buffer, _ = one_step_on(OnStale.ABORT)
    buffer.load_state_dict(buffer.state_dict())
    assert buffer.publish(1) == [] and [slot.prompt.index for slot in buffer.slots] == [2, 3]
    assert buffer.counts == {}


def test_staleness_counts_from_the_oldest_token():
    """A group that ran through a sync is as old as its first token; one that was held back before it is younger."""
    buffer, slots = one_step_on(OnStale.DROP)
    buffer.publish(1)
    finish(buffer, slots[2], versions=[0, 1, 1])
    finish(buffer, slots[3], versions=[1, 1])
    assert taken(buffer, 1) == [3] and buffer.counts == {"dropped_stale": 1}


# --- repairs and restarts ---


def test_rewound_groups_run_again_before_all_others():
    buffer, slots = started(Limits(groups_per_step=2, staleness_threshold=0.5), 3)
    for slot in slots:
        finish(buffer, slot)
    groups = [buffer.take(), buffer.take()]
    buffer.end_step()
    buffer.publish(0)  # the same weights once more: what was taken is not part of them
    assert buffer.in_flight == 3
    buffer.rewind([g.prompt for g in groups])
    assert buffer.in_flight == 3 and buffer.blocked() is Blocked.CAPACITY and buffer.step == 1
    for _ in range(2):
        slot = buffer.waiting()
        buffer.restart(slot)
        finish(buffer, slot)
    assert taken(buffer, 3) == [0, 1, 2]


def test_rerun_forgets_what_was_sampled_and_keeps_the_order():
    buffer, slots = started(Limits(groups_per_step=3), 3)
    finish(buffer, slots[1])
    buffer.rerun()
    finish(buffer, slots[0])  # of the engine that is gone
    assert [(s.prompt.index, s.waiting) for s in buffer.slots] == [(0, True), (1, True), (2, True)]


def test_restored_buffer_has_finished_groups_and_runs_the_others_again():
    buffer, slots = started(Limits(groups_per_step=2, staleness_threshold=1.0), 4)
    for slot in slots[:2] + slots[3:]:
        finish(buffer, slot)
    taken(buffer, 2)
    buffer.end_step()
    restored = GroupBuffer(buffer.limits)
    restored.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    assert (restored.step, restored.version, restored.in_flight) == (2, 0, 4)
    slot = restored.waiting()
    assert slot.prompt.index == 2
    restored.restart(slot)
    finish(restored, slot)
    assert taken(restored, 2) == [2, 3]
