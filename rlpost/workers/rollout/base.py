"""What an inference backend must offer: `RolloutEngine`, token ids in, token ids and their logprobs out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlpost.host import host_id
from rlpost.registry import Registry, near
from rlpost.trajectory import Status
from rlpost.workers.weight_sync.topology import Place


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
        logprobs_every: the engine returns logprobs for one group in so many; 1: for all, 0: for none.
    """

    temperature: float
    max_tokens: int
    vocab_size: int
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    logprobs_every: int = 1

    def for_probe(self, max_tokens: int | None) -> "SamplingSpec":
        """The same, with logprobs for every group, of answers that are cut at `max_tokens`."""
        shorter = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        return replace(self, logprobs_every=1, max_tokens=shorter)

    def for_group(self, group_id: str) -> "SamplingSpec":
        """As it is for one group: with logprobs or without, which depends on nothing but the group's id."""
        if self.logprobs_every <= 1:
            return self
        return replace(self, logprobs_every=int(request_seed("logprobs", group_id) % self.logprobs_every == 0))


@dataclass(slots=True, kw_only=True)
class Completion:
    """One sampled continuation.

    Attributes:
        token_ids: int64 `[R]`, a stop token included.
        logprobs: float32 `[R]`, of each sampled token under the distribution it was drawn from (temperature applied);
            `NOT_ASKED` where `SamplingSpec.logprobs_every` is 0, unless the engine returns them anyway.
        versions: int32 `[R]`, weight version of each token.
        status: STOP, LENGTH or ABORT.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    status: Status
    extras: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def empty() -> "Completion":
        """A sample that was cut off before its first token."""
        return Completion(
            token_ids=np.empty(0, np.int64),
            logprobs=np.empty(0, np.float32),
            versions=np.empty(0, np.int32),
            status=Status.ABORT,
        )


def request_seed(*parts: object) -> int:
    """A seed that depends on nothing but `parts`, alike in every process and run."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "little")


def join(first: Completion, second: Completion) -> Completion:
    """A sample that was interrupted, and its continuation; the status is the continuation's."""
    return Completion(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        versions=np.concatenate([first.versions, second.versions]),
        status=second.status,
        extras=first.extras | second.extras,
    )


def check_engine_kwargs(
    engine_kwargs: Mapping[str, Any], engine: str, accepted: Collection[str], reserved: Mapping[str, str | None]
) -> None:
    """Check `rollout.engine_kwargs` against what the engine takes.

    Args:
        engine: its name, for the message.
        accepted: the arguments it takes.
        reserved: those that are not the user's to set here -> the config key that sets them, None where rlpost does.

    Raises:
        ValueError: a key that the engine does not know, or that is reserved.
    """
    for key in engine_kwargs:
        if key in reserved:
            instead = f"set {reserved[key]} instead" if reserved[key] else "rlpost sets it; leave it out"
            raise ValueError(f"rollout.engine_kwargs.{key}: {instead}")
        if key not in accepted:
            raise ValueError(f"rollout.engine_kwargs.{key}: {engine} takes no such argument; {near(key, accepted)}")


class EngineLost(RuntimeError):
    """An engine's processes are gone, or it does not answer: it will not come back, and others can do its work."""


class RolloutEngine(ABC):
    """One replica of the inference engine, living in one process (a Ray actor, see `worker.py`).

    Weights have a version: the number of publishes since the run began. Between `begin_update` and `finish_update`
    nothing may be generated.
    """

    @abstractmethod
    async def start(self) -> None:
        """Load the model; the engine's own error comes through when it fails."""

    @abstractmethod
    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int = 1
    ) -> list[Completion]:
        """Sample `n` continuations of `token_ids`; number i draws with `seed + i`, without a seed as the engine likes.

        The same seed and weights give the same tokens. Waits while the engine is paused or being updated.
        """

    @abstractmethod
    async def abort(self, request_id: str | None = None) -> None:
        """End one or all running requests; each returns what it has with status ABORT."""

    @abstractmethod
    async def pause(self, keep: bool) -> None:
        """Stop sampling; returns when nothing runs. `keep` holds requests for `resume`, else they are aborted."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after `pause`; kept requests recompute their KV under the present weights."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free device memory: KV cache, and weights (kept in host memory at level 1, dropped at 2). Idle on CPU."""

    @abstractmethod
    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back, in parts."""

    @abstractmethod
    async def begin_update(self, manifest: "WeightManifest") -> None:
        """Open an update; names and shapes are checked before anything is written.

        Where one is open, it is given up: what it has written will be overwritten.

        Raises:
            ValueError: the manifest is not what the engine's checkpoint holds; names the difference.
        """

    @abstractmethod
    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        """Write one bucket of tensors; `bucket` is what the transport's sender produced (small: handles, not data)."""

    @abstractmethod
    async def finish_update(self, version: int) -> int | None:
        """Close the update: post-process, drop caches, take `version`.

        Returns the digest of the bytes received (`MISSED` when not all came), None where the engine's own receiver does
        not give one.
        """

    @abstractmethod
    async def device_uuids(self) -> list[str]:
        """The physical devices that hold this replica's weights, one a tensor-parallel rank; "cpu" without one."""

    async def place(self) -> Place:
        """Where this replica holds its weights."""
        return Place(host_id(), tuple(await self.device_uuids()))

    @abstractmethod
    async def ping(self) -> None:
        """Return when whatever computes answers; at any time, between two decoding steps at the latest."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine and every process it started."""


@dataclass(slots=True, kw_only=True)
class WeightManifest:
    """What one update will bring: checkpoint name -> (shape, dtype name such as "float32")."""

    version: int
    tensors: dict[str, tuple[tuple[int, ...], str]]


# name -> class, built as `cls(cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0)`; with that seed
# it draws for requests that have none
ENGINES: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine",
    modules=tuple(f"rlpost.workers.rollout.{name}" for name in ("vllm", "sglang", "hf")),
)
