"""The only training loop: take, infer, advantages, train, publish."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlpost import heartbeat
from rlpost.algos.algorithm import Algorithm
from rlpost.batch import Batch, collate
from rlpost.endings import begun
from rlpost.metrics import Metric, Metrics, Reduce, Timers, merge, scalars
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.evaluate import Evaluator
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.nonfinite import Fault, NonFinite, require_finite
from rlpost.trainer.parity import ParityError
from rlpost.trainer.report import Reporter
from rlpost.trainer.run_state import RunState
from rlpost.trainer.source import RolloutSource
from rlpost.trainer.update import Updates
from rlpost.trajectory import Group
from rlpost.workers.group import WorkerGroup


class Trainer:
    """Drives one run; every number it uses is in the `Batch` of the step.

    Args:
        groups_per_step: `data.train_batch_size`.
        n: samples a prompt.
        total_steps: the step to end at.
    """

    def __init__(
        self, cfg: TrainerConfig, *, algorithm: Algorithm, source: RolloutSource, workers: WorkerGroup,
        updates: Updates, gate: ParityGate, evaluator: Evaluator | None, reporter: Reporter, state: RunState,
        ledger: Ledger, groups_per_step: int, n: int, total_steps: int,
    ):  # fmt: skip
        self._cfg, self._algorithm, self._source, self._workers = cfg, algorithm, source, workers
        self._updates, self._gate, self._evaluator, self._reporter = updates, gate, evaluator, reporter
        self._state, self._ledger = state, ledger
        self._groups_per_step, self._n, self.total_steps = groups_per_step, n, total_steps
        self._timers = Timers()
        self.step = 0
        self.stop_requested = False

    async def fit(self) -> dict[str, Any]:
        """Train to `total_steps`, or until `stop_requested`; returns the summary that `main` prints.

        A `ValueError` says that a checkpoint or the parts do not fit; once training has begun, `Failed` comes instead.
        """
        start = time.perf_counter()
        self.step = await self._state.resume(self._cfg.resume)
        with heartbeat.phase("publish", step=self.step):
            await self._source.publish(self.step)
        with heartbeat.phase("validate", "parity probe"):
            await self._gate.probe(self._source, self.step)
        with begun():
            if self._cfg.val_before_train and self.step == 0:
                await self._validate()
            while self.step < self.total_steps and not self.stop_requested:
                self.step += 1
                with heartbeat.phase(*heartbeat.STEP, step=self.step):
                    await self._whole_step()
            if self.step == self.total_steps and self._cfg.export_hf:
                with heartbeat.phase("save", "export_hf"):
                    await self._workers.call_async("export_hf", self._reporter.folder / "hf")
        return self._reporter.summary(self.step, time.perf_counter() - start, finished=self.step >= self.total_steps)

    async def _whole_step(self) -> None:
        """A step, and the validation and the checkpoint that are due after it."""
        metrics = await self._train_step()
        self._reporter.step(self.step, scalars(metrics))
        last = self.step == self.total_steps
        if last or _due(self.step, self._cfg.test_freq):
            await self._validate()
        if last or self.stop_requested or _due(self.step, self._cfg.save_freq):
            await self._state.save(self.step)

    async def _train_step(self) -> Metrics:
        """One step: n kept groups in, one new version out, though the weights be the same where it was skipped."""
        with self._timers("step"):
            before = self._algorithm.state_dict()
            groups, batch, metrics, fault = await self._rollout()
            metrics["throughput/tokens"] = Metric(batch.num_tokens, reduce=Reduce.SUM)
            if fault is None:
                with self._phase("train"):
                    trained, fault = await self._updates.train(self.step, batch)
                metrics = merge([metrics, trained])
            if fault is None:
                self._ledger.trained(self.step, groups)
            else:
                self._algorithm.load_state_dict(before)
                await self._updates.stop_or_skip(self.step, fault, batch, metrics)
                self._ledger.trained(self.step, [])
                self._ledger.dropped(groups, "not_finite")
            metrics["train/skipped_steps"] = Metric(float(fault is not None), reduce=Reduce.SUM)
            with self._phase("publish"):
                metrics |= await self._source.publish(version=self.step)
        self._reporter.rollouts(self.step, groups)
        return metrics | self._source.metrics() | self._timers.pop()

    async def _rollout(self) -> tuple[list[Group], Batch, Metrics, Fault | None]:
        """The step's, once trainer and engine agree on them: sampled anew where the engine had to be repaired."""
        before = self._algorithm.state_dict()
        try:
            return await self._sample()
        except ParityError as error:
            with heartbeat.phase("start", "repair of the engine"):
                if not await self._gate.repair(error, self.step - 1):
                    raise
        self._source.rewind()
        self._algorithm.load_state_dict(before)
        return await self._sample()

    async def _sample(self) -> tuple[list[Group], Batch, Metrics, Fault | None]:
        """Groups, their batch with everything that is trained on, and what in it is not finite."""
        with self._phase("generate"):
            groups = await self._source.take(self._groups_per_step)
        batch = collate(groups, self._n)
        with self._phase("infer"):
            on_policy = self._workers.on_policy_rows(batch, self.step)
            for column, rows in self._algorithm.needs(len(batch), on_policy).items():
                batch.update(await self._workers.infer(column, batch, rows))
            columns, metrics = self._algorithm.advantages(batch)
            batch.update(columns)
            try:
                require_finite(batch)
                metrics |= await self._gate.check(batch, version=self.step - 1)
                return groups, batch, metrics, None
            except NonFinite as error:
                return groups, batch, metrics, error.fault

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with heartbeat.phase(name, step=self.step), self._timers(name):
            yield

    async def _validate(self) -> None:
        if self._evaluator is not None:
            with heartbeat.phase("validate", step=self.step):
                report, groups = await self._evaluator.run(self._source.evaluate)
            shown = self._evaluator.rows(groups[: self._cfg.log_val_generations], samples=1)
            self._reporter.validation(self.step, report, shown)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
