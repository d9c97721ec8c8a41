"""What every rollout engine must do, as functions of a started engine; `test_rollout_engines.py` runs them all."""

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rlpost.platform import platform
from rlpost.trajectory import NOT_ASKED, Status
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.base import Completion, RolloutEngine, SamplingSpec, WeightManifest
from rlpost.workers.weight_sync.sender import Sender
from tests import tiny

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}  # of the engines that run in processes of their own
SERVED = [
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"no {title}"))
    for name, title in TITLES.items()
]
EXACT = platform().kind == "cpu"  # float32; on GPUs engines compute in bfloat16, and alike only in batches alike
DTYPE = torch.float32 if EXACT else torch.bfloat16
CLOSE = 1e-4 if EXACT else 0.1  # mean difference of logprobs between an engine and the trainer, nats
FAR = 0.05 if EXACT else 0.5  # that of other weights
EOS = 1
NUM_TOKENS = 32  # in the tokenizer
EMBEDDING = 64  # rows of the embedding: half of them belong to no token
MAX_MODEL_LEN = 512
LONG, MANY = 500, 6  # sampled tokens and samples: seconds, so that a request still runs when it is cut off
CHARACTERS = "0123456789+-*/=()abcdefghijklmnopqrstuvwxyz"
PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12], [13] * 17, [3])


def make_checkpoint(folder: Path, *, tied: bool, seed: int = 0) -> ModelInfo:
    """A two-layer Qwen3 with sharp random weights and a tokenizer of single characters."""
    tiny.write_qwen3(
        folder,
        seed=seed,
        vocab_size=EMBEDDING,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
    )
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS[: NUM_TOKENS - 3]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return tiny.model_info(folder, NUM_TOKENS)


class Trainer:
    """A transformers model that plays the trainer: reference logprobs, and weights to send."""

    def __init__(self, info: ModelInfo):
        self.model = Qwen3ForCausalLM.from_pretrained(info.path, dtype=torch.float32).eval().requires_grad_(False)
        self._round()

    def shake(self, seed: int) -> None:
        """Other weights, clearly."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self._round()

    def _round(self) -> None:
        """To weights that the engine can hold."""
        for parameter in self.model.parameters():
            parameter.copy_(parameter.to(DTYPE))

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.to(dtype)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([list(token_ids)])).logits[0]
        logits[:, NUM_TOKENS:] = -torch.inf
        return logits

    def lags(self, prompt: Sequence[int], sampled: Sequence[int]) -> np.ndarray:
        """By how much each sampled token is less likely than the likeliest in its place, nats."""
        table = self.logits([*prompt, *sampled])[len(prompt) - 1 : -1].log_softmax(-1)
        return (table.max(-1).values - table.gather(1, torch.as_tensor(sampled)[:, None])[:, 0]).numpy()

    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> np.ndarray:
        ids = [*prompt, *sampled]
        table = (self.logits(ids)[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return table.gather(1, torch.as_tensor(sampled)[:, None])[:, 0].numpy()


def spec(temperature: float = 1.0, max_tokens: int = 8, stop: tuple[int, ...] = (EOS,)) -> SamplingSpec:
    return SamplingSpec(temperature=temperature, max_tokens=max_tokens, vocab_size=NUM_TOKENS, stop_token_ids=stop)


async def push(
    engine: RolloutEngine, trainer: Trainer, version: int, bucket_bytes: int = 20_000, transport: str = "shm"
) -> int:
    """One update in several buckets; returns how many."""
    sender = Sender(transport, trainer, DTYPE, bucket_bytes, num_readers=len(await engine.device_uuids()))
    await engine.begin_update(WeightManifest(version=version, tensors=sender.manifest()))
    num_buckets = 0
    while bucket := sender.next_bucket():
        await engine.load_bucket(bucket)
        num_buckets += 1
    assert await engine.finish_update(version) == sender.close()
    sender.abandon()
    return num_buckets


def mean_difference(
    trainer: Trainer, prompt: Sequence[int], completions: list[Completion], temperature: float
) -> float:
    differences = [
        np.abs(c.logprobs - trainer.logprobs(prompt, c.token_ids.tolist(), temperature)) for c in completions
    ]
    return float(np.concatenate(differences).mean())


async def check_greedy(engine: RolloutEngine, trainer: Trainer) -> None:
    for i, prompt in enumerate(PROMPTS):
        (completion,) = await engine.generate(prompt, spec(temperature=0.0), seed=0, request_id=f"greedy{i}")
        sampled = completion.token_ids.tolist()
        assert (trainer.lags(prompt, sampled) < CLOSE).all()
        assert EOS not in sampled[:-1] and (len(sampled) == 8 or sampled[-1] == EOS)


async def check_logprobs(engine: RolloutEngine, trainer: Trainer) -> None:
    for temperature in (1.0, 0.6, 1.7):
        completions = await engine.generate(PROMPTS[1], spec(temperature), seed=3, request_id=f"lp{temperature}", n=8)
        assert mean_difference(trainer, PROMPTS[1], completions, temperature) < CLOSE


async def check_without_logprobs(engine: RolloutEngine) -> None:
    """The same tokens, whether their logprobs are asked for or not."""
    (asked,) = await engine.generate(PROMPTS[1], spec(), seed=3, request_id="asked")
    silent = replace(spec(), logprobs_every=0)
    (unasked,) = await engine.generate(PROMPTS[1], silent, seed=3, request_id="unasked")
    assert unasked.token_ids.tolist() == asked.token_ids.tolist()
    assert len(unasked.logprobs) == len(unasked.token_ids) and not np.isnan(unasked.logprobs).any()
    assert (unasked.logprobs == NOT_ASKED).all() or np.allclose(unasked.logprobs, asked.logprobs)


async def check_seeds(engine: RolloutEngine) -> None:
    """Sample i draws with seed + i, alone or among others, busy or idle."""
    together = await engine.generate(PROMPTS[0], spec(), seed=40, request_id="s0", n=4)
    noise = [engine.generate(prompt, spec(), seed=i, request_id=f"noise{i}", n=4) for i, prompt in enumerate(PROMPTS)]
    alone = [engine.generate(PROMPTS[0], spec(), seed=40 + i, request_id=f"s1{i}") for i in range(4)]
    results = await asyncio.gather(*alone, *noise)
    same = [c.token_ids.tolist() == r[0].token_ids.tolist() for c, r in zip(together, results[:4], strict=True)]
    assert all(same) if EXACT else any(same)
    assert len({tuple(c.token_ids) for c in together}) > 1
    assert [c.token_ids.tolist() for r in results[4:] for c in r] != [c.token_ids.tolist() for c in together] * 4


async def check_unseeded(engine: RolloutEngine, trainer: Trainer) -> None:
    """Without a seed samples differ, in a group and between two calls, and their logprobs are right all the same."""
    requests = [engine.generate(PROMPTS[1], spec(max_tokens=16, stop=()), None, f"unseeded{i}", n=4) for i in range(2)]
    seeded = engine.generate(PROMPTS[1], spec(max_tokens=16, stop=()), 3, "seeded", n=4)  # in the same batch
    first, second, _ = await asyncio.gather(*requests, seeded)
    assert len({tuple(c.token_ids) for c in first + second}) == 8
    assert mean_difference(trainer, PROMPTS[1], first + second, 1.0) < CLOSE


async def check_stop_and_length(engine: RolloutEngine, trainer: Trainer) -> None:
    (whole,) = await engine.generate(PROMPTS[0], spec(0.0, 6, ()), seed=0, request_id="whole")
    greedy = whole.token_ids.tolist()
    assert len(greedy) == 6 and (trainer.lags(PROMPTS[0], greedy) < CLOSE).all()
    (stopped,) = await engine.generate(PROMPTS[0], spec(0.0, 6, (greedy[1],)), seed=0, request_id="stop")
    first = greedy.index(greedy[1])
    assert stopped.status is Status.STOP and stopped.token_ids.tolist() == greedy[: first + 1]
    (cut,) = await engine.generate(PROMPTS[0], spec(0.0, 3, ()), seed=0, request_id="cut")
    assert cut.status is Status.LENGTH and len(cut.token_ids) == len(cut.logprobs) == len(cut.versions) == 3


async def check_only_given_stops(engine: RolloutEngine, trainer: Trainer) -> None:
    """The model's EOS ends nothing unless it is asked to."""
    other = 2
    completions = await engine.generate(PROMPTS[0], spec(1.7, 60, (other,)), seed=7, request_id="stops", n=16)
    assert any(EOS in c.token_ids[:-1] for c in completions)
    for c in completions:
        assert other not in c.token_ids[:-1]
        assert c.status is (Status.STOP if c.token_ids[-1] == other else Status.LENGTH)
        assert c.status is Status.STOP or len(c.token_ids) == 60
    assert mean_difference(trainer, PROMPTS[0], completions, 1.7) < CLOSE


async def check_truncation(engine: RolloutEngine, trainer: Trainer) -> None:
    """Validation's top_k and top_p: only kept ids come, and their logprobs are renormalised over the kept.

    Of ids that noise could change places with the last one kept, either may come.
    """
    kept = 3
    logprobs = trainer.logits(PROMPTS[1])[-1].log_softmax(-1)
    likeliest = logprobs.sort(descending=True).values[:kept]
    mass = likeliest.exp().cumsum(0)
    midway = float(mass[kept - 2] + mass[kept - 1]) / 2  # the last one is needed to reach it, whatever the noise
    for truncation in ({"top_k": kept}, {"top_p": midway}):
        truncated = replace(spec(1.0, 1, ()), **truncation)
        completions = await engine.generate(PROMPTS[1], truncated, seed=1, request_id=f"kept{truncation}", n=16)
        assert len({int(c.token_ids[0]) for c in completions}) > 1
        for c in completions:
            own = float(logprobs[int(c.token_ids[0])])
            assert own > likeliest[-1] - CLOSE
            assert abs(c.logprobs[0] - (own - float(mass[-1].log()))) < 2 * CLOSE


async def check_padded_ids(engine: RolloutEngine) -> None:
    """At a high temperature every id is likely; none beyond the tokenizer's may come."""
    completions = await engine.generate(PROMPTS[2], spec(2.0, 40, ()), seed=0, request_id="pad", n=16)
    sampled = np.concatenate([c.token_ids for c in completions])
    assert sampled.max() < NUM_TOKENS
    assert len(set(sampled.tolist())) > NUM_TOKENS // 2


async def check_concurrency(engine: RolloutEngine, trainer: Trainer) -> None:
    requests = [engine.generate(PROMPTS[i % 4], spec(), seed=i, request_id=f"many{i}", n=2) for i in range(48)]
    for i, completions in enumerate(await asyncio.gather(*requests)):
        assert len(completions) == 2
        assert mean_difference(trainer, PROMPTS[i % 4], completions, 1.0) < CLOSE


async def check_abort(engine: RolloutEngine) -> None:
    long = spec(max_tokens=LONG, stop=())
    request = asyncio.ensure_future(engine.generate(PROMPTS[0], long, seed=0, request_id="abort", n=MANY))
    await asyncio.sleep(0.3)
    await engine.abort("abort")
    for completion in await request:
        assert completion.status is Status.ABORT
        assert len(completion.token_ids) == len(completion.logprobs) < LONG


async def check_ping(engine: RolloutEngine) -> None:
    """An engine at work, paused or asleep answers."""
    long = spec(max_tokens=LONG, stop=())
    request = asyncio.ensure_future(engine.generate(PROMPTS[0], long, seed=0, request_id="ping", n=MANY))
    await asyncio.sleep(0.1)
    await engine.ping()
    assert not request.done(), "it answered when it had nothing else to do"
    await engine.pause(keep=False)
    await request
    await engine.ping()
    await engine.resume()
    await engine.sleep()
    await engine.ping()
    await engine.wake()


async def check_too_long(engine: RolloutEngine) -> None:
    try:
        await engine.generate([3] * MAX_MODEL_LEN, spec(), seed=0, request_id="long")
    except ValueError as error:
        assert "rollout.max_model_len=512" in str(error)
    else:
        raise AssertionError("a request beyond the engine's length was accepted")


async def check_update(engine: RolloutEngine, trainer: Trainer, version: int) -> None:
    trainer.shake(version)
    (before,) = await engine.generate(PROMPTS[1], spec(), seed=1, request_id=f"old{version}")
    assert mean_difference(trainer, PROMPTS[1], [before], 1.0) > FAR, "the new weights are hardly different"
    assert await push(engine, trainer, version) > 2
    completions = await engine.generate(PROMPTS[1], spec(), seed=1, request_id=f"new{version}", n=8)
    assert mean_difference(trainer, PROMPTS[1], completions, 1.0) < CLOSE
    assert all((c.versions == version).all() for c in completions)


async def check_update_gloo(engine: RolloutEngine, trainer: Trainer, version: int) -> None:
    """Weights that are broadcast; after an update that was given up, as when another replica dies on the way."""
    trainer.shake(1000 + version)
    abandoned = Sender("gloo", trainer, DTYPE, 20_000, num_readers=len(await engine.device_uuids()))
    await engine.begin_update(WeightManifest(version=version, tensors=abandoned.manifest()))
    for _ in range(2):
        await engine.load_bucket(abandoned.next_bucket())
    abandoned.abandon()
    assert await push(engine, trainer, version, transport="gloo") > 2
    completions = await engine.generate(PROMPTS[1], spec(), seed=1, request_id=f"gloo{version}", n=8)
    assert mean_difference(trainer, PROMPTS[1], completions, 1.0) < CLOSE
    assert all((c.versions == version).all() for c in completions)


async def check_refused_update(engine: RolloutEngine, trainer: Trainer) -> None:
    """A manifest that does not fit is refused before anything is touched."""
    good = Sender("shm", trainer, DTYPE, 1 << 20).manifest()
    name = "model.layers.0.mlp.up_proj.weight"
    bad = {
        "missing: model.layers.0.mlp.up_proj.weight": {k: v for k, v in good.items() if k != name},
        "unknown: model.layers.0.mlp.upproj.weight": good | {"model.layers.0.mlp.upproj.weight": good[name]},
        "model.layers.0.mlp.up_proj.weight is [3, 4], expected [96, 64]": good
        | {name: ((3, 4), str(DTYPE).removeprefix("torch."))},
    }
    for message, tensors in bad.items():
        try:
            await engine.begin_update(WeightManifest(version=99, tensors=tensors))
        except ValueError as error:
            assert message in str(error)
        else:
            raise AssertionError(f"accepted: {message}")
    await check_greedy(engine, trainer)


async def check_pause_keep(engine: RolloutEngine, trainer: Trainer, version: int) -> None:
    """Tokens before and after an update in the middle of a request belong to the weights of their version."""
    long = spec(max_tokens=LONG, stop=())
    old = Trainer.__new__(Trainer)
    old.model = Qwen3ForCausalLM(trainer.model.config).eval().requires_grad_(False)
    old.model.load_state_dict(trainer.model.state_dict())
    request = asyncio.ensure_future(engine.generate(PROMPTS[0], long, seed=5, request_id=f"keep{version}", n=MANY))
    await asyncio.sleep(0.3)
    await engine.pause(keep=True)
    trainer.shake(100 + version)
    await push(engine, trainer, version)
    assert not request.done()
    await engine.resume()
    for c in await request:
        assert c.status is Status.LENGTH and len(c.token_ids) == LONG
        assert set(c.versions.tolist()) == {version - 1, version}
        ids = c.token_ids.tolist()
        before, after = old.logprobs(PROMPTS[0], ids, 1.0), trainer.logprobs(PROMPTS[0], ids, 1.0)
        assert np.abs(c.logprobs - np.where(c.versions == version, after, before)).mean() < CLOSE


async def check_pause_abort(engine: RolloutEngine) -> None:
    long = spec(max_tokens=LONG, stop=())
    request = asyncio.ensure_future(engine.generate(PROMPTS[0], long, seed=5, request_id="pa", n=MANY))
    await asyncio.sleep(0.3)
    await engine.pause(keep=False)
    waiting = asyncio.ensure_future(engine.generate(PROMPTS[0], spec(max_tokens=2), seed=5, request_id="pw"))
    assert {completion.status for completion in await request} == {Status.ABORT}
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await engine.resume()
    assert (await waiting)[0].status is not Status.ABORT


async def check_sleep(engine: RolloutEngine, trainer: Trainer) -> None:
    """Waking gives the weights back; on CPU both do nothing."""
    await engine.sleep()
    await engine.wake(("weights",))
    await engine.wake(("kv_cache",))
    await check_greedy(engine, trainer)
