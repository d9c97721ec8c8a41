"""Rewards that compare an answer with the ground truth as text or as a number."""

import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

from rlpost.rewards.base import Answer, register_reward
from rlpost.trajectory import Prompt

# A sign only where nothing that it could be subtracted from precedes it; one apart from its number ("- 5") may be a
# dash or a bullet, and counts only at the beginning and after what an operand follows. Thousands commas in threes.
_SIGN = r"(?P<sign>(?:\A\s*|[=:(\[{,][ \t]*|(?<=\$))-[ \t]*|(?<![\w.)\]}])-)?(?:\\?\$[ \t]*)?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_VALUE = rf"(?P<value>{_DIGITS}/[1-9]\d*|(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE](?P<exponent>[+-]?\d+))?)"
_NUMBER = re.compile(_SIGN + _VALUE)
_FACTOR = r"(?:pi|dozen|hundred|thousand|million|billion|trillion)\b"
_UNIT = rf"\s*\\?%|\^\{{?\\circ\}}?|\s*\\(?:text|mbox)\{{[^{{}}\d]*\}}|\s+(?!{_FACTOR})[^\W\d_]+(?:\s+[^\W\d_]+)*"
_ONE_NUMBER = re.compile(rf"{_SIGN}{_VALUE}(?:{_UNIT})?\.?")
_FRACTION = re.compile(
    r"(?:(?<!\d)(\d{1,200}) ?)?\\[dt]?frac *(?:\{ *(-?\d{1,200}) *\}|(\d)) *(?:\{ *(\d{1,200}) *\}|(\d))"
)
_UNIT_POWER = re.compile(r"(\\(?:text|mbox|mathrm)\{[^{}]*\})\^\{?\d\}?")
_OPERATION = re.compile(
    r"\\(?:sqrt|pi|times|cdot|div|pm|mp|log|ln|exp|sin|cos|tan|binom|infty)(?![a-z])|\^(?! *\{? *\\circ)"
)
_MAX_DIGITS, _MAX_EXPONENT = 200, 4  # characters; what is longer is no answer, and would be slow to compare


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
    """1 where the answer's final number equals the ground truth (`72`, `72.0`, `$72`, `1,072`, `7.2e1`, `1/2`).

    The final number is the first after the last `####`; else the last in the last `\\boxed{...}`; else the last of all.
    `\\frac{1}{2}` is a number too, and `3\\frac{1}{2}` is 7/2. Units and percent signs are ignored. A box that ends on
    an expression (`2\\sqrt{3}`, `10^2`) holds no number.

    Raises:
        ValueError: the ground truth (after its `####` or in its box, where it has one) is not exactly one number.
    """
    truth = _one_number(str(prompt.ground_truth))
    if truth is None:
        raise ValueError(
            f"number_match: the ground truth {str(prompt.ground_truth)[:80]!r} is not one number (such as 72, -0.5, "
            "1e-5 or 3/4); set reward=math to compare expressions"
        )
    return [float(final_number(answer.text) == truth) for answer in answers]


def final_number(text: str) -> Fraction | None:
    """The number that a text ends on, see `number_match`; None where there is none."""
    text, marked = _final_part(text)
    numbers = deque(_NUMBER.finditer(text), maxlen=None if marked else 1)
    return _value(numbers[0]) if numbers else None


def _one_number(text: str) -> Fraction | None:
    """The number that a ground truth is, or None where it is anything else."""
    text, _ = _final_part(text)
    match = _ONE_NUMBER.fullmatch(text.replace("\\$", "").replace("$", "").strip())
    return None if match is None else _value(match)


def _final_part(text: str) -> tuple[str, bool]:
    """What follows the last `####` (and True), or stands in the last box, or all; in the plain notation of numbers."""
    _, mark, marked = text.rpartition("####")
    boxed = None if mark else last_boxed(text)
    part = marked if mark else text if boxed is None else _without_expression(boxed)
    for latex, plain in (("\N{MINUS SIGN}", "-"), ("{,}", ","), ("\\!", "")):
        part = part.replace(latex, plain)
    return _FRACTION.sub(_plain_fraction, part), bool(mark)


def _without_expression(boxed: str) -> str:
    """Content of a box, unless what it ends on (behind its last `=`) is yet to be computed."""
    boxed = _UNIT_POWER.sub(r"\1", boxed)
    return "" if _OPERATION.search(boxed.rpartition("=")[2]) else boxed


def _plain_fraction(match: re.Match[str]) -> str:
    whole, top, top_digit, bottom, bottom_digit = match.groups()
    numerator, denominator = int(top or top_digit), int(bottom or bottom_digit)
    return f"{numerator + int(whole or 0) * denominator}/{denominator}"


def _value(match: re.Match[str]) -> Fraction | None:
    digits, exponent = match["value"], match["exponent"]
    if len(digits) > _MAX_DIGITS or len(exponent or "") > _MAX_EXPONENT:
        return None
    value = Fraction(digits.replace(",", ""))
    return -value if match["sign"] else value


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
