"""`IdleMeter` with a clock that is moved by hand."""

import pytest

from rlpost.trainer.idle import IdleMeter


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_shares_are_integrals_over_time(clock):
    meter = IdleMeter(clock)
    clock.now += 1  # nothing runs yet
    meter.set(2, 4, None)
    clock.now += 2  # half busy
    meter.waiting(True)
    meter.set(4, 4, "capacity")
    clock.now += 3
    meter.waiting(False)
    meter.set(0, 4, "sync")
    clock.now += 4
    assert meter.pop() == pytest.approx(
        {
            "rollout_idle": (1 + 2 / 2 + 4) / 10,
            "trainer_idle": 3 / 10,
            "blocked_capacity": 3 / 10,
            "blocked_sync": 4 / 10,
        }
    )


def test_pop_starts_anew_and_keeps_the_state(clock):
    meter = IdleMeter(clock)
    meter.set(1, 2, "staleness")
    meter.waiting(True)
    clock.now += 5
    meter.pop()
    clock.now += 4
    meter.set(2, 2, None)
    clock.now += 4
    assert meter.pop() == pytest.approx({"rollout_idle": 0.25, "trainer_idle": 1.0, "blocked_staleness": 0.5})


def test_more_groups_than_there_is_room_for_are_no_more_than_busy(clock):
    meter = IdleMeter(clock)
    meter.set(9, 4, None)
    clock.now += 1
    assert meter.pop() == {"rollout_idle": 0.0, "trainer_idle": 0.0}


def test_no_time_has_no_idle_share(clock):
    assert IdleMeter(clock).pop() == {"rollout_idle": 0.0, "trainer_idle": 0.0}
