import json

import pytest

from rlpost.tracking.base import RunInfo
from rlpost.tracking.config import TrackingConfig

SCALARS = {"reward/mean": 0.5, "val/openai/gsm8k/pass@8": 0.25}
ROWS = [{"prompt": "1|2\n+?", "answer": "3", "reward": 1.0}, {"prompt": "4", "answer": "5", "reward": 0.0}]


def run_info(tmp_path):
    return RunInfo(folder=tmp_path, config={"algo": {"name": "grpo"}}, total_steps=3)


def test_tensorboard_holds_scalars_and_answers_and_hides_steps_after_a_rewind(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlpost.tracking.tensorboard import TensorboardTracker

    first = TensorboardTracker(TrackingConfig(), run_info(tmp_path))
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": float(step)})
    first.table(3, ROWS)
    first.close()
    second = TensorboardTracker(TrackingConfig(), run_info(tmp_path))
    second.rewind(2)
    second.log(3, {"reward/mean": 30.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_of_a_fresh_run_in_a_used_folder_does_not_show_the_old_one(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlpost.tracking.tensorboard import TensorboardTracker

    for value in (1.0, 2.0):
        tracker = TensorboardTracker(TrackingConfig(), run_info(tmp_path))
        tracker.log(1, {"reward/mean": value})
        tracker.close()
    for name, value in (("tensorboard", 2.0), ("tensorboard.old", 1.0)):
        events = EventAccumulator(str(tmp_path / name))
        events.Reload()
        assert [e.value for e in events.Scalars("reward/mean")] == [value]


def test_tensorboard_table_escapes_what_would_end_a_cell(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlpost.tracking.tensorboard import TensorboardTracker

    tracker = TensorboardTracker(TrackingConfig(), run_info(tmp_path))
    tracker.table(1, ROWS)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[2] == "| 1\\|2<br>+? | 3 | 1.0 |"


def test_wandb_offline_keeps_one_run_id_over_a_resume(tmp_path):
    pytest.importorskip("wandb")
    from rlpost.tracking.wandb import WandbTracker

    cfg = TrackingConfig(logger=["wandb"], project_name="p", wandb={"mode": "offline", "tags": ["t"]})
    ids = []
    for step in (1, 2):
        tracker = WandbTracker(cfg, run_info(tmp_path))
        tracker.log(step, SCALARS)
        tracker.table(step, ROWS)
        ids.append(tracker._run.id)
        assert dict(tracker._run.config) == {"algo": {"name": "grpo"}}
        assert tracker._run.summary["reward/mean"] == 0.5
        assert tracker._run.tags == ("t",)
        tracker.close()
    assert ids[0] == ids[1] == (tmp_path / "wandb_run_id").read_text()
    assert list(tmp_path.glob(f"wandb/offline-run-*-{ids[0]}/*.wandb"))


def test_mlflow_without_a_server_logs_to_the_run_folder_and_continues_after_a_resume(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from rlpost.tracking.mlflow import MlflowTracker

    cfg = TrackingConfig(logger=["mlflow"], project_name="p", experiment_name="e")
    first = MlflowTracker(cfg, run_info(tmp_path))
    first.log(1, SCALARS)
    first.close(failed=True)
    second = MlflowTracker(cfg, run_info(tmp_path))
    second.log(2, {"reward/mean": 0.75})
    second.table(2, ROWS)
    second.close()

    client = MlflowClient(tracking_uri=str(tmp_path / "mlflow"))
    runs = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert [(r.info.run_name, r.info.status) for r in runs] == [("e", "FINISHED")]
    run_id = runs[0].info.run_id
    history = client.get_metric_history(run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.75)]
    assert runs[0].data.metrics["val/openai/gsm8k/pass_8"] == 0.25
    (samples,) = tmp_path.glob("mlflow/*/*/artifacts/samples/2.json")
    assert json.loads(samples.read_text()) == {"rows": ROWS}


def test_mlflow_failed_run_is_marked_failed(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from rlpost.tracking.mlflow import MlflowTracker

    tracker = MlflowTracker(TrackingConfig(), run_info(tmp_path))
    tracker.close(failed=True)
    run_id = (tmp_path / "mlflow_run_id").read_text()
    assert MlflowClient(tracking_uri=str(tmp_path / "mlflow")).get_run(run_id).info.status == "FAILED"


def test_mlflow_address_that_cannot_work_names_the_key(tmp_path):
    pytest.importorskip("mlflow")
    from rlpost.tracking.mlflow import MlflowTracker

    with pytest.raises(ValueError, match=r"tracking\.mlflow_uri=nosuch://store"):
        MlflowTracker(TrackingConfig(mlflow_uri="nosuch://store"), run_info(tmp_path))


def test_mlflow_store_that_breaks_mid_run_costs_readings_not_the_run(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    from mlflow.exceptions import MlflowException

    from rlpost.tracking.mlflow import MlflowTracker

    tracker = MlflowTracker(TrackingConfig(), run_info(tmp_path))

    def down(*args, **kwargs):
        raise MlflowException("server is down")

    monkeypatch.setattr(tracker._client, "log_batch", down)
    tracker.log(1, SCALARS)
    assert "server is down" in caplog.text
