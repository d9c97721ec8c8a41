"""A whole run with vLLM: what it prints, what it writes, and that the result is a model others can use."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.runs import VAL, Run, small

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM")

NUM_STEPS, BATCH, N = 3, 4, 4
REWARD = "reward.terms.accuracy.fn=tests.e2e.rewards.parity_apart"


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("vllm")
    run = Run(
        folder,
        *small(
            checkpoint,
            "rollout=vllm",
            REWARD,
            "algo=grpo",
            "tracking=default",
            "actor.ppo_mini_batch_size=2",
            f"trainer.total_training_steps={NUM_STEPS}",
            "trainer.test_freq=2",
            "trainer.export_hf=true",
            "trainer.profile_steps=[2]",
            f"trainer.rollout_data_dir={folder}/rollouts",
        ),
    )
    run.summary = run.succeed()
    return run


def validations(run: Run) -> dict[int, float]:
    return {line["step"]: line["val/addition/accuracy"] for line in run.lines() if "val/addition/accuracy" in line}


def test_last_line_sums_the_run_up(run):
    summary = run.summary
    scores = validations(run)
    assert list(scores) == [0, 2, 3]
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (scores[0], scores[3])
    assert summary["steps"] == NUM_STEPS and summary["finished"] is True and summary["wall_s"] > 0
    assert summary["run_dir"] == str(run.folder)
    assert "worker died" not in run.stderr + run.stdout  # what Ray says of actors that do not end by themselves


def test_trainer_and_engine_agree_at_every_step(run):
    steps = run.steps()
    assert list(steps) == [1, 2, 3]
    for metrics in steps.values():
        assert metrics["train_rollout_logprob_abs_diff/mean"] <= 1e-4
        assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_updates"] == 0


def test_trackers_and_pictures_are_there(run):
    assert list((run.folder / "tensorboard").glob("events.out.tfevents.*"))
    assert (run.folder / "curves.png").stat().st_size > 10_000
    assert {line["step"] for line in run.lines("samples.jsonl")} == {0, 2, 3}
    assert list((run.folder / "profile" / "step_2").glob("rank0.json*"))
    assert not (run.folder / "profile" / "step_1").exists()


def test_every_rollout_is_on_disk(run):
    files = sorted((run.cwd / "rollouts").iterdir())
    assert [file.name for file in files] == ["1.jsonl", "2.jsonl", "3.jsonl"]
    for step, file in enumerate(files, start=1):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == BATCH * N and len({row["group"] for row in rows}) == BATCH
        assert {row["version"] for row in rows} == {step - 1}
        mean = sum(row["reward"] for row in rows) / len(rows)
        assert mean == pytest.approx(run.steps()[step]["reward/mean"])
        assert all(row["parts"]["accuracy"] == row["reward"] and row["error"] is None for row in rows)


def test_checkpoint_is_complete(run):
    folder = run.folder / "checkpoints" / f"global_step_{NUM_STEPS}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == NUM_STEPS and manifest["source"]["stream"]["index"] == NUM_STEPS * BATCH
    assert {"actor/rank_0.json", "ledger.jsonl"} < set(manifest["files"]) and manifest["config"]["rollout"]["n"] == N
    assert all((folder / name).stat().st_size == file["bytes"] for name, file in manifest["files"].items())
    assert not [path for path in folder.rglob("*") if path.suffix not in ("", ".json", ".jsonl", ".safetensors")]


def test_no_process_is_left(run):
    assert run.left_behind() == []


def test_export_is_a_checkpoint_for_transformers(run, checkpoint):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = AutoModelForCausalLM.from_pretrained(run.folder / "hf")
    before = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert not exported.lm_head.weight.equal(before.lm_head.weight)
    assert exported.config.vocab_size == before.config.vocab_size
    tokenizer, same = (AutoTokenizer.from_pretrained(folder) for folder in (run.folder / "hf", checkpoint))
    assert tokenizer("1+2=")["input_ids"] == same("1+2=")["input_ids"]


def test_export_evaluates_to_the_last_validation(run, tmp_path):
    evaluation = Run(
        tmp_path,
        "model=hf",
        f"model.path={run.folder}/hf",
        f"data.val_files.addition='{VAL}'",
        REWARD,
        module="rlpost.tools.evaluate",
    )
    report = evaluation.succeed()
    assert report["val/addition/accuracy"] == validations(run)[NUM_STEPS]
    answers = evaluation.lines("answers.jsonl")
    assert len(answers) == 16
    assert sum(row["reward"] for row in answers) / 16 == report["val/addition/reward"]
    assert evaluation.left_behind() == []
