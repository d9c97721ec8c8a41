"""What vLLM and SGLang have in common as `RolloutEngine`: admission of requests, and the order of a weight update."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rlpost.platform import platform
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.base import Completion, RolloutEngine, SamplingSpec, WeightManifest
from rlpost.workers.rollout.manifest import UpdateLedger, check_manifest, checkpoint_shapes
from rlpost.workers.rollout.processes import EngineProcesses
from rlpost.workers.rollout.requests import Requests

IDLE_POLL_S = 0.02


class ServedEngine(RolloutEngine):
    """An engine whose scheduler and workers are processes of their own; subclasses say how to speak to them.

    Logprobs are those of the distribution that was sampled from: logits / temperature, softmax, padded ids masked.

    Args:
        title: the engine's name in messages.
        seed: the engine's own, with which requests without a seed are drawn.
    """

    def __init__(self, title: str, cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0):
        self._cfg, self._model, self._max_model_len, self._seed = cfg, model, max_model_len, seed % 2**31
        self._processes = EngineProcesses(title)
        self._requests = Requests(self._submit, self._abort, max_model_len)
        self._version = 0
        self._ledger: UpdateLedger | None = None  # of the update that is open

    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int = 1
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: prompt and `spec.max_tokens` exceed the engine's `max_model_len`.
            RuntimeError: the engine died; holds its own error.
        """
        return await self._requests.generate(token_ids, spec, seed, request_id, n)

    async def abort(self, request_id: str | None = None) -> None:
        """See `RolloutEngine.abort`."""
        await self._requests.abort(request_id)

    async def pause(self, keep: bool) -> None:
        """See `RolloutEngine.pause`."""
        await self._requests.pause(keep)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._requests.resume()

    async def begin_update(self, manifest: WeightManifest) -> None:
        """See `RolloutEngine.begin_update`. An update that was left open is given up."""
        check_manifest(manifest, checkpoint_shapes(self._model.path))
        self._requests.begin_update(manifest.version)
        if self._ledger is not None:
            await self._close_update()
        self._ledger = UpdateLedger(manifest)
        await self._open_update()

    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        """See `RolloutEngine.load_bucket`."""
        assert self._ledger is not None, "load_bucket outside an update"
        self._ledger.take(bucket["names"])
        await self._write(bucket)

    async def finish_update(self, version: int) -> int | None:
        """See `RolloutEngine.finish_update`."""
        assert self._ledger is not None, "finish_update outside an update"
        self._ledger.finish()
        digests = await self._close_update()
        await self._empty_cache()  # its keys and values are those of the old weights
        if len(digests) != 1:
            raise RuntimeError(
                f"weight update {version}: tensor-parallel ranks received different bytes: {sorted(digests)}"
            )
        self._version, self._ledger = version, None
        self._requests.end_update()
        return digests.pop()

    @abstractmethod
    async def _submit(
        self, token_ids: list[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int
    ) -> list[Completion]:
        """Run one request in the engine; see `Requests`."""

    @abstractmethod
    async def _abort(self, request_ids: list[str]) -> None:
        """Ask the engine to end these requests."""

    @abstractmethod
    async def _open_update(self) -> None:
        """Tell the engine that weights are coming."""

    @abstractmethod
    async def _write(self, bucket: dict[str, Any]) -> None:
        """Have every worker load one bucket."""

    @abstractmethod
    async def _close_update(self) -> set[int]:
        """Tell the engine that this was all; the digests of what its workers received."""

    @abstractmethod
    async def _drop_cache(self) -> bool:
        """Empty the prefix cache, where that can be done now; whether it is empty."""

    async def _empty_cache(self) -> None:
        """Empty the prefix cache, which engines do only while idle: they may still be busy with what was aborted."""
        while not await self._drop_cache():
            await asyncio.sleep(IDLE_POLL_S)


def float32_head(cfg: RolloutConfig, by_itself: bool) -> bool:
    """Whether the engine is to multiply into float32 logits, as the trainer does on CUDA; `by_itself`: so by default.

    Logits that are rounded to 16 bits keep engine and trainer apart (MiniMax-M1 2025; ScaleRL, Khatri et al. 2025).
    """
    here = platform()
    if here.dtype(cfg.dtype).itemsize > 2:
        return False
    return cfg.fp32_lm_head == "on" or by_itself and cfg.fp32_lm_head == "auto" and here.kind == "cuda"


def graph_batch_sizes(most: int) -> list[int]:
    """Batch sizes to capture as device graphs, up to `most`: beyond the largest one, decoding would wait for its host.

    A batch is padded to the next size, by at most a quarter (of small ones, by 7).
    """
    sizes, size = [1, 2, 4], 8
    while size < most:
        sizes.append(size)
        size += max(8, size // 32 * 8)
    return [size for size in sizes if size < most] + [most]
