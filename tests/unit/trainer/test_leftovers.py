"""Files of an earlier run in a folder in which another begins anew."""

from rlpost.trainer.leftovers import set_earlier_aside


def test_bundles_and_rollouts_are_set_aside_and_nothing_else_is_touched(tmp_path):
    run_dir, rollouts = tmp_path / "run", tmp_path / "rollouts"
    (run_dir / "replay" / "nonfinite_step_3").mkdir(parents=True)
    rollouts.mkdir()
    for name in ("1.jsonl", "12.jsonl", "train.jsonl", "7.json"):
        (rollouts / name).write_text(name)
    set_earlier_aside(run_dir, rollouts)
    assert [path.name for path in run_dir.iterdir()] == ["replay.old"]
    assert (run_dir / "replay.old" / "nonfinite_step_3").is_dir()
    names = sorted(path.name for path in rollouts.iterdir())
    assert names == ["1.jsonl.old", "12.jsonl.old", "7.json", "train.jsonl"]
    assert (rollouts / "12.jsonl.old").read_text() == "12.jsonl"


def test_nothing_to_set_aside_is_no_error(tmp_path):
    set_earlier_aside(tmp_path, None)
    set_earlier_aside(tmp_path, tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
