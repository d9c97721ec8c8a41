"""When the parity gate looks, and what it does when trainer and engine disagree."""

import torch

from rlpost.batch import Batch, collate
from rlpost.metrics import Metrics
from rlpost.trainer.parity import NAME, Parity, ParityError, compare, likely_cause
from rlpost.trainer.source import RolloutSource
from rlpost.workers.group import WorkerGroup


class ParityGate:
    """Compares logprobs on every step's own tokens, and on a probe before the first step and after a resume.

    Args:
        workers: the trainer ranks.
        limit: largest mean absolute difference, nats.
        probe_size: sequences compared where the step does not recompute old logprobs.
        n: samples a prompt.
        temperature: the trainer's sampling temperature.
    """

    def __init__(self, workers: WorkerGroup, limit: float, probe_size: int, n: int, temperature: float):
        self._workers, self.limit, self._probe_size, self._n = workers, limit, probe_size, n
        self._temperature = temperature
        self._source: RolloutSource | None = None

    async def probe(self, source: RolloutSource, version: int) -> Metrics:
        """Sample a few sequences under `version` and compare; raises ParityError above the limit."""
        self._source = source
        batch = collate(await source.probe(self._probe_size), self._n)
        return await self.check(batch, version)

    async def check(self, batch: Batch, version: int) -> Metrics:
        """Compare the tokens that `version` sampled; where `old_logprobs` is absent, a spread of `probe_size` rows."""
        if "old_logprobs" not in batch:
            rows = torch.linspace(0, len(batch) - 1, min(self._probe_size, len(batch))).round().long()
            batch = batch.select(rows)
            batch.update(await self._workers.infer("old_logprobs", batch))
        parity = compare(batch, version)
        if not parity.mean <= self.limit:  # also where it is not a number
            raise ParityError(await self._explain(parity, batch, version))
        return parity.metrics()

    async def _explain(self, parity: Parity, batch: Batch, version: int) -> str:
        other = {}
        for temperature in {1.0, 0.5, 0.7, 0.8, 0.9, 1.2} - {self._temperature}:
            again = batch.select(range(len(batch)))
            again.update(await self._workers.infer("old_logprobs", batch, temperature=temperature))
            other[temperature] = compare(again, version).mean
        after_push = None
        if self._source is not None:
            await self._source.publish(version)
            fresh = collate(await self._source.probe(self._probe_size), self._n)
            fresh.update(await self._workers.infer("old_logprobs", fresh))
            after_push = compare(fresh, version).mean
        return (
            f"{NAME}/mean is {parity.mean:.2e} over {parity.num_tokens} tokens of version {version} "
            f"(p99 {parity.p99:.2e}, max {parity.max:.2e}), "
            f"above the limit {self.limit:.2e} (trainer.logprob_diff_limit). Likely cause: "
            + likely_cause(parity, after_push, other, self.limit)
        )
