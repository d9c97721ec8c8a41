"""The table of AITER's families: complete, without contradiction, of variables that the engine really reads."""

import importlib.util

import pytest

from rlpost.aiter import ENGINES, FAMILIES, arguments, closure, environment, units


@pytest.mark.parametrize("engine", ENGINES)
def test_every_switch_changes_something_and_names_its_source(engine):
    table = ENGINES[engine]
    for switch in (table.master, *table.families.values()):
        assert switch.source.startswith("https://github.com/")
        assert switch.on.keys() == switch.off.keys() and switch.arguments_on.keys() == switch.arguments_off.keys()
        assert switch.on != switch.off or switch.arguments_on != switch.arguments_off


@pytest.mark.parametrize("engine", ENGINES)
def test_no_two_switches_share_a_variable_or_an_argument(engine):
    table = ENGINES[engine]
    switches = [table.master, *table.families.values()]
    names = [name for s in switches for name in (*s.on, *s.arguments_on)] + list(table.never)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_variable_is_stated_whatever_is_on(engine):
    everything = environment(engine, FAMILIES)
    assert environment(engine, ()).keys() == everything.keys()
    assert set(environment(engine, ()).values()) == {"0"}
    for family, switch in ENGINES[engine].families.items():
        without = environment(engine, set(FAMILIES) - {family})
        assert {name for name in everything if everything[name] != without[name]} == set(switch.on)


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM")
def test_vllm_knows_every_variable_of_the_table():
    from vllm.envs import environment_variables

    assert set(environment("vllm", FAMILIES)) <= set(environment_variables)


def test_units_cover_every_family_once_and_begin_with_what_only_the_master_governs():
    for engine in ENGINES:
        assert sorted(family for unit in units(engine) for family in unit) == sorted(FAMILIES)
    assert units("sglang")[0] == {"rmsnorm", "rope", "linear"} and all(len(unit) == 1 for unit in units("vllm"))


def test_closure_turns_all_off_where_a_family_without_a_switch_is_to_be_off():
    assert closure("sglang", set(FAMILIES) - {"rope"}) == frozenset()
    assert closure("sglang", set(FAMILIES) - {"moe"}) == set(FAMILIES) - {"moe"}
    assert closure("vllm", {"rope"}) == {"rope"}


def test_latent_attention_leaves_vllms_backend_to_its_variables():
    assert "attention_backend" not in arguments("vllm", FAMILIES, latent_attention=True)
    assert arguments("vllm", FAMILIES)["attention_backend"] == "ROCM_AITER_FA"


def test_engines_without_aiter_get_nothing():
    assert environment("hf", ()) == arguments("hf", ()) == {}
