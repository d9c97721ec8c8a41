"""The table of ROCm hazards: every row is readable and sourced; what cannot be shown by a golden file."""

from pathlib import Path

import pytest

from rlpost.aiter import FAMILIES
from rlpost.hazards import HAZARDS, Action, Situation, examine


@pytest.mark.parametrize("row", HAZARDS, ids=lambda row: row.name)
def test_row_says_why_what_to_do_and_who_says_so(row):
    assert row.why and row.fix
    assert all(url.startswith("https://github.com/") for url in row.source.split(" and "))
    assert bool(row.env) == (row.action is Action.SET)
    assert (row.family in FAMILIES) == (row.action is Action.DISABLE)


def test_documentation_shows_every_row_as_it_is():
    lines = (Path(__file__).parents[2] / "docs" / "rocm.md").read_text().splitlines()
    for row in HAZARDS:
        (line,) = [line for line in lines if line.startswith(f"| `{row.name}` |")]
        assert f"| {row.why} | {row.action}" in line and row.fix in line
        assert all(f"({url})" in line for url in row.source.split(" and "))
    assert sum(line.startswith("| `") and "https://github.com" in line for line in lines) == len(HAZARDS)


def test_rows_have_names_of_their_own():
    assert len({row.name for row in HAZARDS}) == len(HAZARDS)


def test_healthy_situation_is_only_set_up():
    found = examine(Situation(arch="gfx942", hip=(7, 14), families=frozenset(FAMILIES), head_dim=128))
    assert found.families == set(FAMILIES) and not found.warnings and not found.refusals
    assert found.env == {"HSA_ENABLE_IPC_MODE_LEGACY": "1", "HSA_NO_SCRATCH_RECLAIM": "1"}


def test_variable_that_the_user_exported_is_kept_with_a_warning():
    found = examine(Situation(arch="gfx942", hip=(7, 2), env={"HSA_ENABLE_IPC_MODE_LEGACY": "0"}))
    assert found.env["HSA_ENABLE_IPC_MODE_LEGACY"] == "0"
    (warning,) = found.warnings
    assert warning.startswith("HSA_ENABLE_IPC_MODE_LEGACY=0 is kept as exported, though")


def test_family_that_the_user_insists_on_is_refused_rather_than_turned_off():
    situation = dict(arch="gfx942", hip=(7, 2), families=frozenset(FAMILIES), dtype="float32")
    assert "attention" not in examine(Situation(**situation)).families
    (refusal,) = examine(Situation(**situation, insisted=frozenset({"attention"}))).refusals
    assert refusal.startswith("rollout.aiter_kernels.attention=on: AITER's attention computes in bfloat16")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_found_under_each_of_their_names(name):
    env = {name: "max_split_size_mb:64,expandable_segments:True"}
    (refusal,) = examine(Situation(arch="gfx942", hip=(7, 2), env=env)).refusals
    assert refusal.startswith(f"{name}=max_split_size_mb:64,expandable_segments:True: memory of expandable")
    assert not examine(Situation(arch="gfx942", hip=(7, 2), env={name: "expandable_segments:False"})).refusals
