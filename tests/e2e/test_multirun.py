"""Sweeps: one command, one finished run folder for each job, and a failing job that does not stop the others."""

from pathlib import Path

from rlpost.tracking.jsonl import read_jsonl
from rlpost.trainer.build import PARITY_LIMIT
from tests.e2e.runs import Run, small

STEP, STEPS = "trainer.total_training_steps=1", "trainer.total_training_steps=2"


def folders(run: Run) -> dict[str, Path]:
    """Folders of the jobs by their number."""
    return {path.name.partition("_")[0]: path for path in (run.cwd / "multirun").glob("*/*/*") if path.is_dir()}


def test_sweep_finishes_every_job_in_a_folder_of_its_own(checkpoint, tmp_path):
    run = Run(tmp_path, "-m", *small(checkpoint, STEPS, "algo=ppo", "actor.dtype=auto,float16"))
    assert run.succeed()["finished"] is True
    jobs = folders(run)
    assert sorted(jobs) == ["0", "1"]
    for path in jobs.values():
        assert (path / "metrics.jsonl").is_file() and (path / "checkpoints/global_step_2/manifest.json").is_file()
        half = [m for m in read_jsonl(path / "metrics.jsonl") if "actor/loss_scale" in m]
        assert len(half) == (2 if "float16" in path.name else 0)
        for metrics in half:  # the engine follows the actor's dtype, and agrees with it after updates too
            assert metrics["train_rollout_logprob_abs_diff/mean"] < PARITY_LIMIT["float16"]
            assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_updates"] == 0
    assert run.stdout.count('"finished": true') == 2
    assert run.left_behind() == []


def test_sweep_goes_on_after_failed_jobs_and_says_what_failed(checkpoint, tmp_path):
    functions = ",".join(f"tests.e2e.rewards.{name}" for name in ("broken", "nan", "constant", "rare"))
    run = Run(
        tmp_path,
        "-m",
        *small(
            checkpoint,
            STEP,
            f"reward.terms.accuracy.fn={functions}",
            "algo=dapo",
            "algo.filter_groups.max_num_gen_batches=2",
            "algo.filter_groups.on_exhausted=train",
            "data.val_files=null",
        ),
    )
    assert run.wait() == 1
    jobs = folders(run)
    assert [number for number, path in sorted(jobs.items()) if (path / "checkpoints").exists()] == ["3"]
    assert run.stdout.count('"finished": true') == 1
    assert "RewardFailure: 16 of 16 answers could not be scored, above reward.stop_error_rate=0.5" in run.stderr
    assert "RuntimeError: the scorer is out of order" in run.stderr and "rewards.py:" in run.stderr
    assert "reward term 'accuracy' (tests.e2e.rewards.nan): its value is nan" in run.stderr
    assert "BudgetExhausted: dynamic sampling kept 0 of the 4 groups it needs from 8 prompts" in run.stderr
    for part in ("dropped_all_1: 8", "algo.filter_groups.max_num_gen_batches", "algo.filter_groups.on_exhausted=train"):
        assert part in run.stderr
    (metrics,) = read_jsonl(jobs["3"] / "metrics.jsonl")  # the budget ended with one group, which is trained on
    assert metrics["groups/kept"] == 1 and metrics["groups/dropped_all_1"] == 7 and metrics["actor/grad_norm"] > 0
    assert metrics["reward/accuracy"] == (7 * 4 + 2) / 32  # of all eight groups
    assert "Traceback" not in run.stderr
    assert run.left_behind() == []
