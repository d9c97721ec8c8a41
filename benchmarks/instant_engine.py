"""An engine that answers at once, so that what is left is the cost of everything around an engine.

It is served as vLLM is, through admission and `EngineProcesses`, and gives token ids as a list, as vLLM does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlpost.platform import platform
from rlpost.trajectory import NOT_ASKED, Status
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.base import ENGINES, Completion, SamplingSpec
from rlpost.workers.rollout.served import ServedEngine

NAME = "instant"


class InstantEngine(ServedEngine):
    """Every answer is as long as it may be; its tokens are drawn once."""

    def __init__(self, cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0):
        super().__init__("instant", cfg, model, max_model_len, seed)
        self._tokens = np.random.default_rng(seed).integers(0, model.vocab_size, max_model_len).tolist()

    async def start(self) -> None:
        """See `RolloutEngine.start`. No process is started."""
        with self._processes.starting(self._cfg.startup_timeout_s):
            pass

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutEngine.sleep`. There is nothing to free."""

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutEngine.wake`."""

    async def device_uuids(self) -> list[str]:
        """See `RolloutEngine.device_uuids`."""
        return [platform().device_uuid()]

    async def ping(self) -> None:
        """See `RolloutEngine.ping`."""

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        self._processes.end()

    async def _submit(
        self, token_ids: list[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int
    ) -> list[Completion]:
        return await self._processes.call(self._answer(spec, n))

    async def _answer(self, spec: SamplingSpec, n: int) -> list[Completion]:
        return [
            Completion(
                token_ids=np.asarray(self._tokens[: spec.max_tokens], np.int64),
                logprobs=np.full(spec.max_tokens, -1.0 if spec.logprobs_every else NOT_ASKED, np.float32),
                versions=np.full(spec.max_tokens, self._version, np.int32),
                status=Status.LENGTH,
            )
            for _ in range(n)
        ]

    async def _abort(self, request_ids: list[str]) -> None:
        """What was asked has been answered."""

    async def _open_update(self) -> None:
        """It has no weights."""

    async def _write(self, bucket: dict[str, Any]) -> None:
        """It has no weights."""

    async def _close_update(self) -> set[int]:
        return {0}

    async def _drop_cache(self) -> None:
        """It has none."""


def register() -> None:
    """Make it known in this process."""
    if NAME not in ENGINES.names():
        ENGINES.register(NAME)(InstantEngine)


RAY_SETUP = f"{__name__}.{register.__name__}"  # for runtime_env's worker_process_setup_hook
