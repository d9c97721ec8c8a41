"""Weights broadcast to several replicas, some of which die or hang on the way."""

import asyncio
import dataclasses
import signal

import numpy as np
import psutil
import pytest
import ray

from rlpost.trajectory import Provenance
from rlpost.workers.model import ModelInfo
from rlpost.workers.weight_sync.base import make_weight_sync
from tests.e2e import engine_contract as contract
from tests.ray.test_rollout_pool import Trainers, make_pool, prompts, run

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def info(tmp_path_factory) -> ModelInfo:
    return contract.make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


class Eventful(Trainers):
    """Trainers that send small buckets, and let something happen before one of them."""

    def __init__(self, info: ModelInfo):
        super().__init__(info)
        self.event, self.num_buckets = None, 0

    def open_sender(self, transport, dtype, bucket_bytes, *group):
        self.transport = transport
        super().open_sender(transport, dtype, 20_000, *group)

    def next_bucket(self):
        self.num_buckets += 1
        if self.num_buckets == 3 and self.event is not None:
            event, self.event = self.event, None
            event()
        return super().next_bucket()

    def close_sender(self):
        self.num_buckets = 0
        return super().close_sender()


async def check_weights(pool, trainers, version: int) -> None:
    """Every group was sampled by the trainers' weights."""
    for group in await pool.run(prompts(9), 2, contract.spec()):
        for t in group.trajectories:
            mask = t.provenance == Provenance.MODEL
            logprobs = trainers.trainer.logprobs(group.prompt.token_ids.tolist(), t.response_ids.tolist(), 1.0)
            assert np.abs(t.rollout_logprobs[mask] - logprobs).mean() < 1e-4
            assert set(t.versions[mask].tolist()) == {version}


async def push(sync, trainers, version: int) -> dict[str, float]:
    trainers.trainer.shake(version)
    return {name: metric.value for name, metric in (await sync.push(version)).items()}


def test_replicas_that_die_are_left_behind(info, caplog):
    pool, trainers = make_pool(info, replicas=3), Eventful(info)

    async def body() -> None:
        sync = make_weight_sync(trainers, pool, disjoint=True)
        metrics = await push(sync, trainers, 1)
        assert trainers.transport == "gloo"
        assert metrics["weight_sync/buckets"] > 3 and metrics["weight_sync/replicas_lost"] == 0
        await check_weights(pool, trainers, 1)

        asked = prompts(40)
        sampling = asyncio.ensure_future(pool.run(asked, 4, contract.spec(max_tokens=30, stop=())))
        await asyncio.sleep(0.3)
        ray.kill(pool.engines[2])
        groups = await sampling
        assert [group.id for group in groups] == [prompt.id for prompt in asked]
        assert all(len(t.response_ids) == 30 for group in groups for t in group.trajectories)

        await pool.pause(keep=True)  # finds out
        assert list(pool.live) == [0, 1] and "rollout replica 2 is lost, 2 go on" in caplog.text
        assert (await push(sync, trainers, 2))["weight_sync/replicas_lost"] == 1
        await pool.resume()
        await check_weights(pool, trainers, 2)

        trainers.event = lambda: ray.kill(pool.engines[0])
        assert (await push(sync, trainers, 3))["weight_sync/replicas_lost"] == 2
        assert list(pool.live) == [1] and "rollout replica 0 is lost, 1 go on" in caplog.text
        await check_weights(pool, trainers, 3)

        trainers.event = lambda: ray.kill(pool.engines[1])
        with pytest.raises(ray.exceptions.ActorDiedError):
            await push(sync, trainers, 4)

    run(pool, body)


def test_replica_that_hangs_is_left_behind_and_what_cannot_work_is_refused(info, caplog):
    pool, trainers = make_pool(info, replicas=2, weight_sync_timeout_s=8.0), Eventful(info)
    stopped: list[psutil.Process] = []

    def stop_one() -> None:
        engines = [p for p in psutil.Process().children(recursive=True) if "RolloutWorker" in " ".join(p.cmdline())]
        stopped.append(engines[0])
        engines[0].send_signal(signal.SIGSTOP)

    async def body() -> None:
        sync, cfg = make_weight_sync(trainers, pool, disjoint=True), pool.cfg
        pool.cfg = dataclasses.replace(cfg, weight_sync="nccl")
        with pytest.raises(ValueError, match="rollout.weight_sync=nccl cannot work here: .* this is a CPU"):
            await sync.push(1)
        pool.cfg = cfg
        await push(sync, trainers, 1)
        trainers.event = stop_one
        metrics = await push(sync, trainers, 2)
        assert not stopped[0].is_running()
        assert metrics["weight_sync/replicas_lost"] == 1
        assert "did not answer 'load_bucket' within 12 s" in caplog.text
        await check_weights(pool, trainers, 2)

    run(pool, body)
