"""Sampling from logits, for the engines whose sampler is ours; torch only."""

import torch

# Constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64

CHUNK_ELEMENTS = 2**24  # of a table, 128 MiB in float64


def truncate(logits: torch.Tensor, top_k: int | torch.Tensor, top_p: float | torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` likeliest of `[B, V]` ids, of those the fewest whose mass reaches `top_p`; the rest is -inf.

    Both may differ by row (`[B, 1]`); the width of the table, or more, means all.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= top_k, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    ordered[probabilities.cumsum(dim=-1) - probabilities >= top_p] = -torch.inf
    return torch.empty_like(logits).scatter_(1, order, ordered)


def draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One id a row of `[B, V]` logprobs, int64 `[B]`: where the distribution function passes `uniform`, float64 `[B]`.

    In float64, or the sum over a large vocabulary would round away unlikely ids; some rows at a time, to bound memory.
    """
    rows = max(1, CHUNK_ELEMENTS // logprobs.shape[1])
    ids = []
    for part, places in zip(logprobs.split(rows), uniform.split(rows), strict=True):
        mass = part.double().exp().cumsum(dim=-1)
        ids.append(torch.searchsorted(mass, places[:, None] * mass[:, -1:], right=True)[:, 0])
    return torch.cat(ids).clamp(max=logprobs.shape[1] - 1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 `[B]` in [0, 1) that depend on nothing but int64 `[B]` seed and position: splitmix64 of both."""
    return (_mix(_mix(seeds) + positions * _GAMMA) >> 11 & 2**53 - 1).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; int64 multiplication wraps, and a mask makes `>>` a logical shift."""
    x = x + _GAMMA
    x = (x ^ (x >> 30 & 2**34 - 1)) * _FIRST
    x = (x ^ (x >> 27 & 2**37 - 1)) * _SECOND
    return x ^ (x >> 31 & 2**33 - 1)
