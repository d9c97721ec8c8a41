"""Mathematical equivalence of final answers, judged by math-verify."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.rewards.base import Answer, register_reward
from rlpost.trajectory import Prompt


@register_reward("math_answer", per_answer=True, imports=("math_verify",))
def math_answer(prompt: Prompt, answers: Sequence[Answer], *, boxed_only: bool = False) -> list[float]:
    """1 where the answer's final expression is equivalent to the ground truth (LaTeX, or a text with `\\boxed{...}`).

    math-verify's own time-outs score a slow comparison as wrong and work only in a main thread; they are off, and the
    process that this term runs in is killed instead, which is an error and not a 0.

    Args:
        boxed_only: only what stands in `\\boxed{...}` counts as an answer.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    parse_truth, parse_answer, equal = _verifier(boxed_only)
    truth = str(prompt.ground_truth)
    gold = parse_truth(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(f"math_answer: the ground truth {truth[:80]!r} is not a mathematical expression")
    return [float(equal(gold, parse_answer(answer.text))) for answer in answers]


@functools.cache
def _verifier(boxed_only: bool) -> tuple[Callable[[str], list], Callable[[str], list], Callable[[list, list], bool]]:
    """Parsers of ground truths and answers, and the comparison, all without time-outs of their own."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off
    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not boxed_only)

    def parse_truth(text: str) -> list[Any]:
        return parse(text, extraction_config=[latex], parsing_timeout=None)

    def parse_answer(text: str) -> list[Any]:
        if boxed_only and "\\boxed" not in text:
            return []
        configs = [latex] if boxed_only else [latex, ExprExtractionConfig()]
        return parse(text, extraction_config=configs, parsing_timeout=None)

    return parse_truth, parse_answer, functools.partial(verify, timeout_seconds=None)
