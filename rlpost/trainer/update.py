"""The training of one step: every role in turn, and what becomes of a step with a number that is not finite."""

from pathlib import Path
from typing import Any

from rlpost import heartbeat
from rlpost.algos.algorithm import Algorithm
from rlpost.batch import Batch
from rlpost.metrics import Metrics, merge, scalars
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.nonfinite import Fault, NonFinite, fault_of_update
from rlpost.trainer.replay import ReplayStore
from rlpost.trainer.report import Reporter
from rlpost.workers.group import WorkerGroup


class Updates:
    """Trains batches on the workers, and keeps steps that somebody will want to run again.

    Args:
        cfg: the `trainer` section.
        algorithm: which roles train, and on what loss.
        workers: the trainer ranks.
        replays: where steps are kept.
        reporter: hears of skipped steps; its folder gets the profiles.
    """

    def __init__(
        self, cfg: TrainerConfig, algorithm: Algorithm, workers: WorkerGroup, replays: ReplayStore, reporter: Reporter
    ):
        self._cfg, self._algorithm, self._workers = cfg, algorithm, workers
        self._replays, self._reporter = replays, reporter
        self._skipped_in_a_row = 0

    async def train(self, step: int, batch: Batch) -> tuple[Metrics, Fault | None]:
        """Every role of the step in turn, up to the first update that is not finite."""
        metrics, fault = Metrics(), None
        roles, keep = self._algorithm.trains(step), step in self._cfg.save_replay_steps
        if keep:
            await self._replays.begin(f"step_{step}", self._save_weights)
        await self._profile(step, "start_profile")
        for role in roles:
            trained = await self._workers.train(role, batch, self._algorithm, step)
            metrics = merge([metrics, trained])  # what both roles report, such as memory, is reduced
            if fault := fault_of_update(role, trained):
                break
        await self._profile(step, "stop_profile", self._reporter.folder / "profile" / f"step_{step}")
        if keep:
            self._replays.finish(f"step_{step}", step, batch, roles, scalars(metrics))
        if fault is None:
            self._skipped_in_a_row = 0
        return metrics, fault

    async def stop_or_skip(self, step: int, fault: Fault, batch: Batch, metrics: Metrics) -> None:
        """Keep the step as a replay bundle, and end the run unless it may go on without the rest of the step.

        Raises:
            NonFinite: names what was not finite, and the bundle.
        """
        roles = self._algorithm.trains(step)
        said = f"step {step}: {fault.what}"
        try:
            folder = await self._replays.keep_faulty(step, batch, roles, scalars(metrics), fault, self._save_weights)
        except Exception as error:  # whatever hinders it: the fault is the news, and must not be lost
            raise NonFinite(fault, f"{said}. Its replay bundle could not be written: {error}") from error
        said += f". To see where it first goes wrong: python -m rlpost.tools.replay {folder}"
        self._skipped_in_a_row += 1
        if self._cfg.on_nonfinite == "stop":
            raise NonFinite(fault, f"{said} (trainer.on_nonfinite=skip would go on without the step)")
        if self._skipped_in_a_row >= self._cfg.max_skipped_steps:
            in_a_row = f"trainer.max_skipped_steps={self._cfg.max_skipped_steps} in a row"
            raise NonFinite(fault, f"{said}. It is the last of {in_a_row}")
        self._reporter.note(f"skipped     {said}")

    async def _save_weights(self, folder: Path) -> None:
        with heartbeat.phase("save", "replay bundle"):
            await self._workers.call_async("save", folder)

    async def _profile(self, step: int, method: str, *args: Any) -> None:
        if step in self._cfg.profile_steps:
            await self._workers.call_async(method, *args)
