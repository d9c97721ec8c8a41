"""The only training loop: take, infer, advantages, train, publish."""

import time
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlpost import heartbeat
from rlpost.algos.algorithm import Algorithm
from rlpost.batch import Batch, Group, collate
from rlpost.metrics import Metric, Metrics, Reduce, Timers, merge, scalars
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.evaluate import Evaluator
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.history import LEDGER
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.nonfinite import Fault, NonFinite, fault_of_update, require_finite
from rlpost.trainer.objects import prompts_in
from rlpost.trainer.parity import ParityError
from rlpost.trainer.replay import ReplayStore
from rlpost.trainer.report import Reporter
from rlpost.trainer.source import RolloutSource
from rlpost.trainer.state import CheckpointStore
from rlpost.workers.group import WorkerGroup


class Trainer:
    """Drives one run; every number it uses is in the `Batch` of the step.

    Args:
        cfg: the `trainer` section.
        algorithm: what to infer, keep, compute and train.
        source: scored groups in, new weights out.
        workers: the trainer ranks, with the roles that the algorithm needs.
        gate: compares the engine's logprobs with the trainer's.
        evaluator: validation, or None without validation sets.
        reporter: metrics, tables and rollouts to the trackers and the run folder.
        checkpoints: where to save to and resume from.
        replays: where to keep steps that can be run again.
        ledger: what became of every group; the source's own. None: nothing is recorded.
        groups_per_step: `data.train_batch_size`.
        n: samples a prompt.
        total_steps: the step to end at.
    """

    def __init__(
        self,
        cfg: TrainerConfig,
        *,
        algorithm: Algorithm,
        source: RolloutSource,
        workers: WorkerGroup,
        gate: ParityGate,
        evaluator: Evaluator | None,
        reporter: Reporter,
        checkpoints: CheckpointStore,
        replays: ReplayStore,
        groups_per_step: int,
        n: int,
        total_steps: int,
        ledger: Ledger | None = None,
    ):
        self._cfg, self._algorithm, self._source, self._workers = cfg, algorithm, source, workers
        self._gate, self._evaluator, self._reporter, self._checkpoints = gate, evaluator, reporter, checkpoints
        self._groups_per_step, self._n, self.total_steps = groups_per_step, n, total_steps
        self._replays = replays
        self._ledger = ledger or Ledger(None)
        self._timers = Timers()
        self._skipped_in_a_row = 0
        self.step = 0
        self.stop_requested = False

    async def fit(self) -> dict[str, Any]:
        """Train to `total_steps`, or until `stop_requested`; returns the summary that `main` prints."""
        start = time.perf_counter()
        with heartbeat.phase("save", "resume"):
            resumed = await self._resume()
        self._checkpoints.set_aside(self.step)
        with heartbeat.phase("publish", step=self.step):
            await self._source.publish(self.step)
        with heartbeat.phase("validate", "parity probe"):
            await self._gate.probe(self._source, self.step)
        if self._cfg.val_before_train and not resumed:
            await self._validate()
        while self.step < self.total_steps and not self.stop_requested:
            self.step += 1
            metrics = await self._train_step()
            self._reporter.step(self.step, scalars(metrics))
            last = self.step == self.total_steps
            if last or _due(self.step, self._cfg.test_freq):
                await self._validate()
            if last or self.stop_requested or _due(self.step, self._cfg.save_freq):
                await self._save()
        if self.step == self.total_steps and self._cfg.export_hf:
            with heartbeat.phase("save", "export_hf"):
                await self._workers.call_async("export_hf", self._reporter.folder / "hf")
        return self._reporter.summary(self.step, time.perf_counter() - start, finished=self.step >= self.total_steps)

    async def _train_step(self) -> Metrics:
        """One step: n kept groups in, one new version out, though the weights be the same where it was skipped."""
        timers = self._timers
        with timers("step"):
            before = self._algorithm.state_dict()
            groups, batch, metrics, fault = await self._rollout()
            metrics["throughput/tokens"] = Metric(batch.num_tokens, reduce=Reduce.SUM)
            if fault is None:
                with self._phase("train"):
                    trained, fault = await self._train(batch)
                metrics = merge([metrics, trained])
            if fault is None:
                self._skipped_in_a_row = 0
                self._ledger.trained(self.step, groups)
            else:
                self._algorithm.load_state_dict(before)
                await self._stop_or_skip(fault, batch, metrics)
                self._ledger.trained(self.step, [])
                self._ledger.dropped(groups, "not_finite")
            metrics["train/skipped_steps"] = Metric(float(fault is not None), reduce=Reduce.SUM)
            with self._phase("publish"):
                metrics |= await self._source.publish(version=self.step)
        self._reporter.rollouts(self.step, groups)
        return metrics | self._source.metrics() | timers.pop()

    async def _rollout(self) -> tuple[list[Group], Batch, Metrics, Fault | None]:
        """The step's, once trainer and engine agree on them: sampled anew where the engine had to be repaired."""
        before = self._algorithm.state_dict()
        try:
            return await self._sample()
        except ParityError as error:
            with heartbeat.phase("start", "repair of the engine"):
                repaired = await self._gate.repair(error, self.step - 1)
            if not repaired:
                raise
        self._source.rewind()
        self._algorithm.load_state_dict(before)
        return await self._sample()

    async def _sample(self) -> tuple[list[Group], Batch, Metrics, Fault | None]:
        """Groups, their batch with everything that is trained on, and what in it is not finite.

        Advantages come before the checks, so that every number is looked at once, when all are there.
        """
        with self._phase("generate"):
            groups = await self._source.take(self._groups_per_step)
        batch = collate(groups, self._n)
        with self._phase("infer"):
            for column in self._algorithm.needs():
                batch.update(await self._workers.infer(column, batch))
            columns, metrics = self._algorithm.advantages(batch)
            batch.update(columns)
            try:
                require_finite(batch)
                metrics |= await self._gate.check(batch, version=self.step - 1)
            except NonFinite as error:
                return groups, batch, metrics, error.fault
            return groups, batch, metrics, None

    async def _train(self, batch: Batch) -> tuple[Metrics, Fault | None]:
        """Every role of the step in turn, up to the first update that is not finite."""
        metrics, fault = Metrics(), None
        roles, keep = self._algorithm.trains(self.step), self.step in self._cfg.save_replay_steps
        if keep:
            await self._replays.begin(f"step_{self.step}", self._save_weights)
        await self._profile("start_profile")
        for role in roles:
            trained = await self._workers.train(role, batch, self._algorithm, self.step)
            metrics = merge([metrics, trained])  # what both roles report, such as memory, is reduced
            if fault := fault_of_update(role, trained):
                break
        await self._profile("stop_profile", self._reporter.folder / "profile" / f"step_{self.step}")
        if keep:
            self._replays.finish(f"step_{self.step}", self.step, batch, roles, scalars(metrics))
        return metrics, fault

    async def _stop_or_skip(self, fault: Fault, batch: Batch, metrics: Metrics) -> None:
        """Keep the step as a replay bundle, and end the run unless it may go on without the rest of the step.

        Raises:
            NonFinite: names what was not finite, and the bundle.
        """
        roles = self._algorithm.trains(self.step)
        said = f"step {self.step}: {fault.what}"
        try:
            folder = await self._replays.keep_faulty(
                self.step, batch, roles, scalars(metrics), fault, self._save_weights
            )
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

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with heartbeat.phase(name, step=self.step), self._timers(name):
            yield

    async def _profile(self, method: str, *args: Any) -> None:
        if self.step in self._cfg.profile_steps:
            await self._workers.call_async(method, *args)

    async def _validate(self) -> None:
        if self._evaluator is not None:
            with heartbeat.phase("validate", step=self.step):
                report, groups = await self._evaluator.run(self._source.evaluate)
            shown = self._evaluator.rows(groups[: self._cfg.log_val_generations], samples=1)
            self._reporter.validation(self.step, report, shown)

    async def _save(self) -> None:
        state: dict[str, Any] = {"source": self._source.state_dict(), "algorithm": self._algorithm.state_dict()}
        mark = self._ledger.saved(self.step, held=prompts_in(state["source"]))
        state |= {"reporter": self._reporter.state_dict(), "ledger": mark}

        async def write(folder: Path) -> dict[str, str]:
            self._ledger.copy(folder / LEDGER)
            return dict(ChainMap(*await self._workers.call_async("save", folder)))

        with heartbeat.phase("save", step=self.step):
            await self._checkpoints.save(self.step, state, write)

    async def _resume(self) -> bool:
        folder = self._checkpoints.find(self._cfg.resume)
        if folder is None:
            self._ledger.resumed(0)
            return False
        state = await self._checkpoints.load(folder)
        await self._workers.call_async("load", folder)
        self._source.load_state_dict(state["source"])
        self._algorithm.load_state_dict(state["algorithm"])
        self._reporter.load_state_dict(state["reporter"], state["step"])
        self._ledger.resumed(state["step"], state["ledger"], folder / LEDGER)
        self.step = state["step"]
        return True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
