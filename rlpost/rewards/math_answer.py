"""Mathematical equivalence of final answers, judged by math-verify."""

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.rewards.base import Answer, register_reward
from rlpost.rewards.match import last_boxed
from rlpost.trajectory import Prompt

_PERCENT = re.compile(r"(?<=\S)\s*\\?%\s*\$?\s*\Z")


@register_reward("math_answer", per_answer=True, imports=("math_verify",))
def math_answer(prompt: Prompt, answers: Sequence[Answer], *, boxed_only: bool = False) -> list[float]:
    """1 where the answer's final expression is equivalent to the ground truth (LaTeX, or a text with `\\boxed{...}`).

    Where a text has boxes, the last is its final expression, and nothing else counts. `10\\%` equals 10 and 0.1.

    math-verify's own time-outs score a slow comparison as wrong and work only in a main thread; they are off, and the
    process that this term runs in is killed instead, which is an error and not a 0.

    Args:
        boxed_only: only what stands in `\\boxed{...}` counts as an answer.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    parse_expression, parse_text, equal = _verifier()
    truth = str(prompt.ground_truth)
    boxed = last_boxed(truth)
    gold = parse_expression(truth if boxed is None else boxed)
    if not gold:
        raise ValueError(f"math_answer: the ground truth {truth[:80]!r} is not a mathematical expression")

    def parse(text: str) -> list[Any]:
        boxed = last_boxed(text)
        if boxed is not None:
            return parse_expression(boxed)
        return [] if boxed_only else parse_text(text)

    return [float(equal(gold, parse(answer.text))) for answer in answers]


@functools.cache
def _verifier() -> tuple[Callable[[str], list], Callable[[str], list], Callable[[list, list], bool]]:
    """Parsers of one LaTeX expression and of a text, and the comparison, all without time-outs of their own."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off
    latex = LatexExtractionConfig(boxed_match_priority=0)

    def parse_expression(expression: str) -> list[Any]:
        number, percent = _PERCENT.subn("", expression)  # math-verify reads a percent sign only behind the formula
        text = f"${number}$\\%" if percent else f"\\boxed{{{expression}}}"
        return parse(text, extraction_config=[latex], parsing_timeout=None)

    def parse_text(text: str) -> list[Any]:
        return parse(text, extraction_config=[latex, ExprExtractionConfig()], parsing_timeout=None)

    return parse_expression, parse_text, functools.partial(verify, timeout_seconds=None)
