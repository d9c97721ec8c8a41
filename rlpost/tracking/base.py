"""What every tracker offers, and the names a config can choose."""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpost.registry import Registry, load_dotted
from rlpost.tracking.config import LOGGERS, TrackingConfig


@dataclass(slots=True, kw_only=True)
class RunInfo:
    """What trackers may know of the run: its folder, its composed config as plain containers, its length in steps."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None


class Tracker(ABC):
    """One place where metrics go. Built as `Tracker(cfg, run)`, which raises on settings that cannot work."""

    def __init__(self, cfg: TrackingConfig, run: RunInfo):
        self.cfg, self.run = cfg, run

    @property
    def run_name(self) -> str:
        """`tracking.experiment_name`, or the name of the run folder."""
        return self.cfg.experiment_name or self.run.folder.resolve().name

    @abstractmethod
    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Record readings of one step; called several times a step when training and validation both report."""

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:  # noqa: B027 (optional)
        """Record sampled answers, one row an answer; rows share their keys."""

    def note(self, text: str) -> None:  # noqa: B027 (optional)
        """Tell the person watching; only trackers with a screen do."""

    def rewind(self, step: int) -> None:  # noqa: B027 (optional)
        """The run resumes after `step`: forget what was logged beyond it. Called before the first `log`."""

    def close(self, failed: bool = False) -> None:  # noqa: B027 (optional)
        """Write out what is buffered; `failed` says how the run ended."""


TRACKERS: Registry[type[Tracker]] = Registry("tracker", [f"rlpost.tracking.{name}" for name in LOGGERS])


def tracker_class(name: str) -> type[Tracker]:
    """The tracker class that `tracking.logger` names: a registered name, or the dotted path of a `Tracker` subclass.

    Raises:
        ValueError: no such tracker, or the path leads to something else.
    """
    if "." not in name:
        return TRACKERS.get(name, "tracking.logger")
    found = load_dotted(name, "tracking.logger")
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise ValueError(f"tracking.logger: {name} is {found!r}, expected a subclass of rlpost.tracking.base.Tracker")
    return found


def require(module: str, user: str) -> ModuleType:
    """Import the optional package that `user`, such as `tracking.logger=wandb`, needs.

    Raises:
        ValueError: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{user} needs a package that does not import ({error}): pip install 'rlpost[tracking]', or choose others, "
            "for example tracking.logger=[console,jsonl]"
        ) from error
