"""A LoRA run: the reference is the model with its adapter off, and merged weights reach engine and export."""

import pytest

from tests.e2e.runs import Run, small


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    run = Run(
        tmp_path_factory.mktemp("lora"),
        *small(
            checkpoint,
            "model.lora_rank=4",
            "algo=grpo",
            "algo.use_kl_loss=true",
            "actor.optim.lr=3e-2",
            "data.val_files=null",
            "trainer.total_training_steps=3",
            "trainer.export_hf=true",
        ),
    )
    run.succeed()
    return run


def test_kl_to_the_reference_starts_at_zero_and_grows(run):
    kl = [metrics["actor/kl_loss"] for metrics in run.steps().values()]
    assert kl[0] == pytest.approx(0.0, abs=1e-7) and kl[1] > 1e-5 and kl[2] > 1e-5


def test_merged_weights_reach_the_engine(run):
    for metrics in run.steps().values():
        assert metrics["train_rollout_logprob_abs_diff/mean"] <= 1e-4


def test_export_is_merged(run, checkpoint):
    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, run.folder / "hf"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    projections = {name for name in before if name.endswith("_proj.weight")}
    assert changed == projections and len(changed) == 2 * 7
