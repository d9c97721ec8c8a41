"""`WorkerGroup` as the loop and as a researcher use it: two CPU ranks under Ray."""

import asyncio
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlpost.batch import Batch, Provenance
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, RefConfig
from rlpost.workers.group import WorkerGroup
from rlpost.workers.model import ModelInfo
from rlpost.workers.placement import Placement

VOCAB = 32


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelInfo:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return ModelInfo(
        path=str(folder),
        tokenizer_path=str(folder),
        vocab_size=VOCAB,
        embedding_size=VOCAB,
        stop_token_ids=(1,),
        max_position_embeddings=64,
    )


@pytest.fixture(scope="module")
def group(cluster, model):
    optim = OptimConfig(lr=1e-2)
    common = {
        "ppo_mini_batch_size": 2,
        "ppo_max_token_len_per_gpu": 24,
        "ppo_epochs": 2,
        "shuffle": True,
        "optim": optim,
    }
    group = WorkerGroup.create(
        model,
        ModelConfig(path=model.path),
        ActorConfig(**common),
        ref=RefConfig(),
        critic=CriticConfig(**common),
        placement=Placement.create(1, 2, 1, 1),
        collective_timeout_s=60.0,
    )
    yield group
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


def test_profile_writes_a_trace_of_each_rank(group, tmp_path):
    group.call("start_profile")
    asyncio.run(group.infer("old_logprobs", _batch()))
    group.call("stop_profile", tmp_path / "profile")
    assert {p.name for p in (tmp_path / "profile").iterdir()} == {"rank0.json.gz", "rank1.json.gz"}


def test_sequence_over_the_budget_names_the_key(group):
    batch = Batch(torch.tensor([0, 25]), {"token_ids": torch.zeros(25, dtype=torch.int64)})
    with pytest.raises(ValueError, match="actor.ppo_max_token_len_per_gpu: a sequence of 25 tokens exceeds .* 24"):
        asyncio.run(group.infer("old_logprobs", batch))


def test_error_of_one_rank_reaches_the_driver_as_it_is(cluster, model):
    """The other rank waits in a collective for a minute; the driver does not."""
    actor = ActorConfig(ppo_max_token_len_per_gpu=64, ppo_mini_batch_size=3)
    group = WorkerGroup.create(
        model, ModelConfig(path=model.path), actor, placement=Placement.create(1, 2, 1, 1), collective_timeout_s=60.0
    )

    def fail_on_rank_1(micro, output):
        if torch.distributed.get_rank() == 1:
            raise KeyError("a bug of the user's")
        return output.logprobs.sum(), {}

    with pytest.raises(KeyError, match="a bug of the user's"):
        asyncio.run(group.train("actor", _batch(), fail_on_rank_1))
    group.shutdown()


def test_missing_checkpoint_fails_in_create(cluster, model, tmp_path: Path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        WorkerGroup.create(
            ModelInfo(**{n: getattr(model, n) for n in ModelInfo.__slots__} | {"path": str(tmp_path)}),
            ModelConfig(path=str(tmp_path)),
            ActorConfig(),
            placement=Placement.create(1, 1, 1, 1),
        )
