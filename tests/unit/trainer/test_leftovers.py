"""Files of an earlier run in a folder in which another begins anew."""

from rlpost.trainer.leftovers import set_earlier_aside


def test_what_could_pass_for_the_new_runs_is_set_aside_and_nothing_else_is_touched(tmp_path):
    run_dir, rollouts = tmp_path / "run", tmp_path / "rollouts"
    (run_dir / "replay" / "nonfinite_step_3").mkdir(parents=True)
    (run_dir / "hf").mkdir()
    for name in ("curves.png", "notes.txt"):
        (run_dir / name).write_text(name)
    rollouts.mkdir()
    for name in ("1.jsonl", "12.jsonl", "train.jsonl", "7.json"):
        (rollouts / name).write_text(name)
    set_earlier_aside(run_dir, rollouts)
    assert sorted(path.name for path in run_dir.iterdir()) == ["curves.png.old", "hf.old", "notes.txt", "replay.old"]
    assert (run_dir / "replay.old" / "nonfinite_step_3").is_dir()
    names = sorted(path.name for path in rollouts.iterdir())
    assert names == ["1.jsonl.old", "12.jsonl.old", "7.json", "train.jsonl"]
    assert (rollouts / "12.jsonl.old").read_text() == "12.jsonl"


def test_nothing_to_set_aside_is_no_error(tmp_path):
    set_earlier_aside(tmp_path, None)
    set_earlier_aside(tmp_path, tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
