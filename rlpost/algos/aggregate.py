"""From losses of tokens to the loss of a mini-batch: the share each token has in it.

The shares are fixed once for each optimizer mini-batch, over the rows of *all* ranks and before any token is rejected;
after that the loss is `sum(token_loss * loss_weights)` and every way to cut the mini-batch into micro-batches and
ranks gives the same gradient.

A sequence without a response token (its scoring failed) has no share and does not count among the sequences, in every
mode: a failed reward must not weaken the gradient of the others. A token that is *rejected* later (see
`correction.py`) keeps its share and contributes 0.
"""

from collections.abc import Callable

from torch import Tensor

from rlpost.algos.ragged import row_ids, segment_sum
from rlpost.registry import Registry

# (number of response tokens of each sequence [B], scale_factor) -> what its token losses are divided by, [B] or []
Denominator = Callable[[Tensor, float | None], Tensor]
AGGREGATIONS: Registry[Denominator] = Registry("loss aggregation")


def loss_weights(response_mask: Tensor, cu_seqlens: Tensor, mode: str, *, scale_factor: float | None = None) -> Tensor:
    """Share of each token in the loss of its mini-batch: float32 `[N]`, 0 where `response_mask` is False.

    Args:
        response_mask: bool `[N]` of the whole mini-batch, all ranks.
        cu_seqlens: `[B + 1]` of the whole mini-batch.
        mode: a name in `AGGREGATIONS`.
        scale_factor: the constant length of `seq-mean-token-sum-norm`, in tokens.

    Raises:
        ValueError: unknown mode, or a mode without the constant it needs.
    """
    mask = response_mask.float()
    lengths = segment_sum(mask, cu_seqlens)
    denominator = AGGREGATIONS.get(mode, "algo.loss_agg_mode")(lengths, scale_factor).clamp(min=1.0)
    return mask / denominator.expand(len(lengths))[row_ids(cu_seqlens, len(mask))]


@AGGREGATIONS.register("token-mean")
def token_mean(lengths: Tensor, scale_factor: float | None) -> Tensor:
    """Every token counts the same (DAPO, Yu et al. 2025, section 3.3)."""
    return lengths.sum()


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(lengths: Tensor, scale_factor: float | None) -> Tensor:
    """Every sequence counts the same and its tokens share it (GRPO, Shao et al. 2024, eq. 3)."""
    return num_sequences(lengths) * lengths


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(lengths: Tensor, scale_factor: float | None) -> Tensor:
    """Sum over the tokens of a sequence, mean over sequences: the policy gradient of whole sequences."""
    return num_sequences(lengths)


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(lengths: Tensor, scale_factor: float | None) -> Tensor:
    """`seq-mean-token-sum` over a constant length, so that length itself has no weight (Dr.GRPO, Liu et al. 2025).

    Raises:
        ValueError: without `scale_factor`.
    """
    if not scale_factor:
        raise ValueError("algo.loss_agg_mode=seq-mean-token-sum-norm needs algo.loss_scale_factor, a length in tokens")
    return num_sequences(lengths) * scale_factor


def num_sequences(lengths: Tensor) -> Tensor:
    """Sequences with at least one response token: float `[]`."""
    return (lengths > 0).sum().to(lengths.dtype)
