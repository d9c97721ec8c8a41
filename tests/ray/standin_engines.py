"""Engines that play vLLM under ROCm on a machine without it; every Ray worker of these tests runs `setup` first."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

import rlpost.platform
from rlpost import aiter
from rlpost.platform import Platform
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.base import ENGINES, Completion, SamplingSpec
from rlpost.workers.rollout.hf import HFEngine


class Simulated(Platform):
    """A ROCm platform without devices to ask."""

    def memory_bytes(self, index: int = 0) -> int:
        return 0


ROCM = Simulated("rocm", "gfx942", (7, 2), has_aiter=True)


class ImportsLate(HFEngine):
    """Imports its package in `start`, as engines do, and loads no model."""

    async def start(self) -> None:
        from tests.ray import imported_late

        self._late = imported_late

    async def seen(self) -> tuple[dict[str, str], list[str]]:
        """The environment at that import, and engines that had been imported before."""
        return self._late.ENVIRONMENT, self._late.ENGINES_BEFORE

    async def shutdown(self) -> None:
        """Nothing was started."""


class Faulty(HFEngine):
    """Gives wrong logprobs while a family in `engine_kwargs.faults` is on, by the environment."""

    def __init__(self, cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0):
        super().__init__(replace(cfg, engine_kwargs={}), model, max_model_len, seed)
        switches = {family: aiter.ENGINES["vllm"].families[family].on for family in cfg.engine_kwargs["faults"]}
        self._broken = any(os.environ[name] == "1" for switch in switches.values() for name in switch)

    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int = 1
    ) -> list[Completion]:
        completions = await super().generate(token_ids, spec, seed, request_id, n)
        for completion in completions:
            completion.logprobs -= 0.3 * self._broken
        return completions


class Slow(HFEngine):
    """Takes a moment for each token, so that a test can meet it at work."""

    async def _hold(self, request_id: str) -> None:
        await asyncio.sleep(0.1)
        await super()._hold(request_id)


def setup() -> None:
    """Make the stand-ins known."""
    for name, engine in (("imports_late", ImportsLate), ("faulty", Faulty), ("slow", Slow)):
        ENGINES.register(name)(engine)


def setup_rocm() -> None:
    """As `setup`, in a process that takes its host for an AMD machine."""
    rlpost.platform.platform = lambda: ROCM
    setup()
