"""Whole runs with SGLang: the quickstart learns its task, and LoRA's merged weights reach the engine."""

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.runs import Run, small

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="no SGLang")

NUM_STEPS = 8  # of the quickstart's 50


def test_quickstart_learns_with_sglang(tmp_path):
    run = Run(
        tmp_path,
        "algo=dapo",
        "rollout=sglang",
        "experiment=quickstart",
        "tracking=console",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.export_hf=false",
        f"cache_dir={tmp_path}/cache",
    )
    summary = run.succeed()
    assert summary["finished"] and summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    steps = run.steps()
    assert steps[NUM_STEPS]["reward/mean"] > steps[1]["reward/mean"] + 0.05
    assert max(metrics["train_rollout_logprob_abs_diff/mean"] for metrics in steps.values()) < 1e-5
    assert run.left_behind() == []


def test_merged_lora_weights_reach_sglang(checkpoint: Path, tmp_path):
    run = Run(
        tmp_path,
        *small(
            checkpoint,
            "rollout=sglang",
            "model.lora_rank=4",
            "algo=grpo",
            "actor.optim.lr=3e-2",
            "data.val_files=null",
            "trainer.total_training_steps=3",
        ),
    )
    run.succeed()
    steps = run.steps()
    assert steps[1]["actor/grad_norm"] > 0
    assert max(metrics["train_rollout_logprob_abs_diff/mean"] for metrics in steps.values()) <= 1e-4
    assert run.left_behind() == []
