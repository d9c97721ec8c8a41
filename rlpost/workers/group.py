"""`WorkerGroup`: the driver's handle of the trainer ranks."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
import torch

from rlpost.batch import Batch
from rlpost.metrics import Metrics, merge
from rlpost.trajectory import NOT_ASKED
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, RefConfig
from rlpost.workers.dispatch import CustomLoss, assemble, on_policy_rows, plan_infer, plan_train
from rlpost.workers.model import ModelInfo
from rlpost.workers.model_worker import ModelWorker, WorkerSetup
from rlpost.workers.placement import Placement
from rlpost.workers.remote import is_death, unwrap

ROLE_OF_COLUMN = {"old_logprobs": "actor", "ref_logprobs": "ref", "values": "critic"}
COLUMN_OF_ROLE = {role: column for column, role in ROLE_OF_COLUMN.items()}


GRACE_S = 5.0  # for a rank's death to be known, once others fail because of it


class RankDied(RuntimeError):
    """Processes of trainer ranks are gone; the message names them."""


class WorkerGroup:
    """Trainer ranks as one: whole batches in, whole columns and merged metrics out. See `start` and `load`.

    An error of any rank is raised here within `GRACE_S`, even while other ranks wait in a collective, and as `RankDied`
    where a rank's process is gone; the group is of no use afterwards except for `shutdown`.
    """

    def __init__(self, workers: list[Any], setup: WorkerSetup, collective_timeout_s: float):
        self._workers, self._setup, self._collective_timeout_s = workers, setup, collective_timeout_s

    @staticmethod
    def start(
        model: ModelInfo,
        model_cfg: ModelConfig,
        actor: ActorConfig,
        *,
        placement: Placement,
        ref: RefConfig | None = None,
        critic: CriticConfig | None = None,
        temperature: float = 1.0,
        total_updates: dict[str, int] | None = None,
        seed: int = 0,
        collective_timeout_s: float = 1800.0,
    ) -> "WorkerGroup":
        """Start one Ray actor for each rank of `placement`, which takes no memory of a device before `load`.

        Does not wait: their imports, of half a minute on a cold disk, run beside whatever follows.

        Args:
            model: facts about the actor's checkpoint.
            model_cfg, actor, ref, critic: config sections; a role without one does not exist.
            placement: which process sits where.
            temperature: of the rollout; logits are divided by it.
            total_updates: optimizer updates of the run by role, for learning rates that decay.
            seed: of shuffles and of weights that no checkpoint has.
            collective_timeout_s: after which a rank that waits for another gives up.
        """
        setup = WorkerSetup(
            model=model,
            model_cfg=model_cfg,
            actor=actor,
            ref=ref,
            critic=critic,
            temperature=temperature,
            total_updates=total_updates or {},
            seed=seed,
        )
        size = placement.num_ranks
        actor_class = ray.remote(ModelWorker)
        workers = [actor_class.options(**placement.trainer_options(rank)).remote(rank, size) for rank in range(size)]
        return WorkerGroup(workers, setup, collective_timeout_s)

    def load(self) -> "WorkerGroup":
        """Join the ranks into a process group and load the models; waits. If that fails, the processes are ended."""
        try:
            (address,) = _wait("rendezvous", [self._workers[0].rendezvous.remote()])
            self.call("connect", address, self._collective_timeout_s)
            self.call("build", self._setup)
        except BaseException:
            self.shutdown()
            raise
        return self

    @property
    def num_ranks(self) -> int:
        """Number of trainer processes."""
        return len(self._workers)

    def role(self, name: str) -> "RoleView":
        """The actor, the reference or the critic alone."""
        return RoleView(self, name)

    # --- passes ---

    def on_policy_rows(self, batch: Batch, step: int) -> list[int]:
        """Rows of `batch` whose old logprobs are those of the actor's first update in `train` of `step` itself.

        Args:
            batch: needs `group`.
            step: of the trainer.
        """
        return on_policy_rows(batch["group"], self._setup.actor, shuffle_seed(self._setup.seed, step))

    async def infer(
        self, column: str, batch: Batch, rows: Sequence[int] | None = None, *, temperature: float | None = None
    ) -> Batch:
        """Compute `old_logprobs`, `ref_logprobs` or `values`; a `Batch` that holds this column.

        Args:
            column: decides the role.
            batch: needs `token_ids`; with `provenance`, only MODEL tokens get a logprob, others 0.
            rows: those to compute, the others hold `NOT_ASKED`; None: all.
            temperature: in place of the rollout's.
        """
        rows = range(len(batch)) if rows is None else rows
        if not rows:
            return Batch(batch.cu_seqlens, {column: torch.full((batch.num_tokens,), NOT_ASKED)})
        role = ROLE_OF_COLUMN[column]
        max_tokens, key = self._setup.budget(role)
        size = self._sequence_size(role)
        works, owned = plan_infer(
            batch, ("token_ids", "provenance"), rows, dp_size=self.num_ranks // size, max_tokens=max_tokens, key=key
        )
        parts = await self._gather("infer", [(role, work, temperature) for work in works for _ in range(size)])
        return Batch(batch.cu_seqlens, {column: assemble(batch, owned, parts[::size])})

    async def train(self, role: str, batch: Batch, objective: Any, step: int = 0) -> Metrics:
        """All epochs and mini-batches of one trainer step; merged metrics of all ranks.

        Args:
            role: "actor" or "critic".
            batch: with the columns that the loss reads, `group` and `response_mask`. Of the actor's, `old_logprobs` may
                be `NOT_ASKED` at `on_policy_rows` of this step and nowhere else.
            objective: an `Algorithm`, a `CustomLoss`, or a picklable `MicroLoss`.
            step: of the trainer, seeds the shuffle.

        Raises:
            ValueError: `old_logprobs` of another row are `NOT_ASKED`.
        """
        objective = objective if hasattr(objective, "loss_weights") else CustomLoss(objective)
        if role == "actor" and "old_logprobs" in batch:
            missing = set(batch.rows_with(batch["old_logprobs"] == NOT_ASKED).tolist())
            if later := sorted(missing.difference(self.on_policy_rows(batch, step))):
                raise ValueError(f"old_logprobs of row {later[0]} are missing, but a later update trains it")
        max_tokens, key = self._setup.budget(role)
        size = self._sequence_size(role)
        works = plan_train(
            batch,
            self._setup.role_config(role),
            lambda mask, cu_seqlens: objective.loss_weights(role, mask, cu_seqlens),
            dp_size=self.num_ranks // size,
            max_tokens=max_tokens,
            key=key,
            seed=shuffle_seed(self._setup.seed, step),
        )
        shared = ray.put(objective)
        return merge(await self._gather("train", [(role, work, shared) for work in works for _ in range(size)]))

    # --- any method ---

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a `ModelWorker` method on all ranks and wait; results by rank."""
        return _wait(method, [getattr(worker, method).remote(*args) for worker in self._workers])

    async def call_async(self, method: str, *args: Any) -> list[Any]:
        """As `call`, awaitable."""
        return await self._gather(method, [args] * self.num_ranks)

    async def _gather(self, method: str, arguments: Sequence[tuple]) -> list[Any]:
        """One call for each rank with its own arguments."""
        references = [getattr(w, method).remote(*args) for w, args in zip(self._workers, arguments, strict=True)]
        calls = [asyncio.ensure_future(reference) for reference in references]
        try:
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.exception() for call in done):
                await asyncio.wait(calls, timeout=GRACE_S)
                _raise(method, {rank: call.exception() for rank, call in enumerate(calls) if call.done()})
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def shutdown(self) -> None:
        """End the processes, also those that hang in a collective."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _sequence_size(self, role: str) -> int:
        return self._setup.role_config(role).ulysses_sequence_parallel_size


class RoleView:
    """One role of a `WorkerGroup`."""

    def __init__(self, group: WorkerGroup, name: str):
        if name not in COLUMN_OF_ROLE:
            raise ValueError(f"role '{name}': expected actor, ref or critic")
        self._group, self.name = group, name

    async def infer(self, batch: Batch, temperature: float | None = None) -> Batch:
        """This role's column: `old_logprobs`, `ref_logprobs` or `values`."""
        return await self._group.infer(COLUMN_OF_ROLE[self.name], batch, temperature=temperature)

    async def train(self, batch: Batch, objective: Any, step: int = 0) -> Metrics:
        """See `WorkerGroup.train`."""
        return await self._group.train(self.name, batch, objective, step)


def _wait(method: str, references: list[Any]) -> list[Any]:
    """Results of one call for each rank."""
    waiting = references
    while waiting:
        done, waiting = ray.wait(waiting)
        if _error(done[0]) is not None:
            ended, _ = ray.wait(references, num_returns=len(references), timeout=GRACE_S)
            _raise(method, {references.index(reference): _error(reference) for reference in ended})
    return ray.get(references)


def _error(reference: Any) -> BaseException | None:
    """What a call that has ended has raised."""
    try:
        ray.get(reference)
    except Exception as error:  # whatever it was, it is raised later
        return error
    return None


def _raise(method: str, errors: Mapping[int, BaseException | None]) -> NoReturn:
    """Raise the death of ranks, which is why others fail in a collective, or else the first error as it was there."""
    failed = {rank: error for rank, error in errors.items() if error is not None}
    if dead := [rank for rank, error in failed.items() if is_death(error)]:
        raise RankDied(
            f"trainer rank {', '.join(map(str, dead))} died in '{method}': {str(failed[dead[0]]).strip()}\n"
            "Steps since the last checkpoint are lost: the same command goes on from there (trainer.resume=auto)"
        ) from failed[dead[0]]
    first = next(iter(failed.values()))
    own = unwrap(first)
    raise own from (None if own is first else first)


def shuffle_seed(run_seed: int, step: int) -> int:
    """One stream of shuffles for each (run, step)."""
    return abs(run_seed) * 1_000_003 + step
