"""What an inference backend must offer: `RolloutEngine`, token ids in, token ids and their logprobs out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlpost.batch import Status


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingSpec:
    """How tokens are sampled. One object, read by the engine and by the trainer's logprob head.

    Attributes:
        temperature: 0 is greedy (validation only).
        top_p, top_k: 1.0 and -1 for training.
        max_tokens: limit of sampled tokens, the stop token included.
        stop_token_ids: sampling ends after one of these; it is part of the response.
        vocab_size: ids >= this are never sampled (an embedding may be padded beyond the tokenizer); the trainer masks
            the same ids.
    """

    temperature: float
    max_tokens: int
    vocab_size: int
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Completion:
    """One sampled continuation.

    Attributes:
        token_ids: int64 `[R]`, a stop token included.
        logprobs: float32 `[R]`, of each sampled token under the distribution it was drawn from (temperature applied).
        versions: int32 `[R]`, weight version of each token.
        status: STOP, LENGTH or ABORT.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    status: Status
    extras: dict[str, Any] = field(default_factory=dict)


class RolloutEngine(ABC):
    """One replica of the inference engine, living in one process (a Ray actor, see `worker.py`).

    Weights have a version: the number of publishes since the run began. Between `begin_update` and `finish_update`
    nothing may be generated.
    """

    @abstractmethod
    async def start(self) -> None:
        """Load the model; the engine's own error comes through when it fails."""

    @abstractmethod
    async def generate(self, token_ids: Sequence[int], spec: SamplingSpec, seed: int, request_id: str) -> Completion:
        """Sample one continuation of `token_ids`; the same seed and weights give the same tokens."""

    @abstractmethod
    async def abort(self, request_id: str | None = None) -> None:
        """End one or all running requests; each returns what it has with status ABORT."""

    @abstractmethod
    async def pause(self, keep: bool) -> None:
        """Stop scheduling; `keep` holds running requests for `resume`, otherwise they are aborted."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after `pause`; kept requests recompute their KV under the present weights."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free device memory: KV cache (and weights, kept in host memory at level 1, dropped at 2)."""

    @abstractmethod
    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back, in parts."""

    @abstractmethod
    async def begin_update(self, manifest: "WeightManifest") -> None:
        """Open an update; names, shapes and dtypes are checked before anything is written."""

    @abstractmethod
    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        """Write one bucket of tensors; `bucket` is what the transport's sender produced (small: handles, not data)."""

    @abstractmethod
    async def finish_update(self, version: int) -> int | None:
        """Close the update: post-process, drop caches, take `version`. Returns the digest of the bytes received where the receiver is ours."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine and every process it started."""


@dataclass(slots=True, kw_only=True)
class WeightManifest:
    """What one update will bring: checkpoint name -> (shape, dtype name such as "float32")."""

    version: int
    tensors: dict[str, tuple[tuple[int, ...], str]]
