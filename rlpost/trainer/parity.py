"""The parity gate: trainer and engine must give the same tokens the same logprobs, or the run stops."""

import math
from dataclasses import dataclass

import torch

from rlpost.batch import Batch
from rlpost.metrics import Metric, Metrics, Reduce
from rlpost.trajectory import NOT_ASKED

NAME = "train_rollout_logprob_abs_diff"


class ParityError(RuntimeError):
    """Trainer and engine disagree; the message says by how much and what is the likely cause."""

    def __init__(self, message: str, may_be_kernels: bool = False):
        super().__init__(message)
        self.may_be_kernels = may_be_kernels


@dataclass(slots=True, frozen=True)
class Parity:
    """Difference between trainer and engine over `num_tokens` tokens, nats."""

    mean: float
    p99: float
    max: float
    signed_mean: float  # engine minus trainer
    num_tokens: int

    def metrics(self) -> Metrics:
        """`train_rollout_logprob_abs_diff/{mean,p99,max}`, and of how many `tokens`: seldom all of a step's."""
        if not self.num_tokens:
            return {}
        return {
            f"{NAME}/mean": Metric(self.mean, self.num_tokens),
            f"{NAME}/p99": Metric(self.p99, reduce=Reduce.MAX),
            f"{NAME}/max": Metric(self.max, reduce=Reduce.MAX),
            f"{NAME}/tokens": Metric(float(self.num_tokens), reduce=Reduce.SUM),
        }


def comparable(batch: Batch, version: int) -> torch.Tensor:
    """bool `[N]`: tokens that weight `version` sampled and whose logprob the engine was asked for."""
    return batch["response_mask"] & (batch["versions"] == version) & (batch["rollout_logprobs"] != NOT_ASKED)


def compared(batch: Batch, version: int) -> torch.Tensor:
    """bool `[N]`: the `comparable` tokens of which the trainer's logprob is there too."""
    return comparable(batch, version) & (batch["old_logprobs"] != NOT_ASKED)


def differences(batch: Batch, version: int) -> torch.Tensor:
    """`rollout_logprobs - old_logprobs` of the `compared` tokens, float64 `[n]`."""
    return (batch["rollout_logprobs"] - batch["old_logprobs"])[compared(batch, version)].double()


def compare(batch: Batch, version: int) -> Parity:
    """Summary of `differences`."""
    diff = differences(batch, version)
    if diff.numel() == 0:
        return Parity(0.0, 0.0, 0.0, 0.0, 0)
    size = diff.abs()
    return Parity(
        mean=size.mean().item(),
        p99=torch.quantile(size[torch.randperm(len(size))[: 2**20]], 0.99).item()
        if len(size) > 2**20
        else size.quantile(0.99).item(),
        max=size.max().item(),
        signed_mean=diff.mean().item(),
        num_tokens=diff.numel(),
    )


def may_be_kernels(after_push: float | None, other_temperature: dict[float, float], limit: float) -> bool:
    """Whether the engine's kernels may be at fault: neither a push nor another temperature brought agreement.

    Arguments as in `likely_cause`.
    """
    tried = [*other_temperature.values(), *([] if after_push is None else [after_push])]
    return not any(mean <= limit for mean in tried)


def likely_cause(parity: Parity, after_push: float | None, other_temperature: dict[float, float], limit: float) -> str:
    """Name the likely cause of a mean difference above `limit`.

    Args:
        parity: what was measured.
        after_push: mean difference on fresh tokens once the weights were pushed again; None if that was not tried.
        other_temperature: trainer temperature -> mean difference on the same tokens.
        limit: nats.
    """
    if not math.isfinite(parity.mean):
        return (
            "weights or kernels that overflow: a logprob is not a finite number. Look at actor/grad_norm of the last "
            "steps, and compare rollout.dtype with actor.dtype"
        )
    if after_push is not None and after_push <= limit:
        return (
            f"stale weights: after pushing the weights again it is {after_push:.2e}. The last update did not reach "
            "every parameter of the engine"
        )
    for temperature, mean in other_temperature.items():
        if mean <= limit:
            return f"sampling settings: with temperature {temperature} in the trainer it is {mean:.2e}, so the engine's"
    if parity.signed_mean > 0.8 * parity.mean:
        return (
            "sampling settings: the engine's logprobs are higher throughout, as when it renormalises over fewer tokens "
            "(top-p, top-k, or a vocabulary smaller than the trainer's)"
        )
    if parity.mean < 0.2:
        return (
            "precision: small and without direction. Compare rollout.dtype with actor.dtype, and the attention kernels"
            ". Where both compute in bfloat16, actor.dtype=float16 rollout.dtype=auto agree better"
        )
    return (
        "stale or different weights: pushing them again did not help. Some parameter never reaches the engine (tied "
        "embeddings, adapters), or it loaded another model"
    )
