"""A `Trainer` of stand-ins, put together as `build.py` does it."""

from pathlib import Path
from typing import Any

from rlpost.algos.algorithm import Algorithm
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.replay import ReplayStore
from rlpost.trainer.run_state import RunState
from rlpost.trainer.state import CheckpointStore
from rlpost.trainer.trainer import Trainer
from rlpost.trainer.update import Updates


def make_trainer(
    cfg: TrainerConfig,
    algorithm: Algorithm,
    folder: Path,
    *,
    source: Any,
    workers: Any,
    gate: Any,
    reporter: Any,
    total_steps: int = 1,
    replays: ReplayStore | None = None,
    ledger: Ledger | None = None,
) -> Trainer:
    """One group of two samples a step, no validation."""
    replays, ledger = replays or ReplayStore(folder, {}), ledger or Ledger(None)
    return Trainer(
        cfg,
        algorithm=algorithm,
        source=source,
        workers=workers,
        updates=Updates(cfg, algorithm, workers, replays, reporter),
        gate=gate,
        evaluator=None,
        reporter=reporter,
        state=RunState(CheckpointStore(folder, None), source, algorithm, workers, reporter, ledger),
        ledger=ledger,
        groups_per_step=1,
        n=2,
        total_steps=total_steps,
    )
