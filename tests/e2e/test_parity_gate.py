"""The parity gate on a real engine and a real trainer rank: silent when all is well; faults planted one at a time."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpost.batch import collate
from rlpost.platform import platform
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.parity import ParityError
from rlpost.trajectory import NOT_ASKED, Prompt
from rlpost.workers.config import ActorConfig, ModelConfig, OptimConfig, RolloutConfig
from rlpost.workers.group import WorkerGroup
from rlpost.workers.placement import Placement
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.base import BucketSync
from tests.e2e import engine_contract as contract
from tests.ray.test_rollout_pool import Trainers

N, LIMIT = 4, 1e-3

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.parametrize("engine", contract.SERVED)]


def push_up(micro, output):
    """A loss that moves every weight, the head's most of all."""
    return -(output.logprobs * micro["loss_weights"]).sum(), {}


class Source:
    """The part of a `RolloutSource` that the gate uses."""

    def __init__(self, pool, sync, spec):
        self.pool, self.sync, self.spec = pool, sync, spec

    async def publish(self, version):
        await self.sync.push(version)

    async def probe(self, num_sequences, max_tokens=None):
        ids = np.random.default_rng(0).integers(3, 30, (num_sequences // N, 6))
        prompts = [Prompt(id=f"p{i}", index=i, token_ids=row, text="", data_source="d") for i, row in enumerate(ids)]
        return await self.pool.run(prompts, N, self.spec)

    async def batch(self):
        batch = collate(await self.probe(16), N)
        return batch.update({"old_logprobs": torch.full((batch.num_tokens,), NOT_ASKED)})


class Rig:
    """One engine, one trainer rank, one gate over a checkpoint with or without tied embeddings."""

    def __init__(self, engine, folder, *, tied):
        self.workers = None
        self.folder, self.info = folder, contract.make_checkpoint(folder, tied=tied)
        self.placement = Placement(num_ranks=1, num_replicas=1, tensor_parallel=1, platform=platform())
        self.pool = RolloutPool(
            RolloutConfig(name=engine, dtype="float32", max_num_seqs=64),
            self.info,
            RewardConfig(terms={"length": RewardTermConfig(fn="length", kwargs={"max_length": 40})}),
            self.placement,
            seed=1,
            max_prompt_length=32,
            max_response_length=32,
        )

    def workers_for(self, info):
        actor = ActorConfig(ppo_mini_batch_size=4, dtype="float32", optim=OptimConfig(lr=0.02))
        return WorkerGroup.start(info, ModelConfig(path=info.path), actor, placement=self.placement).load()

    async def start(self):
        await self.pool.start()
        self.workers = await asyncio.to_thread(self.workers_for, self.info)
        self.sync = BucketSync(self.workers, self.pool)
        self.source = Source(self.pool, self.sync, contract.spec(max_tokens=12, stop=()))
        self.gate = self.gate_of(self.workers)
        await self.source.publish(0)

    def gate_of(self, workers):
        return ParityGate(workers, LIMIT, probe_size=16, n=N, temperature=1.0)

    async def train(self):
        await self.workers.train("actor", await self.source.batch(), push_up)

    async def close(self):
        await self.pool.shutdown()
        if self.workers is not None:
            self.workers.shutdown()


async def expect(gate, batch, cause, version=0):
    with pytest.raises(ParityError) as caught:
        await gate.check(batch, version)
    assert cause in str(caught.value), str(caught.value)
    assert "train_rollout_logprob_abs_diff/mean" in str(caught.value)


async def check_healthy(rig, version):
    metrics = await rig.gate.probe(rig.source, version)
    assert metrics["train_rollout_logprob_abs_diff/mean"].value <= 1e-4


async def check_stale_weights(rig):
    await rig.train()  # and no publish
    await expect(rig.gate, await rig.source.batch(), "stale weights: after pushing the weights again")
    await check_healthy(rig, 0)  # the explanation published them


async def check_sampling_on_one_side(rig):
    rig.source.spec = replace(rig.source.spec, temperature=0.7)
    await expect(rig.gate, await rig.source.batch(), "sampling settings: with temperature 0.7")
    rig.source.spec = replace(rig.source.spec, temperature=1.0, top_p=0.7)
    await expect(rig.gate, await rig.source.batch(), "sampling settings: the engine's logprobs are higher throughout")
    rig.source.spec = replace(rig.source.spec, top_p=1.0)
    await check_healthy(rig, 0)


async def check_padded_vocabulary_unmasked(rig):
    """Before anything was trained: both hold the checkpoint's weights."""
    unmasked = await asyncio.to_thread(rig.workers_for, replace(rig.info, vocab_size=rig.info.embedding_size))
    try:
        await expect(rig.gate_of(unmasked), await rig.source.batch(), "a vocabulary smaller than the trainer's")
    finally:
        unmasked.shutdown()


async def check_stale_head(rig):
    """Send everything that the trainer holds except the head, which stays as the engine had it."""
    await rig.source.publish(0)
    before = contract.Trainer(rig.info)
    await rig.workers.call_async("export_hf", rig.folder / "before")
    await rig.train()
    await rig.workers.call_async("export_hf", rig.folder / "after")
    before.model.load_state_dict(load_file(rig.folder / "after" / "model.safetensors"), strict=False)
    old = load_file(rig.folder / "before" / "model.safetensors")["lm_head.weight"]
    with torch.no_grad():
        before.model.lm_head.weight.copy_(old)
    trainers = Trainers(rig.info)
    trainers.trainer = before
    await BucketSync(trainers, rig.pool).push(0)
    await expect(rig.gate, await rig.source.batch(), "stale weights")


def test_gate_passes_healthy_weights_and_names_each_planted_fault(engine, tmp_path):
    async def main():
        rig = Rig(engine, tmp_path, tied=True)
        try:
            await rig.start()
            await check_healthy(rig, 0)
            await check_padded_vocabulary_unmasked(rig)
            await check_stale_weights(rig)
            await rig.train()  # tied embeddings: the head must follow
            await rig.source.publish(1)
            await check_healthy(rig, 1)
            await rig.source.publish(0)
            await check_sampling_on_one_side(rig)
        finally:
            await rig.close()

    asyncio.run(main())


def test_gate_catches_a_head_left_stale(engine, tmp_path):
    async def main():
        rig = Rig(engine, tmp_path, tied=False)
        try:
            await rig.start()
            await check_healthy(rig, 0)
            await check_stale_head(rig)
        finally:
            await rig.close()

    asyncio.run(main())
