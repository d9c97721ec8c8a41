"""A small engine on transformers, for tests and for looking inside: the same contract as the fast ones, no speed.

Each request is a coroutine that samples its n answers together, token by token, with a KV cache of its own, and gives
way to the others after every token. Answers do not depend on what else is running.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rlpost.platform import platform
from rlpost.trajectory import NOT_ASKED, Status
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.base import ENGINES, Completion, RolloutEngine, SamplingSpec, WeightManifest
from rlpost.workers.rollout.manifest import UpdateLedger, check_manifest
from rlpost.workers.rollout.sampling import truncate
from rlpost.workers.weight_sync.reader import BucketReader


@ENGINES.register("hf")
class HFEngine(RolloutEngine):
    """One model in this process."""

    def __init__(self, cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0):
        self._cfg, self._info, self._max_model_len = cfg, model, max_model_len
        self._random = random.Random(seed)  # of requests without a seed
        self._model: Any = None
        self._reader = BucketReader(platform().device())
        self._version = 0
        self._open = asyncio.Event()  # clear while paused or being updated
        self._open.set()
        self._paused = False
        self._ledger: UpdateLedger | None = None
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._waiting = 0  # running requests held by a pause

    async def start(self) -> None:
        """See `RolloutEngine.start`.

        Raises:
            ValueError: a setting that this engine does not have.
        """
        cfg, info = self._cfg, self._info
        if cfg.engine_kwargs:
            raise ValueError(f"rollout.engine_kwargs.{next(iter(cfg.engine_kwargs))}: the hf engine takes no arguments")
        if cfg.tensor_model_parallel_size != 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={cfg.tensor_model_parallel_size}: the hf engine runs on one "
                "device; set it to 1 or use rollout=vllm"
            )
        config = AutoConfig.from_pretrained(info.path, trust_remote_code=info.trust_remote_code, **info.override_config)
        model = AutoModelForCausalLM.from_pretrained(
            info.path,
            config=config,
            dtype=platform().dtype(cfg.dtype),
            trust_remote_code=info.trust_remote_code,
        )
        self._model = model.eval().requires_grad_(False).to(platform().device())

    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int = 1
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        if len(token_ids) + spec.max_tokens > self._max_model_len:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and an answer of up to {spec.max_tokens} exceed "
                f"rollout.max_model_len={self._max_model_len}"
            )
        await self._open.wait()
        self._running.add(request_id)
        try:
            first = self._random.getrandbits(40) if seed is None else seed
            return await self._sample(list(token_ids), spec, [first + i for i in range(n)], request_id)
        finally:
            self._running.discard(request_id)
            self._aborted.discard(request_id)

    async def abort(self, request_id: str | None = None) -> None:
        """See `RolloutEngine.abort`."""
        self._aborted |= {r for r in self._running if request_id is None or f"{r}/".startswith(f"{request_id}/")}

    async def pause(self, keep: bool) -> None:
        """See `RolloutEngine.pause`."""
        self._paused = True
        self._open.clear()
        if not keep:
            await self.abort()
        while len(self._running) > (self._waiting if keep else 0):
            await asyncio.sleep(0)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._paused = False
        if self._ledger is None:
            self._open.set()

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutEngine.sleep`. Caches live only as long as their requests; the weights go to host memory."""
        self._model.to("cpu")
        platform().empty_cache()

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutEngine.wake`."""
        if "weights" in tags:
            self._model.to(platform().device())

    async def begin_update(self, manifest: WeightManifest) -> None:
        """See `RolloutEngine.begin_update`."""
        if len(self._running) > self._waiting:
            raise RuntimeError(
                f"weight update {manifest.version}: {len(self._running)} requests are running; pause first"
            )
        check_manifest(manifest, {name: tuple(p.shape) for name, p in self._model.named_parameters()})
        self._reader.close()
        self._ledger = UpdateLedger(manifest)
        self._open.clear()

    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        """See `RolloutEngine.load_bucket`."""
        assert self._ledger is not None, "load_bucket outside an update"
        self._ledger.take(bucket["names"])
        await asyncio.to_thread(self._write, bucket)  # it may have to wait for the trainer and for other replicas

    def _write(self, bucket: dict[str, Any]) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in self._reader.read(bucket):
            parameters[name].copy_(tensor)

    async def finish_update(self, version: int) -> int | None:
        """See `RolloutEngine.finish_update`."""
        assert self._ledger is not None, "finish_update outside an update"
        self._ledger.finish()
        self._version, self._ledger = version, None
        if not self._paused:
            self._open.set()
        return self._reader.close()

    async def device_uuids(self) -> list[str]:
        """See `RolloutEngine.device_uuids`."""
        return [platform().device_uuid()]

    async def ping(self) -> None:
        """See `RolloutEngine.ping`. This process computes, and has answered."""

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        self._model = None
        self._reader.leave()
        platform().empty_cache()

    async def _sample(
        self, prompt: list[int], spec: SamplingSpec, seeds: list[int], request_id: str
    ) -> list[Completion]:
        """Sample one answer for each seed, all of the same length so far; ended ones are computed along and ignored."""
        device = self._model.device
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        sequences = torch.tensor([prompt] * len(seeds), device=device)
        logprobs, versions = [], []
        ends: list[tuple[int, Status] | None] = [None] * len(seeds)
        cache, cache_version = DynamicCache(), self._version
        for length in range(1, spec.max_tokens + 1):
            await self._hold(request_id)
            if request_id in self._aborted:
                break
            if cache_version != self._version:  # keys and values of the old weights
                cache, cache_version = DynamicCache(), self._version
            new = sequences[:, cache.get_seq_length() :]
            logits = self._model(new, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            chosen, chosen_logprobs = sample(logits, spec, generators)
            sequences = torch.cat([sequences, chosen[:, None]], dim=1)
            logprobs.append(chosen_logprobs)
            versions.append(self._version)
            for row, token in enumerate(chosen.tolist()):
                if ends[row] is None and token in spec.stop_token_ids:
                    ends[row] = (length, Status.STOP)
            if None not in ends:
                break
            await asyncio.sleep(0)
        reached = sequences.shape[1] - len(prompt)
        cut = Status.LENGTH if reached == spec.max_tokens else Status.ABORT
        answers = sequences[:, len(prompt) :].cpu().numpy()
        table = torch.stack(logprobs, dim=1).cpu().numpy() if logprobs else np.empty((len(seeds), 0), np.float32)
        completions = []
        for row, end in enumerate(ends):
            length, status = end or (reached, cut)
            completions.append(
                Completion(
                    token_ids=answers[row, :length],
                    logprobs=table[row, :length] if spec.logprobs_every else np.full(length, NOT_ASKED, np.float32),
                    versions=np.asarray(versions[:length], np.int32),
                    status=status,
                )
            )
        return completions

    async def _hold(self, request_id: str) -> None:
        """Wait out a pause, unless the request is aborted meanwhile."""
        self._waiting += 1
        while not self._open.is_set() and request_id not in self._aborted:
            await asyncio.sleep(0.001)
        self._waiting -= 1


def sample(
    logits: torch.Tensor, spec: SamplingSpec, generators: list[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row from `[B, V]` logits: int64 `[B]` ids and their float32 `[B]` logprobs."""
    logits = logits.float()
    logits[:, spec.vocab_size :] = -torch.inf
    if spec.temperature == 0.0:
        chosen = logits.argmax(dim=-1)
    else:
        top_k = spec.top_k if spec.top_k > 0 else logits.shape[1]
        logits = truncate(logits / spec.temperature, top_k, spec.top_p)
        rows = zip(logits.softmax(dim=-1), generators, strict=True)
        chosen = torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
    return chosen, logits.log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
