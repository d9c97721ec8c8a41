"""The reward of every system: the text's length modulo 7. It costs nothing and differs within a group."""

from collections.abc import Sequence
from typing import Any


def score(text: str) -> float:
    """In [0, 1)."""
    return len(text) % 7 / 7


def compute_score(data_source: Any = None, solution_str: str = "", ground_truth: Any = None, **_: Any) -> float:
    """verl's form."""
    return score(solution_str)


def score_group(prompt: Any, answers: Sequence[Any]) -> list[float]:
    """rlpost's form."""
    return [score(answer.text) for answer in answers]
