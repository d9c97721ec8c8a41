"""An asynchronous run in virtual time, around a real `AsyncSource`: every token takes a second, a step two."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig
from rlpost.metrics import Metric, Reduce
from rlpost.rewards.config import RewardConfig
from rlpost.tools.simulation.clock import run_virtual
from rlpost.trainer.buffer import GroupBuffer
from rlpost.trainer.fully_async import AsyncSource
from rlpost.trainer.limits import Limits
from rlpost.trainer.prompts import PromptQueue
from rlpost.trajectory import Group, Prompt, Status
from tests.unit.trainer.rollouts import SPEC, Stream, group

G = 4  # groups a step
TRAIN_S, ABORT_S, PAUSE_POLL_S = 2.0, 0.1, 0.5
SETTINGS = [
    {},
    {"staleness_threshold": 0.5},
    {"staleness_threshold": 2.0},
    {"staleness_threshold": 2.0, "max_staleness": 1},
    {"staleness_threshold": 0.5, "sync_every": 3},
    {"staleness_threshold": 1.0, "max_running": 3},
    {"staleness_threshold": 1.0, "partial_rollout": False},
]


@dataclass(eq=False)
class Request:
    prompt_id: str
    aborted: bool = False


class VirtualPool:
    """Engines that sample a token a second for every group at once. Like real ones they go on with what is cancelled.

    Args:
        length: prompt index -> tokens of its answers.
        accuracies: prompt index -> accuracy of each answer.
        error: prompt -> what its workflow raises.

    Attributes:
        submitted: indices, in the order of their start.
        events: pauses, pushes, resumes and aborts, in order.
    """

    def __init__(
        self,
        length: Callable[[int], int] = lambda index: 1,
        accuracies: Callable[[int], list[float]] = lambda index: [1.0, 0.0],
        error: Callable[[Prompt], Exception | None] = lambda prompt: None,
    ):
        self.length, self.accuracies, self.error = length, accuracies, error
        self.submitted: list[int] = []
        self.events: list[str] = []
        self.version = -1  # the checkpoint's weights
        self.sampling = self.most_at_once = 0
        self.open = asyncio.Event()
        self.open.set()
        self.tasks: set[asyncio.Task] = set()
        self._requests: set[Request] = set()
        self._waiting = 0

    async def submit(self, of: Prompt, n: int, spec: None) -> Group:
        self.submitted.append(of.index)
        self._waiting += 1
        self.most_at_once = max(self.most_at_once, self._waiting)
        task = asyncio.create_task(self._generate(of))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting -= 1

    async def run(self, prompts: list[Prompt], n: int, spec: None) -> list[Group]:
        return await asyncio.gather(*(self._generate(of) for of in prompts))

    async def abort(self, prompt_id: str) -> None:
        self.events.append(f"abort {prompt_id}")
        await asyncio.sleep(ABORT_S)
        for request in self._requests:
            request.aborted |= request.prompt_id == prompt_id

    async def pause(self, keep: bool) -> None:
        assert keep
        self.events.append("pause")
        self.open.clear()
        while self.sampling:
            await asyncio.sleep(PAUSE_POLL_S)

    async def resume(self) -> None:
        self.events.append("resume")
        self.open.set()

    async def restart(self, cfg: None) -> None:
        assert not self._waiting, "restart while samples are drawn"
        for task in self.tasks:
            task.cancel()
        self.events.append("restart")
        self.version = -1
        self.open.set()

    async def _generate(self, of: Prompt) -> Group:
        request, versions = Request(of.id), []
        self._requests.add(request)
        for _ in range(self.length(of.index)):
            await self.open.wait()
            if request.aborted:
                break
            versions.append(self.version)
            await self._sample()
        self._requests.discard(request)
        if (error := self.error(of)) is not None:
            raise error
        status = Status.ABORT if request.aborted else Status.STOP
        return group(of, self.accuracies(of.index), status, len(versions), versions)

    async def _sample(self) -> None:
        self.sampling += 1
        try:
            await asyncio.sleep(1.0)
        finally:
            self.sampling -= 1


class VirtualSync:
    """Pushes in `seconds`; refuses engines that sample meanwhile."""

    def __init__(self, pool: VirtualPool, seconds: float = 0.5):
        self.pool, self.seconds = pool, seconds
        self.error: Exception | None = None

    async def push(self, version: int) -> dict[str, Metric]:
        assert not self.pool.open.is_set() and not self.pool.sampling, "weights change under a running request"
        self.pool.events.append(f"push {version}")
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.pool.version = version
        return {"weight_sync/seconds_s": Metric(self.seconds, reduce=Reduce.SUM)}


def build(
    pool: VirtualPool,
    *,
    stream=None,
    sampler=None,
    window=1,
    hook=None,
    room=8,
    sync_s=0.5,
    ledger=None,
    **options: Any,
) -> AsyncSource:
    """A source over `pool`; `options` are fields of `Limits`, of the filter, and the constructor's switches."""
    filtering = FilterGroupsConfig(
        enable=options.pop("filter", False),
        max_num_gen_batches=options.pop("budget", 4),
        on_exhausted=options.pop("on_exhausted", "error"),
    )
    switches = {"partial_rollout": True, "stop_on_error": True, "reward": RewardConfig()}
    switches = {name: options.pop(name, default) for name, default in switches.items()}
    return AsyncSource(
        buffer=GroupBuffer(Limits(groups_per_step=G, **options)),
        prompts=PromptQueue(stream or Stream(), sampler, window),
        algorithm=Algorithm(AlgoConfig(filter_groups=filtering), max_response_length=64),
        pool=pool,
        sync=VirtualSync(pool, sync_s),
        spec=SPEC,
        n=2,
        filter_groups=filtering,
        room=room,
        hook=hook,
        clock=asyncio.get_running_loop().time,
        ledger=ledger,
        **switches,
    )


def run(
    main: Callable[[AsyncSource, VirtualPool], Awaitable[Any]], pool_options: dict | None = None, **options: Any
) -> Any:
    """What `main(source, pool)` returns; afterwards no task of the source's may be left."""

    async def whole():
        before = asyncio.all_tasks()
        pool = VirtualPool(**pool_options or {})
        source = build(pool, **options)
        try:
            return await main(source, pool)
        finally:
            await source.close()
            assert asyncio.all_tasks() - before - pool.tasks == set()

    return run_virtual(whole())


async def train(
    source: AsyncSource,
    steps: int,
    first: int = 1,
    check: Callable[[int, list[Group]], None] = lambda step, groups: None,
) -> list[list[int]]:
    """Indices of the groups of each step."""
    trained = []
    await source.publish(first - 1)
    for step in range(first, first + steps):
        groups = await source.take(G)
        check(step, groups)
        await asyncio.sleep(TRAIN_S)
        await source.publish(step)
        trained.append([g.index for g in groups])
    return trained


def flat(steps: Sequence[Sequence[int]]) -> list[int]:
    """Of all steps."""
    return [index for step in steps for index in step]


def random_lengths(seed: int, longest: int = 12) -> Callable[[int], int]:
    """Prompt index -> tokens: mostly few, sometimes many."""
    draw = random.Random(seed)
    lengths = [min(longest, int(draw.lognormvariate(1.0, 0.9)) + 1) for _ in range(500)]
    return lengths.__getitem__


def oldest(group: Group) -> int:
    """Version of its first token."""
    return min(int(t.versions[t.versions >= 0].min()) for t in group.trajectories)
