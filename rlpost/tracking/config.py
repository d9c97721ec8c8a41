"""Schema of the `tracking` group."""

from dataclasses import dataclass, field
from typing import Any

from rlpost.problems import refuse
from rlpost.registry import near

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")


@dataclass(slots=True, kw_only=True)
class TrackingConfig:
    """Where metrics go. `logger` lists console, jsonl, tensorboard, wandb, mlflow, or dotted paths of own Trackers."""

    logger: list[str] = field(  # console, jsonl, tensorboard, wandb, mlflow, or dotted paths of Trackers
        default_factory=lambda: ["console", "jsonl", "tensorboard"]
    )
    project_name: str = "rlpost"  # of wandb and mlflow
    experiment_name: str | None = None  # null: the run folder's name
    wandb: dict[str, Any] = field(default_factory=dict)  # keyword arguments of wandb.init
    mlflow_uri: str | None = None  # null: <run folder>/mlflow

    def __post_init__(self) -> None:
        for name in dict.fromkeys(self.logger):
            if name not in LOGGERS and "." not in name:
                refuse(f"tracking.logger: no such tracker '{name}'; {near(name, LOGGERS)}")
            if self.logger.count(name) > 1:
                refuse(f"tracking.logger={self.logger}: '{name}' is listed twice")
