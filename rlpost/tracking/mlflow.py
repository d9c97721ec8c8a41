"""MLflow. `tracking.mlflow_uri` is a server's address, or null for a store in the run folder."""

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpost.tracking.base import TRACKERS, RunInfo, Tracker, require
from rlpost.tracking.config import TrackingConfig

logger = logging.getLogger(__name__)


@TRACKERS.register("mlflow")
class MlflowTracker(Tracker):
    """One MLflow run a run folder: its id is kept in `mlflow_run_id`, so a resumed run continues it.

    Metric names lose characters that MLflow refuses (`pass@8` becomes `pass_8`). A call that fails once the run has
    started is logged as a warning and the reading is lost there: a tracking server that is down must not end the run.
    """

    def __init__(self, cfg: TrackingConfig, run: RunInfo):
        super().__init__(cfg, run)
        client_module = require("mlflow.tracking", "tracking.logger=mlflow")
        self._entities = require("mlflow.entities", "tracking.logger=mlflow")
        self._error = require("mlflow.exceptions", "tracking.logger=mlflow").MlflowException
        uri = cfg.mlflow_uri or str((run.folder / "mlflow").resolve())
        if "://" not in uri or uri.startswith("file:"):
            # MLflow keeps its file store for opted-in users; its databases would need the full mlflow package.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            self._client = client_module.MlflowClient(tracking_uri=uri)
            self._run_id = self._find_or_create_run(run.folder / "mlflow_run_id")
        except (self._error, ImportError) as error:
            raise ValueError(
                f"tracking.mlflow_uri={cfg.mlflow_uri}: MLflow cannot log there ({error}). Give a server's http(s) "
                "address or a folder (a database needs `pip install mlflow`), or take mlflow out of tracking.logger"
            ) from error
        self._attempt(lambda: self._client.log_dict(self._run_id, run.config, "config.yaml"))

    def _find_or_create_run(self, id_file: Path) -> str:
        if id_file.exists():
            run_id = id_file.read_text().strip()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        project = self.cfg.project_name
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run_id = self._client.create_run(experiment_id, run_name=self.run_name).info.run_id
        id_file.write_text(run_id)
        return run_id

    def log(self, step: int, scalars: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._entities.Metric(_name(k), float(v), now_ms, step) for k, v in scalars.items()]
        self._attempt(lambda: self._client.log_batch(self._run_id, metrics=metrics))

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:
        plain = [{k: v if isinstance(v, int | float | str | None) else str(v) for k, v in row.items()} for row in rows]
        self._attempt(lambda: self._client.log_dict(self._run_id, {"rows": plain}, f"samples/{step}.json"))

    def close(self, failed: bool = False) -> None:
        self._attempt(lambda: self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED"))

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except self._error as error:
            logger.warning("mlflow: a reading is lost: %s", error)


def _name(metric: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", metric)
