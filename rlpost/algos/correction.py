"""Rollout correction: what to do when the engine's policy (behaviour) is not the trainer's (proximal).

They differ by arithmetic (kernels, precision), by weights (asynchronous training) or both. The ratio
rho = proximal / behaviour of a token, of its sequence (product) or length-normalised (geometric mean) either *weighs*
the loss, truncated from above (TIS), or *rejects* what lies outside of bounds (MIS), or both. Neither has a gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpost.algos.config import RolloutCorrectionConfig
from rlpost.algos.kl import MAX_LOG_RATIO, log_ratio
from rlpost.algos.ragged import masked_segment_mean, row_ids, segment_sum, weighted_means
from rlpost.metrics import Metrics
from rlpost.trajectory import NOT_ASKED


@dataclass(slots=True)
class Correction:
    """`weights` float32 `[N]` for the loss, 1 where off; `keep` bool `[N]`, False where rejected or not response."""

    weights: Tensor
    keep: Tensor
    metrics: Metrics


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    cfg: RolloutCorrectionConfig,
) -> Correction:
    """Weights and rejections of every token; the mismatch is measured wherever the engine was asked for logprobs.

    Args:
        old_logprobs, rollout_logprobs: proximal and behaviour policy, float32 `[N]`.
        response_mask: bool `[N]`.
        cu_seqlens: `[B + 1]`, whole sequences.
        cfg: levels and bounds.
    """
    measured = response_mask & (rollout_logprobs != NOT_ASKED)
    token = log_ratio(old_logprobs, rollout_logprobs, measured)
    # k1 and k3 estimate KL(behaviour || proximal): the behaviour policy sampled
    columns = {"rollout_corr/kl": -token, "rollout_corr/k3_kl": torch.expm1(token) - token}
    weights, keep = torch.ones_like(token), response_mask
    if cfg.rollout_is is not None:
        ratio = ratio_at(cfg.rollout_is, token, response_mask, cu_seqlens)
        weights = ratio.clamp(max=cfg.rollout_is_threshold)
        columns["rollout_corr/rollout_is_mean"] = weights
        columns["rollout_corr/rollout_is_truncated_fraction"] = ratio > cfg.rollout_is_threshold
    if cfg.rollout_rs is not None:
        ratio = ratio_at(cfg.rollout_rs, token, response_mask, cu_seqlens)
        lower = cfg.rollout_rs_threshold_lower
        lower = 1.0 / cfg.rollout_rs_threshold if lower is None else lower
        accepted = (ratio >= lower) & (ratio <= cfg.rollout_rs_threshold)
        keep = keep & accepted
        columns["rollout_corr/rollout_rs_masked_fraction"] = ~accepted
    if cfg.rollout_token_veto_threshold is not None:
        vetoes = response_mask & (token.exp() < cfg.rollout_token_veto_threshold)
        vetoed = (segment_sum(vetoes.float(), cu_seqlens) > 0)[row_ids(cu_seqlens, len(token))]
        keep = keep & ~vetoed
        columns["rollout_corr/veto_fraction"] = vetoed
    return Correction(weights, keep, weighted_means(columns, measured))


def ratio_at(level: str, token_log_ratio: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """rho `[N]` at `level`: of the token, or of its sequence (`sequence`: product, `geometric`: geometric mean)."""
    if level == "token":
        return token_log_ratio.exp()
    if level == "sequence":
        log_rho = segment_sum(token_log_ratio, cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    else:
        log_rho = masked_segment_mean(token_log_ratio, response_mask, cu_seqlens)
    return log_rho.exp()[row_ids(cu_seqlens, len(token_log_ratio))]
