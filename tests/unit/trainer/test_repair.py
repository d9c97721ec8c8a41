"""AITER's families at fault: found, turned off, told; or the run stops. Engines here are a set of switches."""

import asyncio

import pytest

from rlpost.aiter import FAMILIES
from rlpost.trainer.repair import AiterRepair, RepairError
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.setup import with_families


class Engines:
    """Agree with the trainer unless a family at fault is on."""

    def __init__(self, *faults, name="vllm", on=FAMILIES, **changes):
        self.faults, self.restarts, self.notes = set(faults), 0, []
        self.cfg = with_families(RolloutConfig(name=name, **changes), frozenset(on))
        self.repair = AiterRepair(lambda: self.cfg, self.restart, self.notes.append)

    async def restart(self, cfg):
        self.cfg, self.restarts = cfg, self.restarts + 1

    async def agree(self):
        return not self.faults & self.on

    @property
    def on(self):
        return self.cfg.aiter_kernels.set_to("on")

    def mend(self):
        return asyncio.run(self.repair(self.agree))


@pytest.mark.parametrize("faults", [("moe",), ("attention", "rope"), ("rmsnorm", "quantization")])
def test_faulty_families_are_turned_off_and_named_and_the_rest_goes_on(faults):
    engines = Engines(*faults)
    assert engines.mend()
    assert engines.on == set(FAMILIES) - set(faults)
    assert engines.restarts <= engines.cfg.aiter_max_restarts
    names = ", ".join(sorted(faults))
    assert engines.notes[-1].startswith(f"AITER's {names} breaks parity, and stays off in this run. Set rollout.aiter_")
    for family in faults:
        assert f"rollout.aiter_kernels.{family}=off" in engines.notes[-1]


def test_family_without_a_switch_of_its_own_turns_all_off():
    engines = Engines("rope", name="sglang")
    assert engines.mend()
    assert engines.on == frozenset() and engines.cfg.aiter == "off"
    assert "Set rollout.aiter=off" in engines.notes[-1]


def test_families_that_the_user_turned_off_stay_off_and_are_not_searched():
    engines = Engines("moe", on=("moe", "rope"))
    assert engines.mend()
    assert engines.on == {"rope"} and engines.restarts <= 3


def test_stop_names_the_families_and_the_keys():
    engines = Engines("moe", "linear", aiter_on_fault="stop")
    expected = "AITER's linear, moe breaks parity. Set rollout.aiter_kernels.linear=off rollout.aiter_kernels.moe=off"
    with pytest.raises(RepairError, match=expected):
        engines.mend()


def test_fault_elsewhere_is_left_to_the_gate_after_one_restart():
    engines = Engines()
    engines.agree = lambda: asyncio.sleep(0, False)
    assert not engines.mend()
    assert engines.restarts == 1 and "AITER is not the cause" in engines.notes[-1]


def test_nothing_is_restarted_where_aiter_is_off():
    engines = Engines(on=())
    assert not engines.mend()
    assert engines.restarts == 0 and engines.notes == []


def test_restarts_are_bounded_over_the_whole_run():
    engines = Engines("attention", "rmsnorm", "rope", aiter_max_restarts=5)
    assert engines.mend()
    assert engines.restarts <= 5 and not engines.on & engines.faults
    assert "rollout.aiter_max_restarts ended the search" in engines.notes[-1]
    engines.cfg = with_families(engines.cfg, frozenset({"moe"}))
    with pytest.raises(RepairError, match="rollout.aiter_max_restarts=5 engine restarts are spent"):
        engines.mend()
