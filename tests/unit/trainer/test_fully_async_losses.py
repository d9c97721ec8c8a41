"""`AsyncSource` whose engines die at any moment, all at once: in virtual time, a rebuild takes five seconds."""

import asyncio
import random

import pytest

from rlpost.tools.simulation.clock import run_virtual
from rlpost.trajectory import Group, Prompt, Status
from rlpost.workers.rollout.base import EngineLost
from tests.unit.trainer.rollouts import group
from tests.unit.trainer.virtual_rollout import (
    SETTINGS,
    G,
    Request,
    VirtualPool,
    VirtualSync,
    build,
    flat,
    oldest,
    random_lengths,
    train,
)

REBUILD_S = 5.0


class FrailPool(VirtualPool):
    """Begins every group anew when its engine dies, and waits with it for one that has the trainer's weights.

    Attributes:
        restarts_left: rebuilds that succeed.
    """

    def __init__(self, restarts_left: int = 1000, **options):
        super().__init__(**options)
        self.restarts_left, self.deaths = restarts_left, 0
        self.live = {0: "engine"}
        self.admitted = asyncio.Event()
        self.admitted.set()
        self.on_loss = None

    def die(self) -> None:
        if self.live:
            self.live, self.deaths = {}, self.deaths + 1
            self.admitted.clear()
            self.on_loss()

    async def rebuild(self) -> bool:
        if not self.restarts_left:
            raise EngineLost("the engine's own error")
        self.restarts_left -= 1
        await asyncio.sleep(REBUILD_S)
        return True

    def join(self) -> None:
        self.live = {0: "engine"}

    async def _generate(self, of: Prompt) -> Group:
        request = Request(of.id)
        self._requests.add(request)
        while (versions := await self._attempt(request, self.length(of.index))) is None:
            pass
        self._requests.discard(request)
        status = Status.ABORT if request.aborted else Status.STOP
        return group(of, self.accuracies(of.index), status, len(versions), versions)

    async def _attempt(self, request: Request, length: int) -> list[int] | None:
        await self.admitted.wait()
        deaths, versions = self.deaths, []
        for _ in range(length):
            await self.open.wait()
            if request.aborted:
                break
            versions.append(self.version)
            await self._sample()
            if self.deaths > deaths:
                return None
        return versions


class FrailSync(VirtualSync):
    async def push(self, version: int) -> dict:
        deaths = self.pool.deaths
        if not self.pool.live:
            raise EngineLost("no rollout replica is left")
        metrics = await super().push(version)
        if self.pool.deaths > deaths:
            raise EngineLost("no rollout replica is left")
        self.pool.admitted.set()
        return metrics


def run(main, pool_options=None, **options):
    async def whole():
        before = asyncio.all_tasks()
        pool = FrailPool(**pool_options or {})
        source = build(pool, **options)
        source._sync = FrailSync(pool)
        try:
            return await main(source, pool)
        finally:
            await source.close()
            assert asyncio.all_tasks() - before - pool.tasks == set()

    return run_virtual(whole())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_groups_are_trained_once_in_order_and_within_the_bound_however_often_engines_die(options, seed):
    draw = random.Random(seed)

    async def kill(pool):
        while True:
            await asyncio.sleep(draw.uniform(0.1, 15.0))
            pool.die()

    async def main(source, pool):
        def check(step, groups):
            assert all(0 <= step - 1 - oldest(g) <= source.buffer.limits.bound for g in groups)
            assert all(len(t.response_ids) == pool.length(g.index) for g in groups for t in g.trajectories)

        killing = asyncio.create_task(kill(pool))
        try:
            trained = flat(await asyncio.wait_for(train(source, 12, check=check), 10_000))
            assert {oldest(g) for g in await source.probe(4)} == {12}
        finally:
            killing.cancel()
        assert trained == list(range(12 * G)) and pool.deaths >= 3
        assert pool.submitted == list(range(len(pool.submitted)))  # each once: what is lost is begun anew below
        assert pool.most_at_once <= source.buffer.limits.capacity

    run(main, {"length": random_lengths(seed)}, **options)


@pytest.mark.parametrize("wait", ["take", "publish"])
def test_the_error_of_an_engine_that_does_not_come_back_ends_whatever_waits(wait):
    async def main(source, pool):
        await train(source, 1)
        await source._synced()
        pool.die()
        with pytest.raises(EngineLost, match="the engine's own error"):
            if wait == "publish":
                await source.publish(2)
                await source._synced()
            await source.take(G)
            await source.take(G)

    run(main, {"length": lambda index: 9, "restarts_left": 0}, staleness_threshold=0.0)


def test_rebuilt_engines_wait_for_the_end_of_the_training_step():
    """Its weights are neither those of the last version nor those of the next."""

    async def main(source, pool):
        await source.publish(0)
        await source.take(G)
        pool.die()
        await asyncio.sleep(10 * REBUILD_S)  # training goes on
        assert pool.live == {} and pool.events.count("push 0") == 1
        await source.publish(1)
        await source.take(G)
        assert pool.live and pool.events.count("push 1") == 1

    run(main, {"length": lambda index: 3}, staleness_threshold=0.0)
