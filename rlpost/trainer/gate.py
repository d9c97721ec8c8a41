"""When the parity gate looks, and what it does when trainer and engine disagree."""

from collections.abc import Awaitable, Callable

import torch

from rlpost.batch import Batch, collate
from rlpost.metrics import Metrics
from rlpost.trainer.nonfinite import require_finite
from rlpost.trainer.parity import NAME, Parity, ParityError, comparable, compare, compared, likely_cause, may_be_kernels
from rlpost.trainer.repair import RepairError
from rlpost.trainer.source import RolloutSource
from rlpost.workers.group import WorkerGroup

PASSING_TOKENS = 128  # of an answer in a probe between two steps: the trainer waits for it

Repair = Callable[[Callable[[], Awaitable[bool]]], Awaitable[bool]]  # see `rlpost.trainer.repair.AiterRepair`


class ParityGate:
    """Compares logprobs on every step's own tokens, and on a probe before the first step and after a resume.

    Args:
        workers: the trainer ranks.
        limit: largest mean absolute difference, nats.
        probe_size: sequences compared where the step infers no old logprobs that could be.
        n: samples a prompt.
        temperature: the trainer's sampling temperature.
        mend: what is tried when the engine's kernels may be the cause; None: nothing.
        probe_freq: steps without a token that `version` sampled before `probe_size` fresh sequences are compared.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        limit: float,
        probe_size: int,
        n: int,
        temperature: float,
        mend: Repair | None = None,
        probe_freq: int = 10,
    ):
        self._workers, self.limit, self._probe_size, self._n = workers, limit, probe_size, n
        self._temperature, self._mend = temperature, mend
        self._source: RolloutSource | None = None
        self._probe_freq, self._steps_blind = probe_freq, 0

    async def probe(self, source: RolloutSource, version: int) -> Metrics:
        """Sample a few sequences under `version` and compare; raises ParityError above the limit, unless repaired."""
        try:
            return await self.check(await self.sample(source), version)
        except ParityError as error:
            if not await self.repair(error, version):
                raise
            return await self.check(await self.sample(source), version)

    async def sample(self, source: RolloutSource, max_tokens: int | None = None) -> Batch:
        """A few fresh sequences of `source`, with the engine's logprobs and the trainer's; cut at `max_tokens`."""
        self._source = source
        batch = collate(await source.probe(self._probe_size, max_tokens), self._n)
        batch.update(await self._workers.infer("old_logprobs", batch))
        return batch

    async def check(self, batch: Batch, version: int) -> Metrics:
        """Compare the tokens that `version` sampled; where none has `old_logprobs`, a spread of `probe_size` rows.

        Raises:
            ParityError: they differ by more than the limit.
            NonFinite: the trainer's logprob of one of those rows is none.
        """
        parity = compare(batch, version)
        rows = batch.rows_with(comparable(batch, version))
        if len(rows) and not parity.num_tokens:
            batch = batch.select(spread(rows, self._probe_size))
            batch.update(await self._workers.infer("old_logprobs", batch))
            require_finite(batch)
            parity = compare(batch, version)
        self._steps_blind = 0 if parity.num_tokens else self._steps_blind + 1
        if self._steps_blind >= self._probe_freq and self._source is not None:  # async: none was sampled by `version`
            batch = await self.sample(self._source, PASSING_TOKENS)
            parity = compare(batch, version)
            self._steps_blind = 0
        if not parity.mean <= self.limit:  # also where it is not a number
            raise await self._explain(parity, batch, version)
        return parity.metrics()

    async def repair(self, error: ParityError, version: int) -> bool:
        """Try to make engine and trainer agree after `error`; whether they do, on fresh tokens.

        Raises:
            ParityError: `error`, and why the run cannot go on though the cause was found.
        """
        source = self._source
        if self._mend is None or source is None or not error.may_be_kernels:
            return False

        async def agree() -> bool:
            return (await self._after_push(source, version)).mean <= self.limit

        try:
            return await self._mend(agree)
        except RepairError as why:
            raise ParityError(f"{error}. {why}") from error

    async def _after_push(self, source: RolloutSource, version: int) -> Parity:
        """On fresh tokens, once the weights were pushed again."""
        await source.publish(version)
        return compare(await self.sample(source), version)

    async def _explain(self, parity: Parity, batch: Batch, version: int) -> ParityError:
        other = {}
        batch = batch.select(batch.rows_with(compared(batch, version)))
        for temperature in {1.0, 0.5, 0.7, 0.8, 0.9, 1.2} - {self._temperature}:
            batch.update(await self._workers.infer("old_logprobs", batch, temperature=temperature))
            other[temperature] = compare(batch, version).mean
        after_push = None if self._source is None else (await self._after_push(self._source, version)).mean
        return ParityError(
            f"{NAME}/mean is {parity.mean:.2e} over {parity.num_tokens} tokens of version {version} "
            f"(p99 {parity.p99:.2e}, max {parity.max:.2e}), "
            f"above the limit {self.limit:.2e} (trainer.logprob_diff_limit). Likely cause: "
            + likely_cause(parity, after_push, other, self.limit),
            may_be_kernels=may_be_kernels(after_push, other, self.limit),
        )


def spread(rows: torch.Tensor, n: int) -> torch.Tensor:
    """`n` of `rows`, or all, evenly spread."""
    return rows[torch.linspace(0, len(rows) - 1, min(n, len(rows))).round().long()]
