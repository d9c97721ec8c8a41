"""When a run counts as stalled, by a clock that is set by hand."""

from dataclasses import replace

import pytest

from rlpost.heartbeat import Pulse
from rlpost.trainer.watchdog import PAUSE_S, SILENT_S, Watchdog

LIMITS = {"train": 50.0, "generate": 200.0, "driver": 100.0, "validate": None}


class World:
    """Processes that live: each look passes `STEP_S`, and all but the `silent` are heard of."""

    STEP_S = 10.0

    def __init__(self, **phases):
        self.now = 0.0
        self.pulses = {}
        self.silent = set()
        for name, phase in phases.items():
            self.enter(name.replace("_", " "), phase)
        self.dog = Watchdog(LIMITS, lambda: list(self.pulses.values()), clock=lambda: self.now)

    def enter(self, name, phase):
        before = self.pulses.get(name, Pulse(name=name, host="here", pid=1))
        self.pulses[name] = replace(before, phase=phase, beats=before.beats + 1)

    def beat(self, name):
        self.enter(name, self.pulses[name].phase)

    def look(self, times=1, beating=()):
        """The names of those that have stalled at the last of `times` looks."""
        stalls = []
        for _ in range(times):
            self.now += self.STEP_S
            for name in beating:
                self.beat(name)
            for name in self.pulses.keys() - self.silent:
                self.pulses[name] = replace(self.pulses[name], written=self.pulses[name].written + 1)
            stalls = self.dog.look()
        return [stall.pulse.name for stall in stalls]


def test_process_stalls_only_beyond_the_limit_of_its_phase():
    world = World(driver="train", rank_0="train", rank_1="train")
    assert world.look(6) == []
    assert world.look() == ["rank 0", "rank 1", "driver"]
    (stall, _, _) = world.dog.look()
    assert (stall.stuck_s, stall.limit_s) == (60.0, 50.0)


def test_progress_of_those_it_waits_for_is_the_drivers_own():
    world = World(driver="train", rank_0="train")
    assert world.look(30, beating=["rank 0"]) == []
    assert world.look(6) == ["rank 0", "driver"]


def test_progress_in_another_phase_is_not():
    world = World(driver="train", workflow="generate", rank_0="")  # as when both go on at once
    assert world.look(7, beating=["workflow"]) == ["driver"]


def test_progress_does_not_go_back_when_a_process_leaves_the_phase():
    world = World(driver="train", rank_0="train")
    assert world.look(6, beating=["rank 0"]) == []
    world.enter("rank 0", "")
    assert world.look(5) == []
    assert world.look() == ["driver"]


def test_one_stuck_rank_is_found_while_others_go_on():
    world = World(driver="train", rank_0="train", rank_1="train")
    assert world.look(7, beating=["rank 0"]) == ["rank 1"]


def test_new_phase_is_progress():
    world = World(driver="train")
    for _ in range(5):
        assert world.look(5) == []
        world.enter("driver", "train")


@pytest.mark.parametrize("phase", ["validate", "", "a phase of the user's"])
def test_phase_without_a_limit_never_stalls(phase):
    assert World(driver=phase, rank_0=phase).look(1000) == []


def test_process_that_was_ended_is_not_blamed_but_the_driver_that_waits_for_it_is():
    world = World(driver="generate", engine_1="generate")
    world.silent.add("engine 1")
    assert world.look(21) == []
    assert world.look() == ["driver"]


def test_process_started_anew_under_the_same_name_starts_anew():
    world = World(driver="", rank_0="train")
    assert world.look(6) == []
    world.pulses["rank 0"] = replace(world.pulses["rank 0"], pid=2)
    assert world.look(5) == []


def test_driver_that_was_stopped_itself_blames_nobody():
    world = World(driver="train", rank_0="train")
    world.look(4)
    world.now += 10_000.0
    assert world.look(2) == []
    assert world.look(2) == ["rank 0", "driver"]


def test_pauses_are_told_from_looks():
    assert World.STEP_S < PAUSE_S < SILENT_S
