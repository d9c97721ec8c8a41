import subprocess
import sys

import pytest

from rlpost.tracking.base import TRACKERS, RunInfo, Tracker, require
from rlpost.tracking.config import LOGGERS, TrackingConfig
from rlpost.tracking.jsonl import read_jsonl
from rlpost.tracking.tracking import Tracking


class Recorder(Tracker):
    """Named by dotted path below, as a user would name their own."""

    def __init__(self, cfg, run):
        super().__init__(cfg, run)
        self.calls = []

    def log(self, step, scalars):
        self.calls.append(("log", step, scalars))

    def table(self, step, rows):
        self.calls.append(("table", step, rows))

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def close(self, failed=False):
        self.calls.append(("close", failed))


class Broken(Recorder):
    def __init__(self, cfg, run):
        super().__init__(cfg, run)
        raise ValueError("cannot open")


def test_every_logger_of_the_config_is_registered_and_no_other():
    assert TRACKERS.names() == sorted(LOGGERS)


def test_tracking_passes_calls_on_in_order_and_closes_once(tmp_path):
    tracking = Tracking([Recorder(TrackingConfig(), RunInfo(folder=tmp_path)) for _ in range(2)])
    tracking.rewind(3)
    tracking.log(4, {"x": 1.0})
    tracking.table(4, [{"answer": "7"}])
    tracking.table(5, [])
    tracking.close()
    tracking.close(failed=True)
    expected = [("rewind", 3), ("log", 4, {"x": 1.0}), ("table", 4, [{"answer": "7"}]), ("close", False)]
    assert [t.calls for t in tracking.trackers] == [expected, expected]


def test_tracking_build_makes_the_folder_and_takes_dotted_paths(tmp_path):
    name = f"{__name__}.Recorder"
    tracking = Tracking.build(TrackingConfig(logger=["jsonl", name]), tmp_path / "new" / "run")
    tracking.log(1, {"x": 2.0})
    tracking.close()
    assert read_jsonl(tmp_path / "new" / "run" / "metrics.jsonl")[0]["x"] == 2.0
    assert tracking.trackers[1].calls == [("log", 1, {"x": 2.0}), ("close", False)]


def test_tracking_build_refuses_a_path_that_is_no_tracker(tmp_path):
    with pytest.raises(ValueError, match="expected a subclass of rlpost.tracking.base.Tracker"):
        Tracking.build(TrackingConfig(logger=["pathlib.Path"]), tmp_path)


def test_tracking_build_closes_what_was_open_when_a_later_tracker_fails(tmp_path, monkeypatch):
    opened = []
    items = {"console": lambda cfg, run: opened.append(Recorder(cfg, run)) or opened[-1], "jsonl": Broken}
    monkeypatch.setattr("rlpost.tracking.tracking.tracker_class", items.__getitem__)
    with pytest.raises(ValueError, match="cannot open"):
        Tracking.build(TrackingConfig(logger=["console", "jsonl"]), tmp_path)
    assert opened[0].calls == [("close", True)]


def test_tracking_config_names_the_near_tracker():
    with pytest.raises(ValueError, match="no such tracker 'tensorbord'; did you mean 'tensorboard'"):
        TrackingConfig(logger=["console", "tensorbord"])


def test_tracking_config_refuses_a_tracker_named_twice():
    with pytest.raises(ValueError, match="'jsonl' is listed twice"):
        TrackingConfig(logger=["jsonl", "jsonl"])


def test_require_names_the_extra_for_a_missing_package():
    with pytest.raises(ValueError, match=r"tracking\.logger=wandb.*pip install 'rlpost\[tracking\]'"):
        require("rlpost_no_such_package", "tracking.logger=wandb")


def test_console_and_jsonl_load_no_optional_package(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from rlpost.tracking.config import TrackingConfig\n"
        "from rlpost.tracking.tracking import Tracking\n"
        f"tracking = Tracking.build(TrackingConfig(logger=['console', 'jsonl']), pathlib.Path({str(tmp_path)!r}))\n"
        "tracking.log(1, {'reward/mean': 0.5}); tracking.close()\n"
        "print(sorted({'torch', 'ray', 'wandb', 'mlflow', 'tensorboard', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
