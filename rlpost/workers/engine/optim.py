"""AdamW over sharded parameters: its schedule, the global gradient norm, and where its state lives."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlpost.workers.config import OptimConfig


def learning_rate(update: int, cfg: OptimConfig, total_updates: int | None) -> float:
    """Learning rate of the `update`-th optimizer update, from 0.

    Warm-up is linear and its first update is not 0; then the rate is constant, or falls to `min_lr_ratio * lr` at
    `total_updates`, linearly or along half a cosine.

    Raises:
        ValueError: a decay without `total_updates`.
    """
    if update < cfg.lr_warmup_steps:
        return cfg.lr * (update + 1) / cfg.lr_warmup_steps
    if cfg.lr_scheduler_type == "constant":
        return cfg.lr
    if total_updates is None:
        raise ValueError(f"optim.lr_scheduler_type={cfg.lr_scheduler_type} needs the total number of updates")
    progress = min(1.0, (update - cfg.lr_warmup_steps) / max(1, total_updates - cfg.lr_warmup_steps))
    share = 1.0 - progress if cfg.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * share)


def make_optimizer(parameters: Sequence[nn.Parameter], cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused."""
    betas = (cfg.betas[0], cfg.betas[1])
    return torch.optim.AdamW(parameters, lr=cfg.lr, betas=betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True)


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter], shard_group: dist.ProcessGroup) -> Tensor:
    """Euclidean norm of the whole gradient, from the shards of one replica; a float32 scalar, equal on all ranks."""
    shards = [local(p.grad) for p in parameters if p.grad is not None]
    norms = torch._foreach_norm([s for s in shards if s.numel()])
    device = local(parameters[0]).device
    squares = torch.stack(norms).float().square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(squares, group=shard_group)
    return squares.sqrt()


@torch.no_grad()
def clip_(parameters: Sequence[nn.Parameter], norm: float, limit: float, scale: float) -> None:
    """Bring gradients that are `scale` times too large to their size of norm `norm`, or to norm `limit` if less."""
    factor = (limit / norm if norm > limit else 1.0) / scale
    if factor != 1.0:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments to `device`; the host copy is what an offload leaves."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = value.to(device, non_blocking=True)
