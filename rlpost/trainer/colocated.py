"""Rollout and training take turns on the same devices."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import FilterGroupsConfig
from rlpost.data import PromptStream
from rlpost.metrics import Metric, Metrics, Reduce, merge
from rlpost.rewards.config import RewardConfig
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.source import RolloutSource, check_rewards, exhausted, rollout_metrics, warn_of_errors
from rlpost.trainer.waiting import either, end_tasks
from rlpost.trajectory import Group, Prompt
from rlpost.workers.config import RolloutConfig
from rlpost.workers.group import WorkerGroup
from rlpost.workers.rollout.base import EngineLost, SamplingSpec
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.base import WeightSync


class ColocatedSource(RolloutSource):
    """Generate, sleep, (train,) publish.

    With `sleep` the devices' memory belongs to the engine or to the trainer, and moves when the other one needs it:
    `take` and `probe` leave it with the trainer, `publish` and `evaluate` with the engine. It begins with the trainer:
    the engine is handed over asleep.

    Engines that were lost are started anew where a publish comes anyway; at once where none is left.
    """

    def __init__(
        self,
        *,
        stream: PromptStream,
        algorithm: Algorithm,
        pool: RolloutPool,
        trainers: WorkerGroup,
        sync: WeightSync,
        spec: SamplingSpec,
        n: int,
        filter_groups: FilterGroupsConfig,
        reward: RewardConfig,
        sleep: bool,
        ledger: Ledger | None = None,
    ):
        self._stream, self._algorithm, self._pool = stream, algorithm, pool
        self._trainers, self._sync = trainers, sync
        self._spec, self._n, self._filter = spec, n, filter_groups
        self._reward, self._sleep = reward, sleep
        self._ledger = ledger or Ledger(None)
        self._engine_awake = not sleep
        self._counts: Counter[str] = Counter()
        self._generated: Metrics = {}
        self._before: dict[str, Any] = {}  # the stream's cursor before the last `take`
        self._version = 0
        self._has_losses = False
        self._stranded = asyncio.Event()  # no engine is left
        pool.on_loss = self._note_loss

    async def take(self, n: int) -> list[Group]:
        """See `RolloutSource.take`. Kept groups beyond `n` are discarded: with staleness 0 they have no later use."""
        seen: list[Group] = []
        kept: list[Group] = []
        budget = n * self._filter.max_num_gen_batches if self._filter.enable else n
        self._before = self._stream.state_dict()
        while len(kept) < n and len(seen) < budget:
            acceptance = max(0.25, len(kept) / len(seen)) if seen else 1.0
            ask = min(math.ceil((n - len(kept)) / acceptance), budget - len(seen))
            prompts = self._stream.next(ask)
            self._ledger.issued(prompts)
            groups = await self._generate(prompts, self._n, self._spec)
            self._ledger.arrived(groups)
            seen += groups
            check_rewards(seen, self._reward)
            self._generated = merge([self._generated, rollout_metrics(groups)])
            for group in groups:
                verdict = self._algorithm.keep(group)
                self._counts["kept" if verdict.keep else f"dropped_{verdict.reason}"] += 1
                if verdict.keep:
                    kept.append(group)
                else:
                    self._ledger.dropped([group], verdict.reason)
        warn_of_errors(seen, self._reward.max_error_rate)
        self._counts["surplus"] += max(0, len(kept) - n)
        self._ledger.dropped(kept[n:], "surplus")
        await self._hand_memory_to_trainer()
        if len(kept) < n and (self._filter.on_exhausted == "error" or not kept):
            raise exhausted(len(kept), n, len(seen), self._counts)
        return kept[:n]

    def rewind(self) -> None:
        """See `RolloutSource.rewind`."""
        self._stream.load_state_dict(self._before)
        self.metrics()  # of what is thrown away

    async def publish(self, version: int) -> Metrics:
        """See `RolloutSource.publish`."""
        self._version = version
        while True:
            if self._has_losses:
                await self._rebuild()
            try:
                return await self._push(version)
            except EngineLost:
                if not self._stranded.is_set():
                    raise

    async def _push(self, version: int) -> Metrics:
        asleep = not self._engine_awake
        if asleep:  # the new weights arrive while the trainer's are still there; the KV cache must wait
            await self._trainers.call_async("offload", False, True)
            await self._pool.wake(("weights",))
        metrics = await self._sync.push(version)
        if asleep:
            await self._trainers.call_async("offload", True, True)
            await self._pool.wake(("kv_cache",))
            self._engine_awake = True
        return metrics

    async def evaluate(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """See `RolloutSource.evaluate`."""
        return await self._generate(prompts, n, spec)

    async def probe(self, num_sequences: int, max_tokens: int | None = None) -> list[Group]:
        """See `RolloutSource.probe`."""
        cursor = self._stream.state_dict()
        prompts = self._stream.next(math.ceil(num_sequences / self._n))
        self._stream.load_state_dict(cursor)
        groups = await self._generate(prompts, self._n, self._spec.for_probe(max_tokens))
        await self._hand_memory_to_trainer()  # which is to compute the same tokens' logprobs
        return groups

    async def restart_engines(self, cfg: RolloutConfig) -> None:
        """Start the engines anew with `cfg`; they have the checkpoint's weights until the next `publish`.

        Memory is where it was at the beginning: with the trainer, if the engines sleep.
        """
        if self._sleep:
            await self._trainers.call_async("offload", True, True)
        await self._pool.restart(cfg)
        if self._sleep:
            await self._pool.sleep()
            await self._trainers.call_async("reload")
        self._engine_awake = not self._sleep
        self._forget_losses()

    def metrics(self) -> Metrics:
        """See `RolloutSource.metrics`."""
        counts, self._counts = self._counts, Counter()
        generated, self._generated = self._generated, {}
        return generated | {f"groups/{name}": Metric(count, reduce=Reduce.SUM) for name, count in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """The data cursor; between steps nothing else is pending."""
        return {"stream": self._stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `RolloutSource.load_state_dict`."""
        self._stream.load_state_dict(state["stream"])

    async def _generate(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """Groups of `prompts`, by engines that are started anew as soon as none is left."""
        await self._hand_memory_to_engine()
        groups = asyncio.create_task(self._pool.run(prompts, n, spec))
        try:
            while not groups.done():
                await either(groups, self._stranded.wait())
                if not groups.done():
                    await self.publish(self._version)
            return groups.result()
        finally:
            await end_tasks([groups])

    def _note_loss(self) -> None:
        self._has_losses = True
        if not self._pool.live:
            self._stranded.set()

    def _forget_losses(self) -> None:
        self._has_losses = False
        self._stranded.clear()

    async def _rebuild(self) -> None:
        """Start lost engines anew while the trainer makes room, as at the beginning."""
        await self._hand_memory_to_trainer()
        self._forget_losses()
        if self._sleep:
            await self._trainers.call_async("offload", True, True)
        await self._pool.rebuild(asleep=self._sleep)
        self._pool.join()
        if self._sleep:
            await self._trainers.call_async("reload")

    async def _hand_memory_to_trainer(self) -> None:
        if self._sleep and self._engine_awake:
            await self._pool.sleep()
            await self._trainers.call_async("reload")
            self._engine_awake = False

    async def _hand_memory_to_engine(self) -> None:
        if not self._engine_awake:
            await self._trainers.call_async("offload", True, True)
            await self._pool.wake(("weights", "kv_cache"))
            self._engine_awake = True
