"""The driver's side of rollout: pool, workflow workers, engine workers and weight sync as Ray actors."""

import asyncio

import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoTokenizer, Qwen3ForSequenceClassification

from rlpost.host import host_id
from rlpost.platform import platform
from rlpost.rewards.config import RewardConfig, RewardModelConfig, RewardTermConfig
from rlpost.trajectory import Prompt, Provenance
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.placement import Placement
from rlpost.workers.reward_model import RewardModel
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.base import BucketSync
from rlpost.workers.weight_sync.sender import Sender
from rlpost.workers.weight_sync.topology import Place
from tests import tiny
from tests.e2e import engine_contract as contract

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def info(tmp_path_factory) -> ModelInfo:
    return contract.make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


LENGTH = RewardConfig(terms={"length": RewardTermConfig(fn="tests.ray.rewards_for_tests.length", weight=2.0)})


def make_pool(
    info: ModelInfo, *, replicas: int = 1, seed: int = 1, reward: RewardConfig = LENGTH, **changes
) -> RolloutPool:
    return RolloutPool(
        RolloutConfig(**({"name": "hf", "dtype": "float32", "num_workers": 2, "health_interval_s": 0.2} | changes)),
        info,
        reward,
        Placement(num_ranks=1, num_replicas=replicas, tensor_parallel=1, platform=platform()),
        seed=seed,
        max_prompt_length=32,
        max_response_length=32,
    )


def prompts(num: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [
        Prompt(id=f"p{i}", index=i, token_ids=rng.integers(3, 30, 4 + i % 3), text="", data_source="d")
        for i in range(num)
    ]


def run(pool: RolloutPool, body) -> None:
    async def main() -> None:
        await pool.start()
        try:
            await body()
        finally:
            await pool.shutdown()

    asyncio.run(main())


class Trainers:
    """Plays `WorkerGroup` with one rank in this process."""

    def __init__(self, info: ModelInfo):
        self.trainer = contract.Trainer(info)

    def place(self):
        return Place(host_id(), ("cpu",))

    def open_sender(self, transport, dtype, bucket_bytes, readers, timeout_s):
        num_readers = sum(readers.values())
        self.sender = Sender(transport, self.trainer, getattr(torch, dtype), bucket_bytes, num_readers, timeout_s)

    def weight_manifest(self):
        return self.sender.manifest()

    def next_bucket(self):
        return self.sender.next_bucket()

    def close_sender(self):
        return self.sender.close()

    async def call_async(self, method, *args):
        return [getattr(self, method)(*args)]


def test_pool_scores_groups_in_order_syncs_weights_and_pauses(info):
    pool = make_pool(info, replicas=2)

    async def body() -> None:
        asked = prompts(21)
        groups = await pool.run(asked, 3, contract.spec())
        assert [g.id for g in groups] == [p.id for p in asked]
        for group in groups:
            assert [t.sample_id for t in group.trajectories] == [0, 1, 2]
            for t in group.trajectories:
                assert t.token_ids[: len(group.prompt.token_ids)].tolist() == group.prompt.token_ids.tolist()
                last = np.flatnonzero(t.provenance == Provenance.MODEL)[-1]
                assert t.rewards[last] == t.reward == 2.0 * len(t.response_ids)
                assert t.reward_parts["length"] == len(t.response_ids)
        again = await pool.run(asked[5:6], 3, contract.spec())
        for old, new in zip(groups[5].trajectories, again[0].trajectories, strict=True):
            assert old.token_ids.tolist() == new.token_ids.tolist()

        first = await asyncio.wait_for(pool.submit(asked[0], 1, contract.spec()), 30)
        assert first.id == "p0"

        trainers = Trainers(info)
        trainers.trainer.shake(1)
        metrics = await BucketSync(trainers, pool).push(4)
        assert metrics["weight_sync/bytes"].value > 1e5
        for group in await pool.run(asked, 2, contract.spec()):
            for t in group.trajectories:
                sampled = t.response_ids.tolist()
                logprobs = trainers.trainer.logprobs(group.prompt.token_ids.tolist(), sampled, 1.0)
                mask = t.provenance == Provenance.MODEL
                assert np.abs(t.rollout_logprobs[mask] - logprobs).mean() < 1e-4
                assert set(t.versions[mask].tolist()) == {4}

        await pool.pause(keep=True)
        waiting = asyncio.ensure_future(pool.run(asked[:1], 1, contract.spec()))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await pool.resume()
        assert len(await waiting) == 1
        await pool.sleep()
        await pool.wake(("weights",))
        await pool.wake(("kv_cache",))
        assert len(await pool.run(asked[:1], 2, contract.spec())) == 1

    run(pool, body)


def test_pool_gives_no_seeds_where_they_are_off(info):
    pool = make_pool(info, seed_requests="off")

    async def body() -> None:
        first, again = [await pool.run(prompts(2), 4, contract.spec(max_tokens=16, stop=())) for _ in range(2)]
        answers = [tuple(t.response_ids.tolist()) for group in first + again for t in group.trajectories]
        assert len(set(answers)) == len(answers) == 16

    run(pool, body)


def test_pool_raises_the_engines_own_errors(info):
    async def main() -> None:
        pool = make_pool(info, engine_kwargs={"nothing": 1})
        with pytest.raises(ValueError, match="^rollout.engine_kwargs.nothing: the hf engine takes no arguments"):
            await pool.start()
        assert pool.engines == []
        pool = make_pool(info)
        await pool.start()
        try:
            with pytest.raises(ValueError, match="exceed rollout.max_model_len=64"):
                await pool.run(prompts(2), 1, contract.spec(max_tokens=64))
            ray.kill(pool.engines[0])
            with pytest.raises(ray.exceptions.ActorDiedError):
                await pool.run(prompts(2), 1, contract.spec())
        finally:
            await pool.shutdown()

    asyncio.run(main())


def test_pool_serves_a_reward_model(info, tmp_path):
    tiny.write_qwen3(tmp_path, Qwen3ForSequenceClassification, num_labels=1, pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(info.tokenizer_path)
    tokenizer.save_pretrained(tmp_path)
    judge = RewardModelConfig(path=str(tmp_path))
    reward = RewardConfig(terms={"rm": RewardTermConfig(fn="reward_model")}, reward_model=judge, timeout_s=100)
    pool = make_pool(info, reward=reward)  # its time includes that of a restart

    async def body() -> None:
        (group,) = await pool.run(prompts(1), 3, contract.spec())
        answers = tokenizer.batch_decode([t.response_ids for t in group.trajectories], skip_special_tokens=True)
        scores = RewardModel(str(tmp_path), judge).score(answers)
        assert [t.reward for t in group.trajectories] == pytest.approx(scores, rel=1e-4)
        assert len(set(scores)) > 1
        (process,) = (
            p for p in psutil.Process().children(recursive=True) if "ray::RewardModel" in " ".join(p.cmdline())
        )
        process.kill()
        (again,) = await pool.run(prompts(1), 3, contract.spec())
        assert [t.reward for t in again.trajectories] == [t.reward for t in group.trajectories]

    run(pool, body)
