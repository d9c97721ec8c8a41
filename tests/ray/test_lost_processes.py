"""Processes of rollout that die or hang are started anew: real sources and pools, with trainers played here."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from ray.exceptions import ActorDiedError

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig
from rlpost.rewards.config import RewardConfig
from rlpost.trainer.buffer import GroupBuffer
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.fully_async import AsyncSource
from rlpost.trainer.limits import Limits
from rlpost.trainer.prompts import PromptQueue
from rlpost.trainer.source import RolloutSource
from rlpost.trajectory import Group, Provenance
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.base import make_weight_sync
from tests import tiny
from tests.e2e import engine_contract as contract
from tests.ray.test_rollout_pool import make_pool
from tests.ray.test_weight_sync import Eventful
from tests.unit.trainer.rollouts import Stream

pytestmark = pytest.mark.usefixtures("slow_engines")

G, N = 8, 2  # groups a step, answers a group
LONG = contract.spec(max_tokens=30, stop=())
FILTER = FilterGroupsConfig()


@pytest.fixture(scope="module")
def slow_engines() -> Iterator[None]:
    with tiny.local_ray(setup="tests.ray.standin_engines.setup"):
        yield


@pytest.fixture(scope="module")
def info(tmp_path_factory) -> ModelInfo:
    return contract.make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


class Trainers(Eventful):
    """Trainers that give up their memory, and refuse to send weights that are away."""

    here = True

    def offload(self, params, optimizer):
        self.here = self.here and not params

    def reload(self):
        self.here = True

    def next_bucket(self):
        assert self.here, "weights are sent while they are away"
        return super().next_bucket()


def common(pool: RolloutPool, trainers: Trainers, disjoint: bool) -> dict[str, Any]:
    return {
        "algorithm": Algorithm(AlgoConfig(), max_response_length=32),
        "pool": pool,
        "sync": make_weight_sync(trainers, pool, disjoint),
        "spec": LONG,
        "n": N,
        "filter_groups": FILTER,
        "reward": RewardConfig(stop_error_rate=0.0),
    }


def colocated(pool: RolloutPool, trainers: Trainers) -> ColocatedSource:
    return ColocatedSource(stream=Stream(), trainers=trainers, sleep=True, **common(pool, trainers, False))


def fully_async(pool: RolloutPool, trainers: Trainers, partial_rollout: bool = True) -> AsyncSource:
    return AsyncSource(
        buffer=GroupBuffer(Limits(groups_per_step=G, staleness_threshold=0.5)),
        prompts=PromptQueue(Stream(), None, 1),
        partial_rollout=partial_rollout,
        stop_on_error=True,
        room=16,
        **common(pool, trainers, True),
    )


Body = Callable[[RolloutSource, RolloutPool, Trainers], Coroutine[Any, Any, None]]


def run(info: ModelInfo, make: Callable[..., RolloutSource], body: Body, **changes: Any) -> None:
    async def main() -> None:
        pool, trainers = make_pool(info, **({"name": "slow", "num_workers": 1} | changes)), Trainers(info)
        await pool.start()
        source = make(pool, trainers)
        try:
            async with asyncio.timeout(200):
                await body(source, pool, trainers)
        finally:
            if isinstance(source, AsyncSource):
                await source.close()
            await pool.shutdown()

    asyncio.run(main())


def processes(kind: str) -> list[psutil.Process]:
    """Of all actors of a class, oldest first."""
    found = [p for p in psutil.Process().children(recursive=True) if f"ray::{kind}" in " ".join(p.cmdline())]
    return sorted(found, key=lambda p: p.create_time())


def kill(kind: str = "RolloutWorker", number: int = signal.SIGKILL) -> psutil.Process:
    """A signal to the oldest; it stands for `kill -9`, the system's own killing for memory, or a hang."""
    victim = processes(kind)[0]
    victim.send_signal(number)
    return victim


async def take(source: RolloutSource, *events: Callable[[], Any]) -> list[Group]:
    """A step's groups; `events` happen while they are generated."""
    taking = asyncio.ensure_future(source.take(G))
    for event in events:
        await asyncio.sleep(0.5)
        assert not taking.done(), "the groups came before anything happened"
        event()
    return await taking


async def publish(source: RolloutSource, trainers: Trainers, version: int) -> dict[str, float]:
    trainers.trainer.shake(version)
    return {name: metric.value for name, metric in (await source.publish(version)).items()}


def tokens(groups: list[Group]) -> list[tuple[str, list[list[int]]]]:
    return [(group.id, [t.response_ids.tolist() for t in group.trajectories]) for group in groups]


def check(groups: list[Group], trainers: Trainers, version: int, first: int) -> None:
    """All groups of a step, complete and once, of `version` and by the trainer's weights, as the parity gate wants."""
    assert [group.index for group in groups] == list(range(first, first + G))
    for group in groups:
        assert [len(t.response_ids) for t in group.trajectories] == [30] * N
        for t in group.trajectories:
            mask = t.provenance == Provenance.MODEL
            assert set(t.versions[mask].tolist()) == {version}
            logprobs = trainers.trainer.logprobs(group.prompt.token_ids.tolist(), t.response_ids.tolist(), 1.0)
            assert np.abs(t.rollout_logprobs[mask] - logprobs).mean() < 1e-4


def test_the_only_replica_is_rebuilt_while_generating_while_asleep_and_during_a_push(info, caplog):
    steps = []

    async def undisturbed(source, pool, trainers):
        for version in range(3):
            await publish(source, trainers, version)
            steps.append(tokens(await take(source)))

    async def disturbed(source, pool, trainers):
        await publish(source, trainers, 0)
        groups = await take(source, kill)
        check(groups, trainers, 0, first=0)
        assert tokens(groups) == steps[0], "the same tokens as if nothing had happened"
        kill()
        await publish(source, trainers, 1)
        groups = await take(source)
        check(groups, trainers, 1, first=G)
        assert tokens(groups) == steps[1]
        trainers.event = kill
        assert (await publish(source, trainers, 2))["rollout/restarts"] == 3
        groups = await take(source)
        check(groups, trainers, 2, first=2 * G)
        assert tokens(groups) == steps[2]
        assert len(processes("RolloutWorker")) == 1
        with pytest.raises(ActorDiedError):  # the fourth death of three that are forgiven
            await take(source, kill)

    run(info, colocated, undisturbed)
    run(info, colocated, disturbed)
    assert caplog.text.count("rollout replica 0 is back") == 3
    assert "rollout replica 0 is started anew (restarts left: 0)" in caplog.text


def test_replica_that_hangs_while_generating_or_asleep_is_ended_and_rebuilt(info, caplog):
    async def body(source, pool, trainers):
        await publish(source, trainers, 0)
        victims = []
        check(await take(source, lambda: victims.append(kill(number=signal.SIGSTOP))), trainers, 0, first=0)
        assert not victims[0].is_running() and len(processes("RolloutWorker")) == 1
        assert "rollout replica 0 did not answer a ping within 8 s" in caplog.text
        victims.append(kill(number=signal.SIGSTOP))
        await publish(source, trainers, 1)
        assert not victims[1].is_running()
        check(await take(source), trainers, 1, first=G)

    run(info, colocated, body, answer_timeout_s=8.0)


@pytest.mark.parametrize("partial_rollout", [True, False])
def test_async_replicas_are_rebuilt_beside_the_training(info, partial_rollout):
    async def body(source, pool, trainers):
        await publish(source, trainers, 0)
        check(await take(source, kill), trainers, 0, first=0)  # the other one goes on, and the rest is on the way
        await publish(source, trainers, 1)
        groups = await take(source, lambda: [process.kill() for process in processes("RolloutWorker")])
        assert [group.index for group in groups] == list(range(G, 2 * G))
        versions = {int(v) for group in groups for t in group.trajectories for v in t.versions[t.versions >= 0]}
        assert versions <= {0, 1}
        await publish(source, trainers, 2)
        groups = await take(source)
        assert [group.index for group in groups] == list(range(2 * G, 3 * G))
        await source.publish(2)  # the groups in flight are held, and go on under the same weights
        probe = await source.probe(2 * G)
        for group in probe:
            for t in group.trajectories:
                mask = t.provenance == Provenance.MODEL
                logprobs = trainers.trainer.logprobs(group.prompt.token_ids.tolist(), t.response_ids.tolist(), 1.0)
                assert np.abs(t.rollout_logprobs[mask] - logprobs).mean() < 1e-4
        assert list(pool.live) == [0, 1] and len(processes("RolloutWorker")) == 2

    run(info, lambda *args: fully_async(*args, partial_rollout), body, replicas=2, max_restarts=6)


def test_workflow_workers_that_die_or_hang_are_replaced_and_their_prompts_sent_again(info, caplog):
    async def body(source, pool, trainers):
        await publish(source, trainers, 0)
        hung = []
        groups = await take(
            source,
            lambda: kill("WorkflowWorker"),
            lambda: hung.append(kill("WorkflowWorker", signal.SIGSTOP)),
        )
        check(groups, trainers, 0, first=0)
        assert all(t.reward == 60 for group in groups for t in group.trajectories)
        assert not hung[0].is_running() and len(processes("WorkflowWorker")) == 2
        await publish(source, trainers, 1)  # what the dead ones had asked for does not run any more
        check(await take(source), trainers, 1, first=G)

    run(info, colocated, body, num_workers=2, answer_timeout_s=8.0)
    assert "workflow worker" in caplog.text and "another starts (restarts left: 1)" in caplog.text


def test_replicas_that_do_not_start_again_end_the_run_with_their_own_error(info, caplog):
    """Not with that of the first death, which the others followed."""

    async def body(source, pool, trainers):
        await publish(source, trainers, 0)
        pool.model = tiny_without_files(info)
        with pytest.raises(OSError, match="nowhere"):
            await take(source, kill)

    run(info, colocated, body, max_restarts=2)
    assert caplog.text.count("rollout replica 0 did not start") == 2


def tiny_without_files(info: ModelInfo) -> ModelInfo:
    return ModelInfo(**{name: getattr(info, name) for name in ModelInfo.__slots__} | {"path": "/nowhere"})


def test_without_restarts_the_others_go_on_and_the_last_one_ends_the_run(info):
    async def body(source, pool, trainers):
        await publish(source, trainers, 0)
        check(await take(source, kill), trainers, 0, first=0)
        await publish(source, trainers, 1)
        assert len(pool.live) == 1
        with pytest.raises(ActorDiedError):
            await take(source, kill)

    run(info, colocated, body, replicas=2, max_restarts=0)
