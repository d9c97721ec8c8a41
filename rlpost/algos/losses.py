"""Losses of single tokens, unreduced: how they are summed is `aggregate.py`'s business.

A new policy loss is one registered function `(terms, cfg) -> TokenLoss`. A = advantages, r = policy / proximal policy.
On on-policy data (r = 1) every loss here has the gradient of plain REINFORCE, -A grad log p; they differ in what they
do to tokens whose probability has moved.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlpost.algos.config import AlgoConfig
from rlpost.algos.kl import log_ratio
from rlpost.algos.ragged import masked_segment_mean, row_ids, weighted_means
from rlpost.metrics import Metrics
from rlpost.registry import Registry


@dataclass(slots=True, kw_only=True)
class PolicyTerms:
    """What a policy loss may use. Token tensors are float32 `[N]`; only `logprobs` (and `entropy`) carry a gradient.

    Attributes:
        logprobs: current policy.
        old_logprobs: proximal policy: the trainer at the start of the step.
        advantages: one for each token.
        response_mask: bool `[N]`, the tokens that count; others may hold anything finite.
        cu_seqlens: `[B + 1]`; sequences are whole.
        rollout_logprobs: behaviour policy: the engine when it sampled.
        ref_logprobs: reference policy, where there is one.
        entropy: of the current policy, where it was computed.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    cu_seqlens: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """log(policy / proximal policy) `[N]`, 0 outside the response."""
        return log_ratio(self.logprobs, self.old_logprobs, self.response_mask)


@dataclass(slots=True)
class TokenLoss:
    """`loss` float32 `[N]`, to be minimised, and what to report."""

    loss: Tensor
    metrics: Metrics = field(default_factory=dict)


PolicyLoss = Callable[[PolicyTerms, AlgoConfig], TokenLoss]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(terms: PolicyTerms, cfg: AlgoConfig) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (Schulman et al. 2017, eq. 7; separate bounds: DAPO, Yu et al. 2025).

    With `clip_ratio_c` the loss of a token with A < 0 is at most -A c (dual clip, Ye et al. 2020).
    """
    ratio, advantages = terms.log_ratio().exp(), terms.advantages
    loss, clipped = _clip(ratio, advantages, cfg)
    bounded = torch.zeros_like(clipped)
    if cfg.clip_ratio_c is not None:
        bound = -advantages * cfg.clip_ratio_c
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
    return TokenLoss(loss, _ratio_metrics(terms, ratio, clipped, lower=bounded))


@POLICY_LOSSES.register("gspo")
def gspo(terms: PolicyTerms, cfg: AlgoConfig) -> TokenLoss:
    """PPO's clipped loss with the ratio of the sequence, s = exp(mean log r), at each token (Zheng et al. 2025).

    The value at a token is s, the gradient that of its own logprob: s p / sg(p) (eq. 14).
    """
    token = terms.log_ratio()
    sequence = masked_segment_mean(token.detach(), terms.response_mask, terms.cu_seqlens)
    ratio = (sequence[row_ids(terms.cu_seqlens, len(token))] + token - token.detach()).exp()
    loss, clipped = _clip(ratio, terms.advantages, cfg)
    return TokenLoss(loss, _ratio_metrics(terms, ratio, clipped))


@POLICY_LOSSES.register("cispo")
def cispo(terms: PolicyTerms, cfg: AlgoConfig) -> TokenLoss:
    """-A sg(clip(r, 1 - low, 1 + high)) log p: the weight is clipped, no token is dropped (MiniMax-M1 2025, eq. 4).

    `clip_ratio_low=1` is the paper's "no lower bound".
    """
    ratio = terms.log_ratio().exp().detach()
    weight = ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return TokenLoss(-terms.advantages * weight * terms.logprobs, _ratio_metrics(terms, ratio, weight != ratio))


@POLICY_LOSSES.register("sapo")
def sapo(terms: PolicyTerms, cfg: AlgoConfig) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of the clip (Gao et al. 2025).

    tau is `sapo_tau_pos` where A > 0, else `sapo_tau_neg`; the gradient weight 4 s (1 - s) is 1 at r = 1 and decays
    smoothly on both sides.
    """
    ratio, advantages = terms.log_ratio().exp(), terms.advantages
    tau = torch.where(advantages > 0, cfg.sapo_tau_pos, cfg.sapo_tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    metrics = _ratio_metrics(terms, ratio)
    metrics |= weighted_means({"actor/sapo_gate": 4.0 * gate * (1.0 - gate)}, terms.response_mask)
    return TokenLoss(-advantages * gate * 4.0 / tau, metrics)


@POLICY_LOSSES.register("reinforce")
def reinforce(terms: PolicyTerms, cfg: AlgoConfig) -> TokenLoss:
    """-A log p (Williams 1992). Nothing holds the policy near the one that sampled: for one update a step."""
    return TokenLoss(-terms.advantages * terms.logprobs, _ratio_metrics(terms, terms.log_ratio().exp()))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, cliprange: float | None
) -> TokenLoss:
    """(V - R)^2 / 2, or where larger that of V held within `cliprange` of its old value: all `[N]`.

    The clip is that of PPO's first implementation (OpenAI baselines); None leaves it out.
    """
    loss = (values - returns).square() / 2
    clipped = torch.zeros_like(response_mask)
    if cliprange is not None:
        held = old_values + (values - old_values).clamp(-cliprange, cliprange)
        held_loss = (held - returns).square() / 2
        clipped = held_loss > loss
        loss = torch.maximum(loss, held_loss)
    return TokenLoss(loss, weighted_means({"critic/vf_clipfrac": clipped, "critic/vpred_mean": values}, response_mask))


def _clip(ratio: Tensor, advantages: Tensor, cfg: AlgoConfig) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss and where its clipped side was taken."""
    loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - cfg.clip_ratio_low, 1.0 + cfg.clip_ratio_high)
    return torch.maximum(loss, clipped_loss), clipped_loss > loss


def _ratio_metrics(
    terms: PolicyTerms, ratio: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None
) -> Metrics:
    columns = {"actor/ratio_mean": ratio, "actor/ppo_kl": -terms.log_ratio()}
    if clipped is not None:
        columns["actor/pg_clipfrac"] = clipped
    if lower is not None:
        columns["actor/pg_clipfrac_lower"] = lower
    return weighted_means(columns, terms.response_mask)
