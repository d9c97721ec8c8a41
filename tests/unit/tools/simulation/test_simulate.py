"""The command: tables, JSON, pictures, calibration and comparison, and what it refuses."""

import json

import pytest

from rlpost.tools.simulate import main
from tests.unit.tools.simulation.test_calibrate import write_run

QUICK = ["batch=8", "n=2", "mean_length=30", "max_length=100", "devices=8", "batches=2", "warmup=1"]


def test_a_sweep_is_a_table_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "sweep.png"
    assert main([*QUICK, "rollout_share=0.25,0.5", "tail=2,4", "--plot", str(picture)]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| rollout_share | tail | colocated s/batch | async s/batch | ratio |")
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| 0.25", "2.0"],
        ["| 0.25", "4.0"],
        ["| 0.5", "2.0"],
        ["| 0.5", "4.0"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_run_as_json_and_batch_by_batch(tmp_path, capsys):
    picture = tmp_path / "run.png"
    assert main([*QUICK, "--json", "--plot", str(picture)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ratio"] == pytest.approx(row["colocated"]["batch_s"] / row["fully_async"]["batch_s"])
    assert len(row["fully_async"]["batches_s"]) == 2 and picture.stat().st_size > 0


def test_calibrated_costs_make_a_scenario_that_is_compared_with_an_async_run(tmp_path, capsys):
    run, scenario = write_run(tmp_path / "run", 32, 8, 1), tmp_path / "ours.json"
    assert main(["--calibrate", str(run), "--save", str(scenario), "decode_sequence_s=0.0002"]) == 0
    said = capsys.readouterr().out
    assert "| decode_sequence_s | 0.0002 |" in said and "| generate |" in said and "measured step:" in said
    measured = {"timing_s/step": 10.0, "async/rollout_idle": 0.5, "async/trainer_idle": 0.25, "async/staleness/mean": 1}
    (tmp_path / "async.jsonl").write_text("".join(json.dumps({"step": i} | measured) + "\n" for i in range(5)))
    command = [str(scenario), "steps_per_batch=1", "trigger_parameter_sync_step=1", "batches=2", "warmup=1"]
    assert main([*command, "--against", str(tmp_path / "async.jsonl"), "--json"]) == 0
    against = json.loads(capsys.readouterr().out)[0]["against"]
    assert against["timing_s/step"]["measured"] == 10.0 and against["timing_s/step"]["predicted"] > 0
    assert main([*command, "--against", str(tmp_path / "async.jsonl")]) == 0
    assert "| timing_s/step |" in capsys.readouterr().out


def test_wrong_input_ends_with_its_fix_on_standard_error(tmp_path, capsys):
    assert main(["tali=3"]) == 1 and "did you mean 'tail'" in capsys.readouterr().err.replace('"', "'")
    assert main(["--calibrate", str(tmp_path)]) == 1 and "no such file" in capsys.readouterr().err
    assert main(["--calibrate", str(tmp_path), "n=2,4"]) == 1 and "several of n" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([*QUICK, "--against", str(tmp_path)]) == 1 and "no async step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["one.json", "two.json"])
