"""Whole runs with a step that is not finite, or one that is kept on request; and their bundles run again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.launch import FAILED
from tests.e2e.runs import ROOT, Run, small


def replay(bundle: Path, *options: str) -> subprocess.CompletedProcess:
    """`python -m rlpost.tools.replay BUNDLE ...`, elsewhere than in the source tree."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlpost.tools.replay", str(bundle), *options]
    return subprocess.run(command, cwd=bundle, env=environment, capture_output=True, text=True, timeout=240)


def test_run_stops_with_a_bundle_whose_replay_names_the_module_that_overflows(checkpoint, tmp_path):
    """The first update throws the weights far off, the second's forward pass overflows."""
    blown_up = ["actor.optim.lr=1e20", "actor.optim.weight_decay=0", "actor.ppo_mini_batch_size=2"]
    run = Run(
        tmp_path, *small(checkpoint, *blown_up, "trainer.total_training_steps=2", "trainer.val_before_train=false")
    )
    assert run.wait() == FAILED
    bundle = run.folder / "replay" / "nonfinite_step_1"
    assert "NonFinite: step 1: the loss of 1 micro-batch of the actor's update 1 of this step" in run.stderr
    assert f"python -m rlpost.tools.replay {bundle}" in run.stderr and not run.left_behind()
    again = replay(bundle)
    assert again.returncode == 1, again.stderr
    assert "first  output of model.layers.0.self_attn.q_proj" in again.stdout
    assert "then   value of the loss" in again.stdout


def test_run_that_skips_goes_on_without_the_step_until_too_many_follow_one_another(checkpoint, tmp_path):
    changes = [
        "algo.loss_mode=tests.e2e.losses.steep",
        "trainer.on_nonfinite=skip",
        "trainer.max_skipped_steps=2",
        "trainer.max_replays_to_keep=1",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=false",
    ]
    run = Run(tmp_path, *small(checkpoint, *changes))
    assert run.wait() == FAILED
    assert "step 2: the gradient, though no loss, of the actor's update 0" in run.stderr
    assert "the last of trainer.max_skipped_steps=2 in a row" in run.stderr
    assert "skipped     step 1: " in run.stderr + run.stdout
    (step,) = run.steps().values()
    assert step["train/skipped_steps"] == 1 and step["actor/updates"] == 0
    (bundle,) = (run.folder / "replay").iterdir()
    again = replay(bundle, "--json")
    assert again.returncode == 1, again.stderr
    findings = json.loads(again.stdout)["findings"]
    assert (findings[0]["where"], findings[0]["name"]) == ("backward", "logprobs")
    assert next(f["name"] for f in findings if f["where"] == "gradient") == "lm_head.weight"


def test_step_of_two_ranks_that_is_kept_comes_out_the_same_on_one(checkpoint, tmp_path):
    changes = [
        "algo=ppo",
        "cluster.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.save_replay_steps=[2]",
    ]
    run = Run(tmp_path, *small(checkpoint, *changes, "trainer.val_before_train=false"))
    run.succeed()
    again = replay(run.folder / "replay" / "step_2", "--json", "--against", "dtype=bfloat16")
    assert again.returncode == 0, again.stderr
    result, was = json.loads(again.stdout), run.steps()[2]
    assert not result["findings"] and was["train/skipped_steps"] == 0
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "critic/grad_norm", "critic/vf_loss"):
        assert result["metrics"][name] == pytest.approx(was[name], rel=1e-4, abs=1e-6), name
    whole, *parameters = result["differences"]
    assert whole["name"] == "all parameters" and 0 < whole["relative"] < 0.2
    assert {name.partition("/")[0] for name in (d["name"] for d in parameters)} == {"actor", "critic"}
