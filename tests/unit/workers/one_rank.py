"""Engines of one rank, in the tests' own process, whose process group must exist."""

from pathlib import Path

import torch
from ranks import TEMPERATURE, VOCAB, optim_config, policy_loss, ragged_batch

from rlpost.batch import Batch
from rlpost.metrics import Metrics
from rlpost.workers.config import ActorConfig, ModelConfig
from rlpost.workers.engine.base import MicroLoss
from rlpost.workers.engine.fsdp import FSDPEngine


def make_engine(path: Path, *, model: dict | None = None, actor: dict | None = None, **options) -> FSDPEngine:
    cfg = ActorConfig(**({"optim": optim_config(lr_warmup_steps=2), "grad_clip": 1e9} | (actor or {})))
    return FSDPEngine(
        str(path),
        ModelConfig(path=str(path), **(model or {})),
        cfg,
        vocab_size=VOCAB,
        temperature=TEMPERATURE,
        tokenizer_path=str(path),
        **options,
    )


def weighed() -> Batch:
    """The ragged batch, each response token with the same weight."""
    batch = ragged_batch()
    return batch.update({"loss_weights": batch["response_mask"] / batch["response_mask"].sum()})


def update(engine: FSDPEngine, loss: MicroLoss = policy_loss) -> Metrics:
    """One, from two micro-batches and an empty one between them."""
    batch = weighed()
    return engine.train_step([batch.select(range(5)), batch.select([]), batch.select(range(5, 10))], loss)


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of all."""
    return {name: weight.clone() for name, weight in engine.named_weights(torch.float32)}
