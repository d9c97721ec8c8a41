"""From one batch to the work of each rank: mini-batches, balance, micro-batches. Pure; runs on the driver.

The order of cuts is what makes the result independent of the number of ranks: optimizer mini-batches are formed of
whole groups over the whole batch and their loss shares fixed, before rows go to ranks and then to micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlpost.algos.aggregate import loss_weights
from rlpost.batch import Batch
from rlpost.metrics import Metrics
from rlpost.trajectory import NOT_ASKED
from rlpost.workers.config import TrainRoleConfig
from rlpost.workers.engine.base import MicroLoss, Output
from rlpost.workers.engine.packing import pack, partition


@dataclass(slots=True)
class InferWork:
    """One rank's part of an inference pass: rows, and micro-batches as indices into them."""

    rows: Batch
    micro_batches: list[list[int]]


@dataclass(slots=True)
class Step:
    """One rank's part of an optimizer update: micro-batches of row indices, and the shares `[tokens]` of those rows'
    tokens in the order of the micro-batches."""

    micro_batches: list[list[int]]
    loss_weights: Tensor


@dataclass(slots=True)
class TrainWork:
    """One rank's part of `train`: the rows it needs over all epochs, sent once, and its updates."""

    rows: Batch
    steps: list[Step]

    def micro_batches(self, step: Step) -> list[Batch]:
        """The micro-batches of one update, with their `loss_weights`."""
        batches = [self.rows.select(rows) for rows in step.micro_batches]
        shares = step.loss_weights.split([b.num_tokens for b in batches])
        return [batch.update({"loss_weights": share}) for batch, share in zip(batches, shares, strict=True)]


@dataclass(slots=True)
class CustomLoss:
    """An objective from any picklable `MicroLoss`, in place of an `Algorithm`.

    Attributes:
        loss: gives a micro-batch's share of the loss; weigh tokens by `batch["loss_weights"]`.
        loss_agg_mode: how those weights are made, see `rlpost.algos.aggregate`.
        scale_factor: the constant of `seq-mean-token-sum-norm`.
    """

    loss: MicroLoss
    loss_agg_mode: str = "token-mean"
    scale_factor: float | None = None

    def loss_weights(self, role: str, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Shares `[N]` of a whole mini-batch's tokens."""
        return loss_weights(response_mask, cu_seqlens, self.loss_agg_mode, scale_factor=self.scale_factor)

    def policy_loss(self, micro: Batch, output: Output) -> tuple[Tensor, Metrics]:
        """The loss, for the actor."""
        return self.loss(micro, output)

    def value_loss(self, micro: Batch, output: Output) -> tuple[Tensor, Metrics]:
        """The loss, for the critic."""
        return self.loss(micro, output)


def plan_infer(
    batch: Batch, columns: Sequence[str], rows: Sequence[int], *, dp_size: int, max_tokens: int, key: str
) -> tuple[list[InferWork], list[list[int]]]:
    """Work of each data-parallel rank, and the batch's rows that it got, for `assemble`.

    Args:
        batch: any number of rows.
        columns: those that travel.
        rows: of the batch, those that are inferred.
        dp_size: number of ranks.
        max_tokens: budget of a micro-batch.
        key: the config key of the budget.
    """
    lengths = batch.seqlens.tolist()
    owned = [[rows[i] for i in own] for own in partition([lengths[row] for row in rows], dp_size)]
    packs = _pack_equally([[lengths[row] for row in own] for own in owned], max_tokens, key)
    return [InferWork(batch.select(own, columns), bins) for own, bins in zip(owned, packs, strict=True)], owned


def assemble(batch: Batch, rows: list[list[int]], parts: list[Tensor]) -> Tensor:
    """`[N]` in the batch's order from what each rank returned for its rows, in its order; others: `NOT_ASKED`."""
    order = torch.cat([torch.as_tensor(own, dtype=torch.int64) for own in rows])
    lengths = batch.seqlens[order]
    starts = batch.cu_seqlens[:-1][order] - (lengths.cumsum(0) - lengths)
    index = torch.arange(int(lengths.sum())) + starts.repeat_interleave(lengths)
    whole = torch.full((batch.num_tokens,), NOT_ASKED, dtype=torch.float32)
    whole[index] = torch.cat(parts)
    return whole


def plan_train(
    batch: Batch,
    cfg: TrainRoleConfig,
    weigh: Callable[[Tensor, Tensor], Tensor],
    *,
    dp_size: int,
    max_tokens: int,
    key: str,
    seed: int,
) -> list[TrainWork]:
    """Work of each data-parallel rank over all epochs and mini-batches.

    Args:
        batch: needs `group` and `response_mask`.
        cfg: `ppo_mini_batch_size` (groups; the last mini-batch of an epoch may be smaller), `ppo_epochs`, `shuffle`.
        weigh: (response_mask, cu_seqlens) of a mini-batch -> shares of its tokens.
        dp_size: number of ranks.
        max_tokens: budget of a micro-batch.
        key: the config key of the budget.
        seed: of the shuffle.
    """
    lengths = batch.seqlens.tolist()
    plans: list[list[tuple[list[list[int]], Tensor]]] = [[] for _ in range(dp_size)]
    for mini in mini_batches(batch["group"], cfg, seed):
        part = batch.select(mini, ["response_mask"])
        shares = dict(
            zip(mini, weigh(part["response_mask"], part.cu_seqlens).split(part.seqlens.tolist()), strict=True)
        )
        owned = [[mini[i] for i in own] for own in partition([lengths[row] for row in mini], dp_size)]
        packs = _pack_equally([[lengths[row] for row in own] for own in owned], max_tokens, key)
        for plan, own, bins in zip(plans, owned, packs, strict=True):
            micro = [[own[i] for i in b] for b in bins]
            plan.append((micro, torch.cat([torch.empty(0), *(shares[row] for b in micro for row in b)])))
    return [_train_work(batch, plan) for plan in plans]


def mini_batches(groups: Tensor, cfg: TrainRoleConfig, seed: int) -> Iterator[list[int]]:
    """Rows of each optimizer mini-batch, by whole groups, over all epochs; `groups` `[B]` names each row's group."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    names = list(members)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(cfg.ppo_epochs):
        order = torch.randperm(len(names), generator=generator).tolist() if cfg.shuffle else range(len(names))
        shuffled = [names[i] for i in order]
        for start in range(0, len(names), cfg.ppo_mini_batch_size):
            yield [row for name in shuffled[start : start + cfg.ppo_mini_batch_size] for row in members[name]]


def on_policy_rows(groups: Tensor, cfg: TrainRoleConfig, seed: int) -> list[int]:
    """Rows that the first optimizer update trains and no later one, ascending; arguments as of `mini_batches`.

    The policy that this update trains is still the proximal one: old logprobs of these rows are its own.
    """
    first, *later = mini_batches(groups, cfg, seed)
    return sorted(set(first).difference(*later))


def _train_work(batch: Batch, plan: list[tuple[list[list[int]], Tensor]]) -> TrainWork:
    """Rows of all steps once, and the steps in terms of them."""
    needed = sorted({row for micro, _ in plan for b in micro for row in b})
    place = {row: i for i, row in enumerate(needed)}
    steps = [Step([[place[row] for row in b] for b in micro], shares) for micro, shares in plan]
    return TrainWork(batch.select(needed), steps)


def _pack_equally(lengths: list[list[int]], max_tokens: int, key: str) -> list[list[list[int]]]:
    """Micro-batches of each rank, equally many on all: collectives of the ranks must match, so some may be empty."""
    count = max(len(pack(own, max_tokens, key=key)) for own in lengths)
    while True:
        packs = [pack(own, max_tokens, count, key) for own in lengths]
        if len({len(bins) for bins in packs}) == 1:
            return packs
        count = max(len(bins) for bins in packs)
