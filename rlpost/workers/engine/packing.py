"""Bins of whole sequences under a token budget; pure Python."""

import heapq
from collections.abc import Sequence


def partition(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Indices of `sizes` over exactly `num_bins` bins of near-equal sums; bins may be empty.

    Longest first, each to the emptiest bin (Graham 1969: within 4/3 of the best). Indices ascend within a bin.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, i) for i in range(num_bins)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, emptiest = heapq.heappop(heap)
        bins[emptiest].append(index)
        heapq.heappush(heap, (load + sizes[index], emptiest))
    return [sorted(b) for b in bins]


def pack(
    lengths: Sequence[int], max_tokens: int, num_bins: int = 0, key: str = "ppo_max_token_len_per_gpu"
) -> list[list[int]]:
    """Every sequence once, in balanced bins of at most `max_tokens` tokens.

    Args:
        lengths: tokens of each sequence.
        max_tokens: budget of a bin.
        num_bins: at least this many bins; those without a sequence are empty.
        key: the config key of the budget, for the message.

    Raises:
        ValueError: a sequence longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"{key}: a sequence of {longest} tokens exceeds the budget of {max_tokens}; raise {key} to {longest}"
        )
    count = max(num_bins, -(-sum(lengths) // max_tokens))
    while True:
        bins = partition(lengths, count)
        if all(sum(lengths[i] for i in b) <= max_tokens for b in bins):
            return bins
        count += 1
