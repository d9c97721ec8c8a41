"""Schema of the `tracking` group."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class TrackingConfig:
    """Where metrics go. `logger` takes any of console, jsonl, tensorboard, wandb, mlflow."""

    logger: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    project_name: str = "rlpost"
    experiment_name: str | None = None  # null: the run folder's name
    wandb: dict[str, Any] = field(default_factory=dict)  # keyword arguments of wandb.init
    mlflow_uri: str | None = None  # null: <run folder>/mlflow
