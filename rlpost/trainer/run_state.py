"""Everything that a run needs to go on, from the parts that hold it to a checkpoint and back."""

from collections import ChainMap
from pathlib import Path
from typing import Any

from rlpost import heartbeat
from rlpost.algos.algorithm import Algorithm
from rlpost.trainer.history import LEDGER
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.objects import prompts_in
from rlpost.trainer.report import Reporter
from rlpost.trainer.source import RolloutSource
from rlpost.trainer.state import CheckpointStore
from rlpost.workers.group import WorkerGroup


class RunState:
    """Saves and restores source, algorithm, reporter, ledger, and the workers' weights and optimizers together."""

    def __init__(
        self,
        checkpoints: CheckpointStore,
        source: RolloutSource,
        algorithm: Algorithm,
        workers: WorkerGroup,
        reporter: Reporter,
        ledger: Ledger,
    ):
        self._checkpoints, self._source, self._algorithm = checkpoints, source, algorithm
        self._workers, self._reporter, self._ledger = workers, reporter, ledger

    async def save(self, step: int) -> None:
        """Write the checkpoint of a step that has ended."""
        state: dict[str, Any] = {"source": self._source.state_dict(), "algorithm": self._algorithm.state_dict()}
        mark = self._ledger.saved(step, held=prompts_in(state["source"]))
        state |= {"reporter": self._reporter.state_dict(), "ledger": mark}

        async def write(folder: Path) -> dict[str, str]:
            self._ledger.copy(folder / LEDGER)
            async with self._source.without_push():
                return dict(ChainMap(*await self._workers.call_async("save", folder)))

        with heartbeat.phase("save", step=step):
            await self._checkpoints.save(step, state, write)

    async def resume(self, where: str) -> int:
        """Restore what `trainer.resume` means; the step that was reached, 0 where nothing was restored."""
        with heartbeat.phase("save", "resume"):
            step = await self._restore(self._checkpoints.find(where))
        self._checkpoints.set_aside(step)
        return step

    async def _restore(self, folder: Path | None) -> int:
        if folder is None:
            self._ledger.resumed(0)
            return 0
        state = await self._checkpoints.load(folder)
        await self._workers.call_async("load", folder)
        self._source.load_state_dict(state["source"])
        self._algorithm.load_state_dict(state["algorithm"])
        self._reporter.load_state_dict(state["reporter"], state["step"])
        self._ledger.resumed(state["step"], state["ledger"], folder / LEDGER)
        return state["step"]
