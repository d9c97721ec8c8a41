"""The driver's handle on rollout: engines, workflow workers, and groups out of prompts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpost import heartbeat
from rlpost.batch import Group, Prompt, Trajectory
from rlpost.platform import exported, platform
from rlpost.rewards.config import RewardConfig
from rlpost.rewards.model import RewardModel
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.placement import Placement
from rlpost.workers.rollout.base import EngineLost, SamplingSpec
from rlpost.workers.rollout.setup import engine_setup
from rlpost.workers.rollout.worker import LOST, RolloutWorker, WorkflowWorker, unwrap

logger = logging.getLogger(__name__)

MAX_CHUNK = 8  # prompts in one call to a workflow worker; their groups come back together
MAX_CONCURRENCY = 100_000  # calls an actor may hold open at once: every waiting request is one
SHUTDOWN_S = 30.0

OnLoss = Callable[[], Awaitable[None]]


class RolloutPool:
    """All engine replicas and all workflow workers of a run.

    Args:
        cfg: the `rollout` section.
        model: the checkpoint.
        reward: the `reward` section.
        placement: where engine replicas sit.
        seed: of the run.
        max_prompt_length, max_response_length: of the `data` section, in tokens.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        model: ModelInfo,
        reward: RewardConfig,
        placement: Placement,
        *,
        seed: int,
        max_prompt_length: int,
        max_response_length: int,
    ):
        self.cfg, self.model = cfg, model
        self._reward, self._placement, self._seed = reward, placement, seed
        self._max_response_length = max_response_length
        self._max_model_len = cfg.max_model_len or max_prompt_length + max_response_length
        self.engines: list[ActorHandle] = []
        self._lost: set[int] = set()
        self._workers: list[ActorHandle] = []
        self._reward_model: ActorHandle | None = None
        self._load: list[int] = []

    async def start(self) -> None:
        """Start every process; engines load in parallel.

        Raises:
            ValueError: AITER switches or hazards of this platform that cannot be had, see `engine_setup`.
            Exception: what the engine raised in its own process (ValueError, RuntimeError); everything is ended first.
        """
        setup = engine_setup(self.cfg, self.model, self._placement.platform, exported())
        for warning in setup.warnings:
            logger.warning(warning)
        cfg = self.cfg = setup.cfg
        self._lost = set()
        engine_class, workflow_class = ray.remote(RolloutWorker), ray.remote(WorkflowWorker)
        try:
            self.engines = [
                engine_class.options(
                    **self._placement.engine_options(replica, setup.env), max_concurrency=MAX_CONCURRENCY
                ).remote(cfg, self.model, self._max_model_len)
                for replica in range(self._placement.num_replicas)
            ]
            if self._reward.reward_model.path is not None:
                self._reward_model = (
                    ray.remote(RewardModel)
                    .options(**self._placement.service_options())
                    .remote(self._reward.reward_model.path, self._reward.reward_model, platform().device_type)
                )
                await _own(self._reward_model.__ray_ready__.remote())
            self._workers = [
                workflow_class.options(num_cpus=0, max_concurrency=MAX_CONCURRENCY).remote(
                    cfg,
                    self.model,
                    self._reward,
                    self.engines,
                    self._seed,
                    self._max_response_length,
                    self._reward_model,
                )
                for _ in range(cfg.num_workers)
            ]
            self._load = [0] * len(self._workers)
            starting = [engine.call.remote("start") for engine in self.engines]
            starting += [worker.start.remote() for worker in self._workers]
            await asyncio.gather(*(_own(start) for start in starting))
        except BaseException:
            await self.shutdown()
            raise

    async def restart(self, cfg: RolloutConfig) -> None:
        """End every process and start anew with `cfg`; nothing may be running. See `start`."""
        assert not any(self._load), "restart while samples are drawn"
        await self.shutdown()
        self.cfg = cfg
        await self.start()

    async def submit(self, prompt: Prompt, n: int, spec: SamplingSpec) -> Group:
        """The group of one prompt, as soon as it is finished. Cancelling leaves its samples running, see `abort`.

        Raises:
            Exception: the error of the engine, workflow or reward worker, as it was raised there.
        """
        (group,) = await self._send([prompt], n, spec)
        return group

    async def run(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """The groups of `prompts`, in their order; they travel in chunks.

        Raises:
            Exception: the first error, as in `submit`.
        """
        size = max(1, min(MAX_CHUNK, -(-len(prompts) // len(self._workers))))
        chunks = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        groups = await asyncio.gather(*(self._send(chunk, n, spec) for chunk in chunks))
        return [group for chunk in groups for group in chunk]

    async def abort(self, prompt_id: str) -> None:
        """Cut off the samples of one prompt, wherever they are drawn; they come back as they are."""
        await self.call("abort", prompt_id)

    async def pause(self, keep: bool) -> None:
        """Stop sampling on all engines; `keep` holds running requests for `resume`."""
        await self.call("pause", keep)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.call("resume")

    async def sleep(self, level: int = 1) -> None:
        """Free the engines' device memory."""
        await self.call("sleep", level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take it back, in parts."""
        await self.call("wake", tuple(tags))

    @property
    def live(self) -> dict[int, ActorHandle]:
        """The replicas that get work, by number."""
        return {replica: engine for replica, engine in enumerate(self.engines) if replica not in self._lost}

    @property
    def num_lost(self) -> int:
        """Replicas that were excluded since the pool started."""
        return len(self._lost)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """A method of `RolloutEngine` on every live replica; results in order of replicas."""
        return list((await self.call_each(method, *args)).values())

    async def call_each(
        self, method: str, *args: Any, limit_s: float | None = None, on_loss: OnLoss | None = None
    ) -> dict[int, Any]:
        """As `call`; results by replica. One that is found dead is excluded, and missing from the results.

        Args:
            limit_s: a replica that does not answer by then counts as dead.
            on_loss: called as soon as one is excluded, while others may still be at work.

        Raises:
            Exception: the first error of another kind, or that of the last replica, as it was raised there.
        """

        async def ask(replica: int, engine: ActorHandle) -> tuple[int, Any] | None:
            try:
                return replica, await _within(limit_s, _own(engine.call.remote(method, *args)), replica, method)
            except LOST as error:
                if set(self.live) <= {replica}:
                    raise
                await self.exclude(replica, str(error))
                if on_loss is not None:
                    await on_loss()
                return None

        return dict(filter(None, await asyncio.gather(*(ask(*item) for item in self.live.items()))))

    async def exclude(self, replica: int, reason: str) -> None:
        """End a replica. It gets no more work, and what it was working on is begun anew by the others."""
        if replica in self._lost:
            return
        self._lost.add(replica)
        logger.warning("rollout replica %d is lost, %d go on: %s", replica, len(self.live), reason)
        await asyncio.gather(*(_own(worker.exclude.remote(replica)) for worker in self._workers))
        ray.kill(self.engines[replica])

    async def shutdown(self) -> None:
        """End every process of the pool."""
        waits = [engine.call.remote("shutdown") for engine in self.live.values()]
        waits += [worker.close.remote() for worker in self._workers]
        await asyncio.gather(
            *(asyncio.wait_for(asyncio.wrap_future(w.future()), SHUTDOWN_S) for w in waits), return_exceptions=True
        )
        for actor in [*self._workers, *self.engines, *([self._reward_model] if self._reward_model else [])]:
            ray.kill(actor)
        self.engines, self._workers, self._reward_model = [], [], None

    async def _send(self, chunk: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        which = self._load.index(min(self._load))
        self._load[which] += len(chunk)
        try:
            results = await _own(self._workers[which].run.remote(list(chunk), n, spec))
        finally:
            self._load[which] -= len(chunk)
            heartbeat.beat()
        return [_group(prompt, trajectories) for prompt, trajectories in zip(chunk, results, strict=True)]


def _group(prompt: Prompt, trajectories: list[Trajectory]) -> Group:
    return Group(
        id=prompt.id, index=prompt.index, data_source=prompt.data_source, prompt=prompt, trajectories=trajectories
    )


async def _within(limit_s: float | None, answer: Awaitable[Any], replica: int, method: str) -> Any:
    """Wait for an answer, but not beyond `limit_s`."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await answer
    except TimeoutError:
        if not limit.expired():
            raise
        raise EngineLost(f"rollout replica {replica} did not answer '{method}' within {limit_s:g} s") from None


async def _own(reference: Awaitable[Any]) -> Any:
    """Await a Ray reference; its error is the remote one."""
    try:
        return await reference
    except Exception as error:
        raise unwrap(error) from None
