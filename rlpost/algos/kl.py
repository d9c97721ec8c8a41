"""Estimators of KL(policy || reference) from sampled tokens, and the coefficient of its penalty.

With x = log(policy / reference) of a token that the policy sampled (Schulman 2020, "Approximating KL divergence"):

    name         value              gradient of its mean, as a loss on on-policy tokens
    k1           x                  0: refused as a loss
    k2           x^2 / 2            that of KL(policy || reference): the one to use
    k3           exp(-x) - 1 + x    that of KL(reference || policy), the other direction
    low_var_kl   k3, value clamped  as k3
    abs          |x|                that of sum |policy - reference|
    k1+, k3+     of k1, k3          of k2 (straight-through)

In a reward no gradient passes and only the value matters: all are allowed, k1 and k3 are unbiased.
"""

from typing import Protocol

import torch
from torch import Tensor

from rlpost.algos.config import KLControlConfig

MAX_LOG_RATIO = 20.0  # beyond e^20 a ratio is a number for the log, not for the optimizer: float32 stays finite


def log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """log(p / q) of each token, within +-`MAX_LOG_RATIO`, 0 (and no gradient) outside `mask`: all `[N]`."""
    return (logprobs - other).masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each token in nats, `[N]`, 0 outside `mask`; `kind` as tabled above."""
    x = log_ratio(logprobs, ref_logprobs, mask)
    if kind.endswith("+"):
        gradient = x.square() / 2
        return _value(kind[:-1], x).detach() + gradient - gradient.detach()
    return _value(kind, x)


def _value(kind: str, x: Tensor) -> Tensor:
    match kind:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x
        case "low_var_kl":
            return (torch.expm1(-x) + x).clamp(max=10.0)
        case "abs":
            return x.abs()
    raise ValueError(f"unknown KL estimator '{kind}'")


class KLController(Protocol):
    """Holds the coefficient of the KL penalty."""

    coef: float

    def update(self, kl: float, num_sequences: int) -> None:
        """Take note of the measured KL (nats a token) of a batch."""


class FixedKL:
    """A constant coefficient."""

    def __init__(self, cfg: KLControlConfig):
        self.coef = cfg.kl_coef

    def update(self, kl: float, num_sequences: int) -> None:
        """Nothing changes."""


class AdaptiveKL:
    """Proportional control in log space (Ziegler et al. 2019): the coefficient grows while KL > target."""

    def __init__(self, cfg: KLControlConfig):
        self.coef = cfg.kl_coef
        self._target, self._horizon = cfg.target_kl, cfg.horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """coef *= 1 + clip(kl / target - 1, +-0.2) * num_sequences / horizon."""
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_sequences / self._horizon


def kl_controller(cfg: KLControlConfig) -> KLController:
    """The controller that `algo.kl_ctrl.type` names."""
    return AdaptiveKL(cfg) if cfg.type == "adaptive" else FixedKL(cfg)
