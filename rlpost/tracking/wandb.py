"""Weights & Biases. `tracking.wandb` takes any argument of `wandb.init`, such as `mode: offline` or `entity`."""

import secrets
from typing import Any

from rlpost.tracking.base import TRACKERS, RunInfo, Tracker, require
from rlpost.tracking.config import TrackingConfig


@TRACKERS.register("wandb")
class WandbTracker(Tracker):
    """One wandb run a run folder: its id is kept in `wandb_run_id`, so a resumed run continues the same curves.

    Steps are a metric of their own, `step`, because wandb's own counter may not go back after a resume.
    """

    def __init__(self, cfg: TrackingConfig, run: RunInfo):
        super().__init__(cfg, run)
        self._wandb = require("wandb", "tracking.logger=wandb")
        id_file = run.folder / "wandb_run_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        settings = {
            "project": cfg.project_name,
            "name": self.run_name,
            "id": id_file.read_text().strip(),
            "resume": "allow",
            "dir": str(run.folder),
            "config": run.config,
        }
        self._run = self._wandb.init(**(settings | cfg.wandb))
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:
        names = list(rows[0])
        data = [[_cell(row.get(name)) for name in names] for row in rows]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=names, data=data)})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
