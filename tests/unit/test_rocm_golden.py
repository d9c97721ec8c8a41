"""Simulated ROCm machines against their golden files: every process's environment, engine arguments, messages."""

import json

import pytest

from rlpost.hazards import HAZARDS, Action
from tests.unit.simulated_rocm import GOLDEN, MACHINES, simulate, text


@pytest.mark.parametrize("name", MACHINES)
def test_simulated_machine_gets_exactly_the_golden_setup(name):
    expected = (GOLDEN / f"{name}.json").read_text()
    assert text(simulate(MACHINES[name])) == expected, "meant? then `python -m tests.unit.simulated_rocm`"


def test_every_golden_file_has_its_machine():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(MACHINES)


def golden() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))]


@pytest.mark.parametrize("row", HAZARDS, ids=lambda row: row.name)
def test_every_hazard_shows_in_a_golden_file(row):
    """By its name where the run goes on, by its source where it is refused."""
    if row.action is Action.REFUSE:
        assert any(row.source in result.get("refused", "") for result in golden())
    else:
        assert any(row.name in result.get("hazards", ()) for result in golden())
    if row.action in (Action.WARN, Action.DISABLE):
        assert any(row.source in warning for result in golden() for warning in result.get("warnings", ()))


def test_hip_and_cuda_masks_agree_in_every_process():
    processes = [env for r in golden() if "devices" in r for env in (r["driver"], *r["trainers"], *r["engines"])]
    assert len(processes) > 50
    for env in processes:
        assert env["HIP_VISIBLE_DEVICES"] == env["CUDA_VISIBLE_DEVICES"]
        assert "ROCR_VISIBLE_DEVICES" not in env


def test_every_trainer_of_a_node_has_a_device_of_its_own_and_engines_share_them_out():
    for result in golden():
        if "devices" in result:
            masks = [device["mask"] for device in result["devices"]]
            nodes = len(result["trainers"]) // len(masks)
            assert [env["HIP_VISIBLE_DEVICES"] for env in result["trainers"]] == masks * nodes
            assert ",".join(env["HIP_VISIBLE_DEVICES"] for env in result["engines"]).split(",") == masks * nodes
