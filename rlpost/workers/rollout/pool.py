"""The driver's handle on rollout: engines, workflow workers, and groups out of prompts."""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpost import heartbeat
from rlpost.host import exported, settle
from rlpost.platform import platform
from rlpost.rewards.config import RewardConfig
from rlpost.trajectory import Group, Prompt, Trajectory
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo, portable_tokenizer
from rlpost.workers.placement import Placement
from rlpost.workers.remote import own
from rlpost.workers.reward_worker import RewardModelWorker
from rlpost.workers.rollout.base import EngineLost, SamplingSpec, request_seed
from rlpost.workers.rollout.crew import Crew, Lost
from rlpost.workers.rollout.liveness import LOST, Actors, NoAnswer, within
from rlpost.workers.rollout.setup import engine_setup
from rlpost.workers.rollout.worker import RolloutWorker
from rlpost.workers.rollout.workflow_worker import WorkflowWorker

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

    Attributes:
        on_loss: called when a replica was lost, by whoever will `rebuild` it; None: lost replicas are only excluded.
        num_lost: replicas that were excluded since the pool started.
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
        self.on_loss: Callable[[], None] | None = None
        self._actors = Actors(cfg.max_restarts)
        self._reset()

    def _reset(self) -> None:
        self.engines: list[ActorHandle] = []
        self._crew: Crew | None = None
        self._reward_model: ActorHandle | None = None
        self._lost: dict[int, BaseException] = {}  # replicas that are gone, and their own errors
        self._leaving: dict[int, asyncio.Task[None]] = {}  # the end of their processes, which may be over
        self._rebuilt: dict[int, ActorHandle] = {}  # in place of lost ones; not let in yet
        self._newcomers: set[int] = set()  # let in, but without weights: they get no work
        self._rebuilding = 0
        self.num_lost = 0
        self._begun: Counter[int] = Counter()  # calls, by replica
        self._ended: Counter[int] = Counter()

    async def start(self) -> None:
        """Start every process; engines on different devices load in parallel.

        Raises:
            ValueError: AITER switches or hazards of this platform that cannot be had, see `engine_setup`.
            Exception: what the engine raised in its own process (ValueError, RuntimeError); everything is ended first.
        """
        setup = engine_setup(self.cfg, self.model, self._placement.platform, exported())
        for warning in setup.warnings:
            logger.warning(warning)
        cfg = self.cfg = setup.cfg
        self._engine_env = setup.env
        self._tokenizer = portable_tokenizer(self.model)
        try:
            self.engines = [self._make_engine(replica) for replica in range(self._placement.num_replicas)]
            if self._reward.reward_model.path is not None:
                self._reward_model = (
                    ray.remote(RewardModelWorker)
                    .options(
                        **self._placement.service_options(),
                        max_restarts=cfg.max_restarts,
                        max_task_retries=cfg.max_restarts,
                    )
                    .remote(self._reward.reward_model.path, self._reward.reward_model, platform().device_type)
                )
                await own(self._reward_model.__ray_ready__.remote())
            self._crew = Crew(cfg, self._actors, self._make_worker, self._hear, self.abort)
            await asyncio.gather(self._crew.start(), self._start_engines())
        except BaseException:
            await self.shutdown()
            raise
        settle()
        for replica, engine in enumerate(self.engines):
            self._actors.watch(self._watch_engine(replica, engine))

    async def restart(self, cfg: RolloutConfig) -> None:
        """End every process and start anew with `cfg`; nothing may be running. See `start`."""
        assert self._crew is None or not any(self._crew.load), "restart while samples are drawn"
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
        size = max(1, min(MAX_CHUNK, -(-len(prompts) // self.cfg.num_workers)))
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
        """The replicas that are there, by number."""
        return {replica: engine for replica, engine in enumerate(self.engines) if replica not in self._lost}

    @property
    def num_restarts(self) -> int:
        """Engine replicas and workflow workers that were started in place of lost ones."""
        return self.cfg.max_restarts - self._actors.restarts_left

    async def call(self, method: str, *args: Any) -> list[Any]:
        """A method of `RolloutEngine` on every live replica; results in order of replicas."""
        return list((await self.call_each(method, *args)).values())

    async def call_each(
        self,
        method: str,
        *args: Any,
        each: Mapping[int, Any] | None = None,
        limit_s: float | None = None,
        on_loss: OnLoss | None = None,
    ) -> dict[int, Any]:
        """As `call`; results by replica. One that is found dead is excluded, and missing from the results.

        Args:
            each: a last argument by replica.
            limit_s: a replica that does not answer by then counts as dead; None: `rollout.answer_timeout_s`.
            on_loss: called as soon as one is excluded, while others may still be at work.

        Raises:
            Exception: the first error of another kind, or that of the last replica, as it was raised there, unless
                others are about to take its place.
        """

        async def ask(replica: int, engine: ActorHandle) -> tuple[int, Any] | None:
            self._begun[replica] += 1
            try:
                last = () if each is None else (each[replica],)
                answer = own(engine.call.remote(method, *args, *last))
                limit = self.cfg.answer_timeout_s if limit_s is None else limit_s
                return replica, await within(limit, answer, f"rollout replica {replica}", f"'{method}'")
            except LOST as error:
                await self.exclude(replica, engine, error)
                if on_loss is not None:
                    await on_loss()
                return None
            finally:
                self._ended[replica] += 1

        answers = dict(filter(None, await asyncio.gather(*(ask(*item) for item in self.live.items()))))
        if self._crew is not None and self._crew.over is not None:
            raise self._crew.over
        return answers

    # --- replicas that are lost, and others in their place ---

    async def exclude(self, replica: int, engine: ActorHandle, error: BaseException) -> None:
        """End a replica. It gets no more work, and what it was working on is begun anew by the others.

        Args:
            engine: the one that is meant; another that has taken its place is left alone.
            error: what is wrong with it.
        """
        assert self._crew is not None
        if self.live.get(replica) == engine:
            self._lost[replica] = error
            self._newcomers.discard(replica)
            self.num_lost += 1
            logger.warning("rollout replica %d is lost, %d go on: %s", replica, len(self.live), error)
            if not self.live and not self._has_hope():
                self._crew.give_up(error)
            self._leaving[replica] = asyncio.create_task(self._leave(replica, engine))
            if self.on_loss is not None:
                self.on_loss()
        if replica in self._leaving:
            await asyncio.shield(self._leaving[replica])

    async def rebuild(self, asleep: bool = False) -> bool:
        """Start others in place of lost replicas, while `rollout.max_restarts` allows it; `join` lets them in.

        Returns whether there are any to let in.

        Whoever sets `on_loss` promises to do that, and to `WeightSync.push` afterwards.

        Args:
            asleep: they are to sleep, since their memory belongs to someone else.

        Raises:
            Exception: the last replica's own error, if none is there and no more may be started.
        """
        actors = self._actors
        while missing := [replica for replica in self._lost if replica not in self._rebuilt][: actors.restarts_left]:
            actors.restarts_left -= len(missing)
            self._rebuilding += len(missing)
            try:
                for apart in self._rounds(missing):
                    await asyncio.gather(*(self._rebuild(replica, asleep) for replica in apart))
            finally:
                self._rebuilding -= len(missing)
        if not self.live and not self._rebuilt:
            error = next(reversed(self._lost.values()))
            assert self._crew is not None
            self._crew.give_up(error)
            raise error
        return bool(self._rebuilt)

    def join(self) -> None:
        """Let rebuilt replicas in. They get every call from now on, and work once they have the trainer's weights."""
        for replica, engine in self._rebuilt.items():
            self.engines[replica] = engine
            del self._lost[replica]
            self._newcomers.add(replica)
            self._actors.watch(self._watch_engine(replica, engine))
        self._rebuilt = {}

    async def admit(self) -> None:
        """Give work to newcomers: all live replicas have the same weights now."""
        newcomers, self._newcomers = self._newcomers, set()
        for replica in newcomers:
            logger.warning("rollout replica %d is back", replica)
            assert self._crew is not None
            await self._crew.tell("admit", replica, self.engines[replica])

    def _has_hope(self) -> bool:
        """Whether a lost replica will be replaced."""
        may_be_started = self.on_loss is not None and self._actors.restarts_left > 0
        return may_be_started or bool(self._rebuilt) or self._rebuilding > 0

    async def _leave(self, replica: int, engine: ActorHandle) -> None:
        assert self._crew is not None
        await self._crew.tell("exclude", replica)
        await self._actors.end(engine)

    async def _rebuild(self, replica: int, asleep: bool) -> None:
        logger.warning("rollout replica %d is started anew (restarts left: %d)", replica, self._actors.restarts_left)
        await asyncio.shield(self._leaving[replica])
        engine = self._make_engine(replica)
        try:
            await self._start_engine(replica, engine)
            if asleep:
                sleep = own(engine.call.remote("sleep", 1))
                await within(self.cfg.answer_timeout_s, sleep, f"rollout replica {replica}", "'sleep'")
        except Exception as error:  # of an engine that does not start: a process edge
            logger.warning("rollout replica %d did not start: %s", replica, error)
            self._lost[replica] = error
            await self._actors.end(engine)
        except BaseException:
            await self._actors.end(engine)
            raise
        else:
            self._rebuilt[replica] = engine

    # --- processes ---

    def _make_engine(self, replica: int) -> ActorHandle:
        options = self._placement.engine_options(replica, self._engine_env)
        actor_class = ray.remote(RolloutWorker).options(**options, max_concurrency=MAX_CONCURRENCY)
        share = self.cfg.gpu_memory_utilization / self._placement.replicas_per_device
        cfg = dataclasses.replace(self.cfg, gpu_memory_utilization=share)
        return actor_class.remote(cfg, self.model, self._max_model_len, request_seed(self._seed, "replica", replica))

    def _rounds(self, replicas: Sequence[int]) -> list[list[int]]:
        """Replicas in groups that share no device, to be started one after another: an engine that looks for memory
        while a neighbour takes some would think that it is its own."""
        rounds: dict[int, list[int]] = {}
        for replica in replicas:
            rounds.setdefault(replica // self._placement.replicas_apart, []).append(replica)
        return list(rounds.values())

    async def _start_engines(self) -> None:
        for apart in self._rounds(range(len(self.engines))):
            await asyncio.gather(*(self._start_engine(replica, self.engines[replica]) for replica in apart))

    async def _start_engine(self, replica: int, engine: ActorHandle) -> None:
        limit_s = self.cfg.startup_timeout_s
        await self._actors.start(f"rollout replica {replica}", engine, lambda: engine.call.remote("start"), limit_s)

    def _seeds_requests(self) -> bool:
        """On GPUs vLLM's first model runner draws each seeded request by a kernel of its own, step after step."""
        return self.cfg.seed_requests == "on" or self.cfg.seed_requests == "auto" and platform().kind == "cpu"

    def _make_worker(self) -> ActorHandle:
        actor_class = ray.remote(WorkflowWorker).options(num_cpus=0, max_concurrency=MAX_CONCURRENCY)
        worker = actor_class.remote(
            self.cfg,
            self._tokenizer,
            self._reward,
            self.engines,
            self._seed if self._seeds_requests() else None,
            self._max_response_length,
            self._reward_model,
        )
        for replica in {*self._lost, *self._newcomers}:
            worker.exclude.remote(replica)
        return worker

    async def _watch_engine(self, replica: int, engine: ActorHandle) -> None:
        """Ask a replica from time to time whether it is there, until it is not."""
        while self.live.get(replica) == engine:
            await asyncio.sleep(self.cfg.health_interval_s)
            await self._ping(replica, engine)

    async def _ping(self, replica: int, engine: ActorHandle) -> None:
        """Exclude a replica that is not there.

        Not while a call waits for it, which has a limit of its own: a weight update may hold an engine for long.
        """
        begun = self._begun[replica]
        if begun > self._ended[replica]:
            return
        ping = own(engine.call.remote("ping"))
        try:
            await within(self.cfg.answer_timeout_s, ping, f"rollout replica {replica}", "a ping")
        except NoAnswer as error:
            if begun == self._begun[replica]:
                await self.exclude(replica, engine, error)
        except Exception as error:  # what it says is wrong, or Ray
            await self.exclude(replica, engine, error)

    async def _hear(self, lost: Lost) -> None:
        """What a workflow worker says about engines; their own errors tell more."""
        for replica, engine in self.live.items():
            for reason in (reason for other, reason in lost if other == engine):
                await self._ping(replica, engine)
                await self.exclude(replica, engine, EngineLost(reason))

    async def shutdown(self) -> None:
        """End every process of the pool."""
        self._actors.close()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        workers = [] if self._crew is None else self._crew.workers
        waits = [engine.call.remote("shutdown") for engine in self.live.values()]
        waits += [worker.close.remote() for worker in workers]
        await asyncio.gather(
            *(asyncio.wait_for(asyncio.wrap_future(w.future()), SHUTDOWN_S) for w in waits), return_exceptions=True
        )
        actors = [*workers, *self.live.values(), *self._rebuilt.values()]
        if self._reward_model is not None:
            actors.append(self._reward_model)
        await asyncio.gather(*(self._actors.end(actor) for actor in actors))
        self._reset()

    async def _send(self, chunk: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        assert self._crew is not None, "start the pool first"
        results = await self._crew.run(chunk, n, spec)
        heartbeat.beat()
        return [_group(prompt, trajectories) for prompt, trajectories in zip(chunk, results, strict=True)]


def _group(prompt: Prompt, trajectories: list[Trajectory]) -> Group:
    return Group(
        id=prompt.id, index=prompt.index, data_source=prompt.data_source, prompt=prompt, trajectories=trajectories
    )
