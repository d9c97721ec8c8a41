import json

import pytest

from rlpost.tracking.base import RunInfo
from rlpost.tracking.config import TrackingConfig
from rlpost.tracking.jsonl import JsonlTracker, read_jsonl


def tracker(folder):
    return JsonlTracker(TrackingConfig(logger=["jsonl"]), RunInfo(folder=folder))


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "time_s"} for row in rows]


def test_jsonl_line_is_on_disk_before_close(tmp_path):
    jsonl = tracker(tmp_path)
    jsonl.log(1, {"reward/mean": 0.5})
    assert without_time(read_jsonl(tmp_path / "metrics.jsonl")) == [{"step": 1, "reward/mean": 0.5}]
    jsonl.close()


def test_jsonl_non_finite_readings_stay_valid_json(tmp_path):
    jsonl = tracker(tmp_path)
    jsonl.log(1, {"a": float("nan"), "b": float("inf"), "c": 1})
    jsonl.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    assert without_time([json.loads(line)]) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_jsonl_resume_drops_later_steps_and_a_torn_line_then_appends(tmp_path):
    first = tracker(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"x": float(step)})
        first.table(step, [{"answer": str(step)}])
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "torn')
    second = tracker(tmp_path)
    second.rewind(2)
    second.log(3, {"x": 30.0})
    second.table(3, [{"answer": "again"}])
    second.close()
    assert [(r["step"], r["x"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [r["answer"] for r in read_jsonl(tmp_path / "samples.jsonl")] == ["1", "2", "again"]


def test_jsonl_fresh_run_in_a_used_folder_sets_the_old_file_aside(tmp_path):
    for value in (1.0, 2.0):
        jsonl = tracker(tmp_path)
        jsonl.log(1, {"x": value})
        jsonl.close()
    assert [r["x"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [2.0]
    assert [r["x"] for r in read_jsonl(tmp_path / "metrics.jsonl.old")] == [1.0]


def test_read_jsonl_names_the_file_and_line_that_is_broken(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_jsonl(path)
