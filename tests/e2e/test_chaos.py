"""Runs whose processes of all kinds are killed at random moments end as ones that nobody disturbed."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpost.trainer.history import LEDGER, encode_all
from tests.e2e.chaos import Chaos, Target, compare, num_steps, overrides, plan
from tests.e2e.runs import Run


def test_plan_follows_from_its_seed_and_spares_no_target():
    kills = plan(10, seed=7, early=0.5)
    assert kills == plan(10, seed=7, early=0.5) != plan(10, seed=8, early=0.5)
    assert all([kill.target for kill in kills].count(target) == 2 for target in Target)
    steps = [kill.step for kill in kills if kill.step is not None]
    assert steps == sorted(steps) and steps[-1] < num_steps(kills)
    assert all(before.target.ends_run for before, kill in zip(kills, kills[1:], strict=False) if kill.step is None)


def finished(folder: Path, steps: dict[int, str], loss: float = 0.5) -> SimpleNamespace:
    """A run that has trained these groups, of one letter each."""
    records = [{"at": "begun"}]
    for step, ids in steps.items():
        groups = [[id, "abcdefgh".index(id)] for id in ids]
        records += [{"at": "issued", "groups": groups}, {"at": "trained", "step": step, "groups": groups}]
    folder.mkdir()
    (folder / LEDGER).write_bytes(encode_all(records)[0])
    metrics = {step: {"actor/pg_loss": loss, "timing_s/step": id(folder)} for step in steps}
    return SimpleNamespace(folder=folder, steps=lambda: metrics)


@pytest.mark.parametrize(
    ("steps", "loss", "lost", "repeated", "says"),
    [
        ({1: "abcd", 2: "efgh"}, 0.5, 0, 0, None),
        ({1: "abcd", 2: "efga"}, 0.5, 1, 1, "was trained 2 times"),
        ({1: "abcd", 2: "efg"}, 0.5, 1, 0, "groups by step"),
        ({1: "abcd", 3: "efgh"}, 0.5, 0, 0, "missing"),
        ({1: "abce", 2: "dfgh"}, 0.5, 0, 0, "not the ledger of the undisturbed run"),
        ({1: "abcd", 2: "efgh"}, 0.5001, 0, 0, "metrics differ by 2.0e-04"),
    ],
)
def test_comparison_tells_what_differs(steps, loss, lost, repeated, says, tmp_path):
    run, undisturbed = finished(tmp_path / "a", steps, loss), finished(tmp_path / "b", {1: "abcd", 2: "efgh"})
    comparison = compare(run, undisturbed, ledger=True, metrics=True)
    assert (comparison.lost, comparison.repeated) == (lost, repeated)
    assert (says or "") in "".join(comparison.problems) and bool(comparison.problems) == bool(says)
    assert (comparison.deviation == math.inf) == (steps.keys() != {1, 2})


def test_runs_whose_processes_are_killed_train_what_an_undisturbed_one_does(checkpoint, tmp_path):
    plans = {
        "colocated": plan(4, seed=5, targets=(Target.DRIVER, Target.ENGINE, Target.REWARD, Target.WORKFLOW)),
        "fully_async": plan(2, seed=5, targets=(Target.TRAINER, Target.WORKFLOW)),
    }
    steps = max(map(num_steps, plans.values()))
    undisturbed = Run(tmp_path / "undisturbed", *overrides(checkpoint, "hf", "colocated", steps, 0))  # beside the first
    disturbed = []
    for trainer, kills in plans.items():
        chaos = Chaos(Run(tmp_path / trainer, *overrides(checkpoint, "hf", trainer, steps, 4)))
        disturbed.append(chaos)
        chaos.to_the_end(kills)
        assert [blow.target for blow in chaos.blows] == [kill.target for kill in kills]
        assert [blow.ended for blow in chaos.blows] == [kill.target.ends_run for kill in kills]
    undisturbed.succeed()
    log = (tmp_path / "colocated" / "run" / "rlpost.log").read_text()
    assert "rollout replica 0 is back" in log and re.search("workflow worker . is lost", log)
    for chaos, in_turn in zip(disturbed, (True, False), strict=True):
        chaos.check_processes()
        assert chaos.problems == []
        comparison = compare(chaos.run, undisturbed, ledger=in_turn, metrics=in_turn)
        assert comparison.problems == [] and (comparison.lost, comparison.repeated) == (0, 0)
