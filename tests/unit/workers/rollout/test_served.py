"""What vLLM and SGLang share, over an engine that only notes what it is asked."""

import asyncio

import pytest

from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout import served
from rlpost.workers.rollout.base import WeightManifest
from rlpost.workers.rollout.served import ServedEngine

MODEL = ModelInfo(
    path="/model",
    tokenizer_path="/model",
    vocab_size=8,
    embedding_size=8,
    stop_token_ids=(1,),
    max_position_embeddings=64,
)


class Noting(ServedEngine):
    """Its cache can be emptied at the `busy`-th time after the first."""

    def __init__(self, busy: int):
        super().__init__("noting", RolloutConfig(), MODEL, 64)
        self.busy, self.asked = busy, []

    async def _open_update(self):
        self.asked.append("open")

    async def _write(self, bucket):
        self.asked.append("write")

    async def _close_update(self):
        self.asked.append("close")
        return {7}

    async def _drop_cache(self):
        self.asked.append("drop")
        self.busy -= 1
        return self.busy < 0


for name in Noting.__abstractmethods__:  # what no test here asks for
    setattr(Noting, name, None)
Noting.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("busy", [0, 3])
def test_no_request_is_let_in_before_the_cache_of_the_old_weights_is_gone(busy, monkeypatch):
    monkeypatch.setattr(served, "IDLE_POLL_S", 0)
    monkeypatch.setattr(served, "check_manifest", lambda *_: None)
    monkeypatch.setattr(served, "checkpoint_shapes", lambda *_: {})
    engine = Noting(busy)

    async def update() -> int | None:
        await engine.begin_update(WeightManifest(version=1, tensors={}))
        return await engine.finish_update(version=1)

    assert asyncio.run(update()) == 7
    assert engine.asked == ["open", "close", *["drop"] * (busy + 1)]
