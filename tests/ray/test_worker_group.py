"""`WorkerGroup` as the loop and as a researcher use it: two CPU ranks under Ray."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from rlpost.batch import Batch
from rlpost.files import file_digests
from rlpost.trajectory import NOT_ASKED, Provenance
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, RefConfig
from rlpost.workers.group import RankDied, WorkerGroup
from rlpost.workers.model import ModelInfo
from rlpost.workers.model_worker import OutOfDeviceMemory
from rlpost.workers.placement import Placement, Pools
from tests import tiny

VOCAB = 32
pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelInfo:
    return tiny.model_info(tiny.write_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB))


@pytest.fixture(scope="module")
def group(local_ray, model):
    optim = OptimConfig(lr=1e-2)
    common = {
        "ppo_mini_batch_size": 2,
        "ppo_max_token_len_per_gpu": 24,
        "ppo_epochs": 2,
        "shuffle": True,
        "optim": optim,
    }
    group = WorkerGroup.start(
        model,
        ModelConfig(path=model.path),
        ActorConfig(**common),
        ref=RefConfig(),
        critic=CriticConfig(**common),
        placement=Placement.create(Pools.colocated(1, 2), 1, 1),
        collective_timeout_s=60.0,
    )
    yield group.load()
    group.shutdown()


def _batch() -> Batch:
    lengths = torch.tensor([5, 12, 3, 9, 20, 7])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(lengths.sum())
    mask = torch.ones(total, dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    return Batch(
        cu_seqlens,
        {
            "token_ids": torch.randint(0, VOCAB, (total,), generator=torch.Generator().manual_seed(1)),
            "provenance": torch.where(mask, int(Provenance.MODEL), int(Provenance.TEMPLATE)),
            "response_mask": mask,
            "advantages": torch.ones(total),
            "group": torch.arange(6) // 2,
        },
    )


def test_group_infers_trains_saves_and_exports(group, model, tmp_path):
    batch = _batch()

    def raise_likelihood(micro, output):
        return -(output.logprobs * micro["advantages"] * micro["loss_weights"]).sum(), {}

    def fit_ones(micro, output):
        return ((output.values - 1.0).square() * micro["loss_weights"]).sum(), {}

    async def loop():
        batch.update(await group.role("actor").infer(batch))
        batch.update(await group.role("ref").infer(batch))
        batch.update(await group.infer("values", batch))
        await group.call_async("save", tmp_path / "state")
        metrics = await group.role("critic").train(batch, fit_ones)
        metrics |= await group.train("actor", batch, raise_likelihood, step=3)
        after = await group.infer("old_logprobs", batch)
        values = await group.infer("values", batch)
        await group.call_async("export_hf", tmp_path / "hf")
        await group.call_async("load", tmp_path / "state")
        restored = await group.infer("old_logprobs", batch)
        return metrics, after["old_logprobs"], values["values"], restored["old_logprobs"]

    metrics, after, values, restored = asyncio.run(loop())
    mask = batch["response_mask"]
    assert torch.equal(batch["old_logprobs"], batch["ref_logprobs"])
    assert batch["old_logprobs"][~mask].abs().max() == 0.0
    assert after[mask].mean() > batch["old_logprobs"][mask].mean() + 0.05
    assert (values[mask] - 1.0).abs().mean() < (batch["values"][mask] - 1.0).abs().mean()
    assert torch.equal(restored, batch["old_logprobs"])
    assert metrics["actor/skipped_updates"].value == 0 and metrics["actor/lr"].value == 1e-2
    assert metrics["critic/grad_norm"].weight == 4  # 2 epochs of 2 updates, counted on one rank
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    row = batch["token_ids"][5:17]
    log_p = exported(row[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(log_p[:-1].gather(1, row[1:, None])[:, 0], after[6:17], rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_asked_for_hold_no_logprobs_and_no_later_update_may_train_them(group, monkeypatch):
    batch = _batch()
    monkeypatch.setattr(group._setup.actor, "ppo_epochs", 1)  # of what the driver plans; ranks do what they are given

    async def infer(rows):
        return (await group.infer("old_logprobs", batch, rows))["old_logprobs"]

    own = group.on_policy_rows(batch, step=5)
    assert own in ([0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 4, 5])  # two groups of three
    first = torch.isin(batch.row_of_token, torch.tensor(own))
    every = asyncio.run(infer(None))
    for rows, asked in ((own, first), (sorted({*range(6)} - {*own}), ~first), ([], torch.zeros_like(first))):
        torch.testing.assert_close(asyncio.run(infer(rows)), torch.where(asked, every, NOT_ASKED))
    batch.update({"old_logprobs": torch.where(first, every, NOT_ASKED)})
    with pytest.raises(ValueError, match="old_logprobs of row .* a later update"):
        asyncio.run(group.train("actor", batch, lambda micro, output: (output.logprobs.sum(), {}), step=5))


def test_state_of_two_ranks_can_be_read_by_one_and_each_rank_vouches_for_its_files(group, tmp_path):
    digests = group.call("save", tmp_path / "state")
    assert all(digests) and not set(digests[0]) & set(digests[1])
    files = [str(file.relative_to(tmp_path / "state")) for file in tmp_path.rglob("*") if file.is_file()]
    assert file_digests(tmp_path / "state", files) == digests[0] | digests[1]
    group.call("export_hf", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    state = {f"model.model.{name}": torch.zeros_like(weight) for name, weight in weights.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "state/actor/shards")), no_dist=True)
    assert all(torch.equal(state[f"model.model.{name}"], weight) for name, weight in weights.items())


def test_profile_writes_a_trace_of_each_rank(group, tmp_path):
    group.call("start_profile")
    asyncio.run(group.infer("old_logprobs", _batch()))
    group.call("stop_profile", tmp_path / "profile")
    assert {p.name for p in (tmp_path / "profile").iterdir()} == {"rank0.json.gz", "rank1.json.gz"}


def test_sequence_over_the_budget_names_the_key(group):
    batch = Batch(torch.tensor([0, 25]), {"token_ids": torch.zeros(25, dtype=torch.int64)})
    with pytest.raises(ValueError, match="actor.ppo_max_token_len_per_gpu: a sequence of 25 tokens exceeds .* 24"):
        asyncio.run(group.infer("old_logprobs", batch))


def start(model, num_ranks=1):
    actor = ActorConfig(ppo_max_token_len_per_gpu=64, ppo_mini_batch_size=3)
    placement = Placement.create(Pools.colocated(1, num_ranks), 1, 1)
    return WorkerGroup.start(model, ModelConfig(path=model.path), actor, placement=placement, collective_timeout_s=60.0)


def test_error_of_one_rank_reaches_the_driver_as_it_is(model):
    """The other rank waits in a collective for a minute; the driver does not."""
    group = start(model, num_ranks=2).load()

    def fail_on_rank_1(micro, output):
        if torch.distributed.get_rank() == 1:
            raise KeyError("a bug of the user's")
        return output.logprobs.sum(), {}

    with pytest.raises(KeyError, match="a bug of the user's"):
        asyncio.run(group.train("actor", _batch(), fail_on_rank_1))
    group.shutdown()


def check_death_is_named(group, victim):
    """When the process of this rank dies in its loss."""

    def kill(micro, output):
        if torch.distributed.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return output.logprobs.sum(), {}

    with pytest.raises(RankDied, match=f"^trainer rank {victim} died in 'train': (.|\n)*trainer.resume=auto"):
        asyncio.run(group.train("actor", _batch(), kill))
    with pytest.raises(RankDied, match=f"^trainer rank {victim} died in 'place'"):
        group.call("place")


def test_rank_whose_process_is_killed_is_named(model):
    """Rank 0 fails as well, and sooner: its collective has lost a member."""
    group = start(model, num_ranks=2).load()
    check_death_is_named(group, victim=1)
    group.shutdown()


def test_out_of_memory_inside_a_loss_and_death_of_the_only_rank_reach_the_driver(model):
    """The first with what to lower."""

    def too_large(micro, output):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    group = start(model).load()
    with pytest.raises(OutOfDeviceMemory, match="rank 0 ran out .* 'train actor': tried to allocate 2 GiB") as caught:
        asyncio.run(group.train("actor", _batch(), too_large))
    assert "Lower actor.ppo_max_token_len_per_gpu" in str(caught.value)
    check_death_is_named(group, victim=0)
    group.shutdown()


def test_group_can_be_ended_while_it_loads(model):
    """As `build` does, which waits for the engines beside it and may have to give up."""
    group = start(model, num_ranks=2)
    ending = threading.Timer(0.5, group.shutdown)  # its imports take seconds
    ending.start()
    with pytest.raises(RankDied, match="rank 0 died in 'rendezvous'"):
        group.load()
    ending.join()


def test_missing_checkpoint_fails_in_load(model, tmp_path: Path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        WorkerGroup.start(
            ModelInfo(**{n: getattr(model, n) for n in ModelInfo.__slots__} | {"path": str(tmp_path)}),
            ModelConfig(path=str(tmp_path)),
            ActorConfig(),
            placement=Placement.create(Pools.colocated(1, 1), 1, 1),
        ).load()
