"""Rewards for form and length."""

import re
from collections.abc import Sequence

from rlpost.rewards.base import Answer, register_reward
from rlpost.trajectory import Prompt


def soft_overlong_punishment(length: int, max_length: int, buffer_len: int, penalty_factor: float = 1.0) -> float:
    """DAPO's length penalty (Yu et al. 2025, arXiv 2503.14476, eq. 13), between `-penalty_factor` and 0.

    With L_max = `max_length` and L_cache = `buffer_len`, times `penalty_factor`:
    0 where length <= L_max - L_cache; ((L_max - L_cache) - length) / L_cache up to L_max; -1 beyond.

    Args:
        length: sampled tokens of the answer.
    """
    excess = length - (max_length - buffer_len)
    return -penalty_factor * min(max(excess / buffer_len, 0.0), 1.0)


@register_reward("length", isolated=False)
def length(prompt: Prompt, answers: Sequence[Answer], *, max_length: int, free: int = 0) -> list[float]:
    """Minus the share of a token budget that an answer used: 0 up to `free` tokens, -1 from `max_length` on.

    Raises:
        ValueError: `free` is not below `max_length`.
    """
    if not 0 <= free < max_length:
        raise ValueError(f"length: free={free} must be >= 0 and below max_length={max_length}")
    return [soft_overlong_punishment(len(answer.token_ids), max_length, max_length - free) for answer in answers]


@register_reward("format")  # a pattern of the user's may backtrack without end, hence in a process
def format_match(prompt: Prompt, answers: Sequence[Answer], *, pattern: str, full: bool = False) -> list[float]:
    """1 where the regular expression occurs in the answer (`full`: matches all of it); `.` matches newlines."""
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(answer.text) is not None) for answer in answers]
