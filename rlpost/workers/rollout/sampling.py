"""Sampling from logits, for the engines whose sampler is ours; torch only."""

import torch

# Constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64

CHUNK_ELEMENTS = 2**26  # of a table, 256 MiB in float32
BLOCK = 512  # ids whose mass is summed before it is searched


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

    First among blocks of ids, then inside the one that was met, so that only their sums are in float64, without which a
    large vocabulary would round away unlikely ids. Some rows at a time, to bound memory.
    """
    rows = max(1, CHUNK_ELEMENTS // logprobs.shape[1])
    parts = zip(logprobs.split(rows), uniform.split(rows), strict=True)
    return torch.cat([_draw(part, places) for part, places in parts])


def _draw(logprobs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    whole = logprobs.shape[1] // BLOCK * BLOCK
    sums = logprobs[:, :whole].exp().unflatten(1, (-1, BLOCK)).sum(-1)
    sums = torch.cat([sums, logprobs[:, whole:].exp().sum(-1, keepdim=True)], dim=1).double()
    block, rest = _search(sums, places)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=logprobs.device)
    inside = logprobs.gather(1, ids.clamp(max=logprobs.shape[1] - 1)).double().exp()
    within, _ = _search(inside.masked_fill(ids >= logprobs.shape[1], 0.0), rest)
    return block * BLOCK + within


def _search(mass: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of `[B, K]` that holds a place in [0, 1) of its row's mass, and the place inside it."""
    sums = mass.cumsum(dim=-1)
    target = (places[:, None] * sums[:, -1:]).minimum(sums[:, -1:] * (1.0 - 2.0**-52))  # or rounding passes the end
    found = torch.searchsorted(sums, target, right=True)
    own = mass.gather(1, found)
    inside = (target - (sums.gather(1, found) - own)) / own
    return found[:, 0], inside[:, 0].clamp(0.0, 1.0 - 2.0**-53)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 `[B]` in [0, 1) that depend on nothing but int64 `[B]` seed and position: splitmix64 of both."""
    return (_mix(_mix(seeds) + positions * _GAMMA) >> 11 & 2**53 - 1).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; int64 multiplication wraps, and a mask makes `>>` a logical shift."""
    x = x + _GAMMA
    x = (x ^ (x >> 30 & 2**34 - 1)) * _FIRST
    x = (x ^ (x >> 27 & 2**37 - 1)) * _SECOND
    return x ^ (x >> 31 & 2**33 - 1)
