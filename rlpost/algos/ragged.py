"""Sums and means over sequences of different lengths that lie flat, one after another, in `[N]` tensors."""

from typing import Any

import torch
from torch import Tensor

from rlpost.metrics import Metric, Metrics, Reduce


def row_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence each token belongs to: int64 `[N]` from `cu_seqlens [B + 1]`."""
    lengths = cu_seqlens.diff()
    rows = torch.arange(len(lengths), device=cu_seqlens.device)
    return rows.repeat_interleave(lengths, output_size=num_tokens)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of `values [N]` over each sequence: `[B]`."""
    totals = values.new_zeros(len(cu_seqlens) - 1)
    return totals.index_add(0, row_ids(cu_seqlens, len(values)), values)


def masked_segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean of `values [N]` over the masked tokens of each sequence: `[B]`, 0 for a sequence without any."""
    counts = segment_sum(mask.to(values.dtype), cu_seqlens)
    return segment_sum(values.masked_fill(~mask, 0.0), cu_seqlens) / counts.clamp(min=1.0)


class ResponseGrid:
    """Response tokens of B sequences side by side, `[B, T]`: whatever lies between them (TOOL tokens) is skipped.

    Rows are filled from the left; what follows the last response token of a row is 0.
    """

    def __init__(self, response_mask: Tensor, cu_seqlens: Tensor):
        self._mask = response_mask
        self._counts = segment_sum(response_mask.long(), cu_seqlens)
        self._rows = row_ids(cu_seqlens, len(response_mask))[response_mask]
        starts = self._counts.cumsum(0) - self._counts
        self._columns = torch.arange(len(self._rows), device=starts.device) - starts[self._rows]

    def pad(self, values: Tensor) -> Tensor:
        """`[N]` -> `[B, T]`, T the largest number of response tokens."""
        num_rows = len(self._counts)
        width = int(self._counts.max()) if num_rows else 0
        padded = values.new_zeros(num_rows, width)
        padded[self._rows, self._columns] = values[self._mask]
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        """`[B, T]` -> `[N]`, 0 at tokens that are not response."""
        flat = padded.new_zeros(len(self._mask))
        flat[self._mask] = padded[self._rows, self._columns]
        return flat


def weighted_means(columns: dict[str, Tensor], weights: Tensor) -> Metrics:
    """One mean `Metric` a column. On a GPU value and weight stay there until `fetch`, and nothing waits for them.

    Args:
        columns: name -> `[N]` (any dtype); values where the weight is 0 do not matter, even NaN.
        weights: `[N]`, float, or bool to count tokens.
    """
    weights = weights.float()
    stacked = torch.stack([values.detach().float() for values in columns.values()])
    sums = (stacked * weights).masked_fill(weights == 0, 0.0).sum(dim=1)
    weight = weights.sum().reshape(1)
    found = torch.cat([sums / torch.where(weight == 0, 1.0, weight), weight])
    numbers: list[Any] = list(found.unbind()) if found.is_cuda else found.tolist()
    return {name: Metric(mean, numbers[-1]) for name, mean in zip(columns, numbers, strict=False)}


def fetch(parts: list[Metrics]) -> list[Metrics]:
    """`parts` as plain numbers; all that `weighted_means` left on the device comes in one transfer."""
    readings = [reading for part in parts for m in part.values() for reading in (m.value, m.weight)]
    waiting = [reading for reading in readings if isinstance(reading, Tensor)]
    numbers = iter(torch.stack(waiting).tolist() if waiting else [])

    def number(reading: Any) -> float:
        return next(numbers) if isinstance(reading, Tensor) else reading

    return [{name: Metric(number(m.value), number(m.weight), m.reduce) for name, m in part.items()} for part in parts]


def extremes(name: str, values: Tensor) -> Metrics:
    """`name/mean`, `name/max` and `name/min` of `values [K]`; nothing for K = 0."""
    if not len(values):
        return {}
    mean, high, low = torch.stack([values.mean(), values.max(), values.min()]).tolist()
    return {
        f"{name}/mean": Metric(mean, len(values)),
        f"{name}/max": Metric(high, reduce=Reduce.MAX),
        f"{name}/min": Metric(low, reduce=Reduce.MIN),
    }
