"""Runs whose processes of all kinds are killed at random moments end as ones that nobody disturbed."""

from tests.e2e.chaos import Chaos, Target, compare, num_steps, overrides, plan
from tests.e2e.runs import Run


def test_plan_follows_from_its_seed_and_spares_no_target():
    kills = plan(10, seed=7, early=0.5)
    assert kills == plan(10, seed=7, early=0.5) != plan(10, seed=8, early=0.5)
    assert all([kill.target for kill in kills].count(target) == 2 for target in Target)
    steps = [kill.step for kill in kills if kill.step is not None]
    assert steps == sorted(steps) and steps[-1] < num_steps(kills)
    assert all(before.target.ends_run for before, kill in zip(kills, kills[1:], strict=False) if kill.step is None)


def test_runs_whose_processes_are_killed_train_what_an_undisturbed_one_does(checkpoint, tmp_path):
    plans = {
        "colocated": plan(3, seed=1, targets=(Target.DRIVER, Target.ENGINE, Target.REWARD)),
        "fully_async": plan(2, seed=2, targets=(Target.TRAINER, Target.WORKFLOW)),
    }
    steps = max(map(num_steps, plans.values()))
    undisturbed = Run(tmp_path / "undisturbed", *overrides(checkpoint, "hf", "colocated", steps, 0))
    undisturbed.succeed()
    for trainer, kills in plans.items():
        chaos = Chaos(Run(tmp_path / trainer, *overrides(checkpoint, "hf", trainer, steps, 4)))
        chaos.to_the_end(kills)
        assert chaos.problems == [] and len(chaos.blows) == len(kills)
        assert sum(blow.ended for blow in chaos.blows) == 1
        exact = trainer == "colocated"
        comparison = compare(chaos.run, undisturbed, ledger=exact, metrics=exact)
        assert comparison.problems == [] and (comparison.lost, comparison.repeated) == (0, 0)
