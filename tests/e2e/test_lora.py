"""A LoRA run: the reference is the model with its adapter off, and merged weights reach engine and export; and where
its time went."""

import pytest

from rlpost.tools.timelines.lanes import accounted, find_lanes, find_window, read_spans
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
            "trainer.timeline=true",
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


def test_timeline_accounts_for_the_steps_and_shows_every_process(run):
    spans = read_spans(run.folder)
    window = find_window(spans, 1, 3, 3)
    lanes = find_lanes(spans, window, most=8)
    assert accounted(lanes, window) >= 0.9
    seconds = {lane.name: lane.seconds() for lane in lanes}
    assert {"generate", "infer", "train", "publish", "save"} <= seconds["driver"].keys()
    assert {"infer", "train", "publish", "save"} <= seconds["rank 0"].keys()  # up to the end: the last is step 3's
    assert {"generate", "publish"} <= seconds["engine 0"].keys()
    assert "generate" in seconds["workflow 0"] and "reward" in seconds["reward 0"]
    for name in ("infer", "train"):  # the driver waits for the rank, and for more than that
        assert seconds["rank 0"][name] < seconds["driver"][name]
