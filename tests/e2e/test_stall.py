"""A run that hangs ends by itself, names who hangs where, and leaves no process behind."""

from rlpost.endings import FAILED, STALLED
from tests.e2e.runs import Run, small

LIMIT_S = 15  # far above what these phases take, also on a busy machine


def stalled(run: Run) -> str:
    """The report of a run that ended because of a stall."""
    assert run.wait() == STALLED, run.stderr[-3000:]
    assert run.left_behind() == []
    assert "Traceback" not in run.stderr
    return (run.folder / "stall" / "report.txt").read_text()


def test_reward_that_hangs_within_its_own_limit_ends_the_run(checkpoint, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    run = Run(
        tmp_path / "a",
        *small(
            checkpoint,
            "reward.terms.accuracy.fn=tests.e2e.rewards.parity_apart",
            f"+reward.terms.accuracy.kwargs.hold={hold}",
            "+reward.terms.accuracy.kwargs.hold_from=4",
            "reward.timeout_s=1000",
            "data.val_files=null",
            f"trainer.timeouts.generate_s={LIMIT_S}",
        ),
    )
    report = stalled(run)
    assert report.startswith("workflow ") and "no progress in phase 'generate' (rewards of prompt" in report
    assert f"trainer.timeouts.generate_s={LIMIT_S}" in report and "of step 2 for" in report
    hangs = report.splitlines()[1]  # the process that hangs, and what it runs
    assert hangs.startswith("reward ") and "runs tests.e2e.rewards.parity_apart; it is in parity_apart" in hangs
    assert any("in parity_apart" in path.read_text() for path in (run.folder / "stall").glob("reward_*.txt"))
    assert "made no progress" in run.stderr and str(run.folder / "stall") in run.stderr


def test_rank_that_stays_away_from_a_collective_is_named_and_the_sweep_goes_on(checkpoint, tmp_path):
    run = Run(
        tmp_path,
        "-m",
        *small(
            checkpoint,
            "cluster.n_gpus_per_node=2",
            "algo.loss_mode=tests.e2e.stalls.rank_1_sleeps,ppo_clip",
            "data.val_files=null",
            "trainer.total_training_steps=1",
            "trainer.timeouts.start_s=null",  # no limit: nor has the process group one
            f"trainer.timeouts.train_s={LIMIT_S}",
        ),
    )
    assert run.wait() == FAILED, run.stderr[-3000:]
    assert run.left_behind() == []
    first, second = sorted(path for path in (tmp_path / "multirun").glob("*/*/*") if path.is_dir())
    blamed, waits = (first / "stall" / "report.txt").read_text().splitlines()[:2]
    assert blamed.startswith("rank 1 made no progress in phase 'train' (train actor) of step 1")
    assert "rank_1_sleeps" in blamed and f"trainer.timeouts.train_s={LIMIT_S}" in blamed
    assert waits.startswith("rank 0 waits for other ranks in") and "torch/distributed" in waits
    assert "in rank_1_sleeps" in (first / "stall" / "rank_1.txt").read_text()
    assert f"exit status {STALLED}" in run.stderr
    assert not (second / "stall").exists() and run.stdout.count('"finished": true') == 1


def test_driver_whose_event_loop_hangs_is_ended_from_outside_of_it(checkpoint, tmp_path):
    run = Run(
        tmp_path / "a",
        *small(
            checkpoint,
            "trainer=fully_async",
            "trainer.hook=tests.e2e.stalls.block_the_loop",
            "data.val_files=null",
            f"trainer.timeouts.generate_s={LIMIT_S}",
        ),
    )
    report = stalled(run)
    assert (
        report.startswith("driver made no progress in phase 'generate'") and "block_the_loop" in report.splitlines()[0]
    )
    assert "the driver could not end by itself" in run.stderr


def test_exit_in_the_users_code_does_not_pass_for_success(checkpoint, tmp_path):
    hook = "trainer.hook=tests.e2e.stalls.leave"
    run = Run(tmp_path / "a", *small(checkpoint, "trainer=fully_async", hook, "data.val_files=null"))
    assert run.wait() == FAILED
    assert run.left_behind() == []
    assert "something called sys.exit(0) before the run had ended" in run.stderr
