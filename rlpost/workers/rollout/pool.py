"""The driver's handle on rollout: engines, workflow workers, and groups out of prompts."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpost.batch import Group, Prompt, Trajectory
from rlpost.platform import platform
from rlpost.rewards.config import RewardConfig
from rlpost.rewards.model import RewardModel
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.placement import Placement
from rlpost.workers.rollout.base import SamplingSpec
from rlpost.workers.rollout.worker import RolloutWorker, WorkflowWorker, unwrap

MAX_CHUNK = 8  # prompts in one call to a workflow worker; their groups come back together
MAX_CONCURRENCY = 100_000  # calls an actor may hold open at once: every waiting request is one
SHUTDOWN_S = 30.0

_Waiting = tuple[Prompt, "asyncio.Future[Group]"]


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
        self._workers: list[ActorHandle] = []
        self._reward_model: ActorHandle | None = None
        self._load: list[int] = []
        self._pending: dict[tuple[int, SamplingSpec], list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks only weakly

    async def start(self) -> None:
        """Start every process; engines load in parallel.

        Raises:
            Exception: what the engine raised in its own process (ValueError, RuntimeError); everything is ended first.
        """
        cfg = self.cfg
        engine_class, workflow_class = ray.remote(RolloutWorker), ray.remote(WorkflowWorker)
        try:
            self.engines = [
                engine_class.options(
                    **self._placement.engine_options(replica, cfg.name), max_concurrency=MAX_CONCURRENCY
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
            await asyncio.gather(self._all("start"), *(_own(worker.start.remote()) for worker in self._workers))
        except BaseException:
            await self.shutdown()
            raise

    def submit(self, prompt: Prompt, n: int, spec: SamplingSpec) -> "asyncio.Future[Group]":
        """A future of the group of `prompt`; prompts submitted in one go travel together."""
        future: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault((n, spec), []).append((prompt, future))
        return future

    async def run(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """The groups of `prompts`, in their order.

        Raises:
            Exception: the first error of an engine, workflow or reward worker, as it was raised there.
        """
        return list(await asyncio.gather(*[self.submit(prompt, n, spec) for prompt in prompts]))

    async def pause(self, keep: bool) -> None:
        """Stop sampling on all engines; `keep` holds running requests for `resume`."""
        await self._all("pause", keep)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._all("resume")

    async def sleep(self, level: int = 1) -> None:
        """Free the engines' device memory."""
        await self._all("sleep", level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take it back, in parts."""
        await self._all("wake", tuple(tags))

    async def call(self, method: str, *args: Any) -> list[Any]:
        """A method of `RolloutEngine` on every replica; results in order of replicas."""
        return await self._all(method, *args)

    async def shutdown(self) -> None:
        """End every process of the pool."""
        waits = [engine.call.remote("shutdown") for engine in self.engines]
        waits += [worker.close.remote() for worker in self._workers]
        await asyncio.gather(
            *(asyncio.wait_for(asyncio.wrap_future(w.future()), SHUTDOWN_S) for w in waits), return_exceptions=True
        )
        for actor in [*self._workers, *self.engines, *([self._reward_model] if self._reward_model else [])]:
            ray.kill(actor)
        self.engines, self._workers, self._reward_model = [], [], None

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(_own(engine.call.remote(method, *args)) for engine in self.engines))

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for (n, spec), waiting in pending.items():
            size = min(MAX_CHUNK, -(-len(waiting) // len(self._workers)))
            for start in range(0, len(waiting), size):
                task = asyncio.ensure_future(self._send(waiting[start : start + size], n, spec))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send(self, chunk: list[_Waiting], n: int, spec: SamplingSpec) -> None:
        which = self._load.index(min(self._load))
        self._load[which] += len(chunk)
        try:
            results = await _own(self._workers[which].run.remote([prompt for prompt, _ in chunk], n, spec))
            for (prompt, future), trajectories in zip(chunk, results, strict=True):
                if not future.done():
                    future.set_result(_group(prompt, trajectories))
        except Exception as error:  # whatever it was, whoever waits must hear of it
            for _, future in chunk:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._load[which] -= len(chunk)


def _group(prompt: Prompt, trajectories: list[Trajectory]) -> Group:
    return Group(
        id=prompt.id, index=prompt.index, data_source=prompt.data_source, prompt=prompt, trajectories=trajectories
    )


async def _own(reference: Awaitable[Any]) -> Any:
    """Await a Ray reference; its error is the remote one."""
    try:
        return await reference
    except Exception as error:
        raise unwrap(error) from None
