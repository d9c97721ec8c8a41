"""Losses that are not finite in one group's rows, and so on one rank; found by spawned ranks by name."""

from dataclasses import dataclass
from typing import Any

import torch
from ranks import Case, policy_loss, ragged_batch, train

from rlpost.batch import Batch
from rlpost.workers.dispatch import CustomLoss
from rlpost.workers.model_worker import ModelWorker


@dataclass
class Plant:
    """`number` times the loss (`loss`), a gradient that is infinite (`gradient`), or an advantage (`advantage`) or
    weight (`weight`) that is `number`; in the rows of `group`: of the 5, 0 to 2 are the first update's."""

    what: str
    group: int = 0
    number: float = float("nan")

    def __call__(self, micro: Batch, output: Any) -> tuple[torch.Tensor, dict]:
        share, metrics = policy_loss(micro, output)
        if bool((micro["group"] == self.group).any()):
            if self.what == "loss":
                share = share * self.number
            if self.what == "gradient":
                share = share + (output.logprobs - output.logprobs.detach()).abs().sqrt().sum()
        return share, metrics


def train_planted(worker: ModelWorker, arguments: tuple[Case, Plant]) -> dict[str, Any]:
    """Metrics of the actor's two updates, what every rank says, and whether its weights moved."""
    case, plant = arguments
    worker.build(case.setup())
    engine, batch = worker.engines["actor"], ragged_batch()
    if plant.what == "advantage":
        rows = (batch["group"] == plant.group).repeat_interleave(batch.seqlens)
        batch["advantages"][rows & batch["response_mask"]] = plant.number
    if plant.what == "weight":
        with torch.no_grad():
            next(engine.model.parameters()).to_local().fill_(plant.number)
    before = {name: weight.clone() for name, weight in engine.named_weights(torch.float32)}
    metrics = train(worker, "actor", batch, CustomLoss(plant))
    same = all(torch.equal(w.nan_to_num(7), before[n].nan_to_num(7)) for n, w in engine.named_weights(torch.float32))
    own = engine.skipped, engine.updates, len(engine.optimizer.state) > 0, same
    ranks: list[Any] = [None] * worker.world_size
    torch.distributed.all_gather_object(ranks, (own, engine.scaler.scale))
    return {"metrics": metrics, "ranks": [said for said, _ in ranks], "scales": [scale for _, scale in ranks]}


def train_all(worker: ModelWorker, cases: dict[str, tuple[Case, Plant]]) -> dict[str, Any]:
    """`train_planted` of each."""
    return {name: train_planted(worker, case) for name, case in cases.items()}
