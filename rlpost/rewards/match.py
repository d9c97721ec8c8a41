"""Rewards that compare an answer with the ground truth as text or as a number."""

import re
from collections.abc import Sequence
from fractions import Fraction

from rlpost.rewards.base import Answer, register_reward
from rlpost.trajectory import Prompt

# A sign only where nothing that it could be subtracted from precedes it; thousands commas only in groups of three.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|/[1-9]\d*)?|\.\d+)")
_MAX_DIGITS = 200  # of a number; a longer one is no answer, and would be slow to compare


@register_reward("exact_match", isolated=False)
def exact_match(
    prompt: Prompt, answers: Sequence[Answer], *, first_line: bool = False, ignore_case: bool = False
) -> list[float]:
    """1 where the answer, stripped, equals the ground truth or one of a list of them.

    Args:
        first_line: compare only the first line of the answer that is not blank.
    """
    truths = prompt.ground_truth if isinstance(prompt.ground_truth, list | tuple) else [prompt.ground_truth]
    if prompt.ground_truth is None or not truths:
        raise ValueError("exact_match: the prompt has no ground truth")

    def plain(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    wanted = {plain(str(truth)) for truth in truths}
    texts = [answer.text.strip().partition("\n")[0] if first_line else answer.text for answer in answers]
    return [float(plain(text) in wanted) for text in texts]


@register_reward("number_match", isolated=False)
def number_match(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    """1 where the answer's final number equals that of the ground truth (`72`, `72.0`, `$72`, `1,072`, `1/2`).

    The final number is the first after the last `####`; else the last in the last `\\boxed{...}`; else the last of all.

    Raises:
        ValueError: the ground truth holds no number.
    """
    truth = final_number(str(prompt.ground_truth))
    if truth is None:
        raise ValueError(f"number_match: the ground truth {str(prompt.ground_truth)[:80]!r} holds no number")
    return [float(final_number(answer.text) == truth) for answer in answers]


def final_number(text: str) -> Fraction | None:
    """The number that a text ends on, see `number_match`; None where there is none."""
    text = text.replace("\N{MINUS SIGN}", "-")
    _, mark, marked = text.rpartition("####")
    boxed = last_boxed(text)
    numbers = _NUMBER.findall(marked if mark else text if boxed is None else boxed)
    if not numbers:
        return None
    chosen = numbers[0] if mark else numbers[-1]
    return None if len(chosen) > _MAX_DIGITS else Fraction(chosen.replace(",", ""))


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` with its braces balanced, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None
