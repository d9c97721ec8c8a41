"""Advantage estimators: from rewards (and values) to one number a response token.

A new estimator is one registered function `(batch, cfg) -> {"advantages": [N], ...}`. Groups are found by
`batch["group"]`, never by position. Rows that are not `usable` take no part in any statistic and get 0; so does every
row of a group with fewer than two usable rows when the estimator compares within groups. An estimator that reads
`old_logprobs` has an attribute `reads_old_logprobs = True`, set below its definition: otherwise they are not there,
since not all of them are inferred. All arithmetic is float64, so that equal rewards give exactly equal scores and no
tiny difference is blown up by a division by ~0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlpost.algos.config import AlgoConfig
from rlpost.algos.ragged import ResponseGrid, row_ids, segment_sum
from rlpost.batch import Batch
from rlpost.registry import Registry

Estimator = Callable[[Batch, AlgoConfig], dict[str, Tensor]]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")


@ESTIMATORS.register("gae")
def gae(batch: Batch, cfg: AlgoConfig) -> dict[str, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16); also `returns`, the critic's targets.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next *response*
    token: text that a tool wrote in between is skipped. The value after the last one is 0.
    """
    mask = response_tokens(batch)
    grid = ResponseGrid(mask, batch.cu_seqlens)
    rewards, values = grid.pad(batch["rewards"].double()), grid.pad(batch["values"].double())
    next_values = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)[:, : values.shape[1]]
    advantages = discounted_sums(rewards + cfg.gamma * next_values - values, cfg.gamma * cfg.lam)
    returns = grid.unpad(advantages + values)
    advantages = grid.unpad(advantages)
    if cfg.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    return {"advantages": advantages.float(), "returns": returns.float()}


@ESTIMATORS.register("grpo")
def grpo(batch: Batch, cfg: AlgoConfig) -> dict[str, Tensor]:
    """Score minus group mean, over the group's standard deviation (Shao et al. 2024, DeepSeekMath, section 4.1.2).

    `norm_adv_by_std_in_grpo=False` leaves the division out (Dr.GRPO, Liu et al. 2025). The deviation is the sample's
    (n - 1) plus 1e-6.
    """
    scores, counted, n = _grouped_scores(batch)
    centred = scores - _group_sum(scores, batch["group"], counted) / n
    if cfg.norm_adv_by_std_in_grpo:
        variance = _group_sum(centred.square(), batch["group"], counted) / (n - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)
    return _one_a_row(centred, counted, batch, cfg.whiten_advantages)


@ESTIMATORS.register("rloo")
def rloo(batch: Batch, cfg: AlgoConfig) -> dict[str, Tensor]:
    """Score minus the mean of the *others* in the group (Kool et al. 2019; Ahmadian et al. 2024)."""
    scores, counted, n = _grouped_scores(batch)
    others = (_group_sum(scores, batch["group"], counted) - scores) / (n - 1).clamp(min=1)
    return _one_a_row(scores - others, counted, batch, cfg.whiten_advantages)


@ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(batch: Batch, cfg: AlgoConfig) -> dict[str, Tensor]:
    """Discounted return-to-go of each token, whitened over the batch (Hu et al. 2025, REINFORCE++).

    The paper's KL penalty of each token is part of the rewards: `use_kl_in_reward`.
    """
    mask = response_tokens(batch)
    grid = ResponseGrid(mask, batch.cu_seqlens)
    returns = grid.unpad(discounted_sums(grid.pad(batch["rewards"].double()), cfg.gamma))
    return {"advantages": masked_whiten(returns, mask).float()}


@ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: Batch, cfg: AlgoConfig) -> dict[str, Tensor]:
    """Score minus group mean, whitened over the tokens of the batch (Hu et al. 2025, REINFORCE++ w/ baseline)."""
    scores, counted, n = _grouped_scores(batch)
    centred = scores - _group_sum(scores, batch["group"], counted) / n
    return _one_a_row(centred, counted, batch, whiten=True)


def response_tokens(batch: Batch) -> Tensor:
    """Bool `[N]`: response tokens of usable rows."""
    return batch["response_mask"] & batch["usable"][row_ids(batch.cu_seqlens, batch.num_tokens)]


def row_scores(batch: Batch) -> Tensor:
    """Sum of each row's rewards over its response tokens: float64 `[B]`, 0 for rows that are not usable."""
    return segment_sum(batch["rewards"].double().masked_fill(~response_tokens(batch), 0.0), batch.cu_seqlens)


def discounted_sums(values: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the last dimension of `[B, T]`; one vector operation a column."""
    sums = torch.empty_like(values)
    running = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        running = values[:, t] + decay * running
        sums[:, t] = running
    return sums


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the masked values `[N]` to mean 0 and variance 1 (unbiased, plus 1e-8); 0 elsewhere."""
    count = mask.sum()
    mean = values.masked_fill(~mask, 0.0).sum() / count.clamp(min=1)
    centred = (values - mean).masked_fill(~mask, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


def _group_sum(values: Tensor, group: Tensor, counted: Tensor) -> Tensor:
    """For every row `[B]` the sum of `values [B]` over the counted rows of its group."""
    ids, index = group.unique(return_inverse=True)
    return values.new_zeros(len(ids)).index_add(0, index, values.masked_fill(~counted, 0.0))[index]


def _grouped_scores(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """`[B]` each: scores, rows that have a usable other to be compared with, usable rows in the group (at least 1)."""
    scores, usable = row_scores(batch), batch["usable"]
    n = _group_sum(torch.ones_like(scores), batch["group"], usable)
    return scores, usable & (n >= 2), n.clamp(min=1)


def _one_a_row(advantages: Tensor, counted: Tensor, batch: Batch, whiten: bool) -> dict[str, Tensor]:
    """Give all response tokens of a counted row that row's advantage."""
    rows = row_ids(batch.cu_seqlens, batch.num_tokens)
    mask = batch["response_mask"] & counted[rows]
    tokens = advantages[rows].masked_fill(~mask, 0.0)
    return {"advantages": (masked_whiten(tokens, mask) if whiten else tokens).float()}
