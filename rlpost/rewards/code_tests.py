"""The reward for code: the share of the prompt's tests that the answer's program passes, run in a sandbox."""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlpost.rewards.base import Answer, Reward, register_reward
from rlpost.rewards.limits import CallLimits
from rlpost.rewards.sandbox.jail import Outcome, run_script, run_tests
from rlpost.trajectory import Prompt

_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_RESERVE_S = 2.0  # of the call's time, at most a quarter: for starting processes and for the last test's end
_TOLERANCE = 1e-6  # relative and absolute, of numbers with a decimal point
# What answers that are to hold only a function take for granted.
_IMPORTS = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from math import ceil, comb, floor, gcd, inf, sqrt
from typing import *
"""
# `same` compares as JSON does: a tuple is a list; numbers with a decimal point may differ by rounding.
_CALL = """
import json, math

def same(a, b):
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = ({{str(key): value for key, value in x.items()}} for x in (a, b))
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if type(a) in (int, float) and type(b) in (int, float) and float in (type(a), type(b)):
        return math.isclose(a, b, rel_tol={tolerance}, abs_tol={tolerance})
    return a == b

arguments, expected = json.loads({arguments!r}), json.loads({expected!r})
try:
    function = Solution().{name}
except NameError:
    function = __solution__({name!r})
result = function(*arguments)
assert same(result, expected), f"{{result!r}} instead of {{expected!r}}"[:300]
"""


class Test(Protocol):
    """One test; what it expects never enters the process in which the program runs."""

    def run(self, source: str, limits: CallLimits) -> Outcome: ...


@dataclass(slots=True, frozen=True)
class Dialogue:
    """The program reads `given` and must print `expected`."""

    given: str
    expected: str

    def run(self, source: str, limits: CallLimits) -> Outcome:
        outcome = run_script(source, self.given.encode(errors="replace"), limits)
        is_right = same_text(outcome.output.decode(errors="replace"), self.expected)
        return replace(outcome, fine=outcome.fine and is_right)


@dataclass(slots=True, frozen=True)
class Assertions:
    """Statements about what the program defines."""

    tests: str

    def run(self, source: str, limits: CallLimits) -> Outcome:
        return run_tests(_IMPORTS + source, self.tests, limits)


@register_reward("code", per_answer=True, sandboxed=True)
def code(
    prompt: Prompt, answers: Sequence[Answer], *, call_limits: CallLimits, partial: bool = False,
    test_timeout_s: float = 5.0,
) -> list[Reward]:  # fmt: skip
    """1 where the program in the answer's last ```python block passes all tests of the ground truth, else 0.

    A program that hangs, crashes, prints without end or takes too much memory fails the test: that is its fault and no
    error of the reward. All tests of an answer share `reward.timeout_s`; those that get no time count as failed. Parts:
    `passed`, the share of tests passed (with `partial=false` of all up to the first failure), and `timed_out`.

    Args:
        partial: the value is the share of tests passed.
        test_timeout_s: for one test.

    Raises:
        ValueError: the ground truth holds no tests, or one that cannot be run.
        SandboxError: the sandbox did not start.
    """
    tests = list(read_tests(prompt.ground_truth))
    return [_score(extract(answer.text), tests, call_limits, partial, test_timeout_s) for answer in answers]


def _score(source: str | None, tests: list[Test], limits: CallLimits, partial: bool, test_timeout_s: float) -> Reward:
    deadline = time.monotonic() + limits.timeout_s - min(_RESERVE_S, limits.timeout_s / 4)
    num_passed = num_timed_out = 0
    for test in tests if source is not None else ():
        assert source is not None
        left = deadline - time.monotonic()
        if left <= 0:
            num_timed_out += 1
            break
        outcome = test.run(source, replace(limits, timeout_s=min(left, test_timeout_s)))
        num_passed += outcome.fine
        num_timed_out += outcome.timed_out
        if not outcome.fine and not partial:
            break
    passed = num_passed / len(tests)
    value = passed if partial else float(num_passed == len(tests))
    return Reward(value=value, parts={"passed": passed, "timed_out": float(num_timed_out > 0)})


def extract(text: str) -> str | None:
    """The last ```python block of an answer, else its last block without a language; None without either."""
    blocks = _BLOCK.findall(text)
    for languages in (("python", "python3", "py"), ("",)):
        found = [body for language, body in blocks if language.lower() in languages]
        if found:
            return found[-1]
    return None


def same_text(printed: str, expected: str) -> bool:
    """Equal word by word and line by line, empty lines at both ends aside; numbers may differ by rounding."""
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if "." not in printed + expected:  # whole numbers are exact, and words are words
        return False
    try:
        return math.isclose(float(printed), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def read_tests(truth: Any) -> Iterator[Test]:
    """The tests of a ground truth in any of the forms that code data sets have; JSON text is read as JSON.

    - `{"inputs": [...], "outputs": [...]}`: texts to read and to print; with `fn_name` arguments and results of it.
    - `{"functional": text}`, `{"assert_case": [text, ...]}`, `[text, ...]` or a text: statements with `assert`.
    - `[{"input":, "output":, "testtype": "stdin" | "functional", "metadata": {"func_name":}}, ...]`.

    Raises:
        ValueError: none of these, or no test in it.
    """
    tests = list(_read(_from_json(truth)))
    if not tests:
        raise ValueError(f"code: the ground truth {str(truth)[:80]!r} holds no tests")
    return iter(tests)


def _read(truth: Any) -> Iterator[Test]:
    if isinstance(truth, str):
        yield Assertions(truth)
    elif isinstance(truth, dict):
        statements = truth.get("assert_case") or truth.get("functional")
        if statements:
            yield from _read([statements] if isinstance(statements, str) else list(statements))
        else:
            inputs, outputs = list(truth.get("inputs", [])), list(truth.get("outputs", []))
            if len(inputs) != len(outputs):
                raise ValueError(f"code: the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
            for given, expected in zip(inputs, outputs, strict=True):
                yield _pair(given, expected, truth.get("fn_name"))
    elif isinstance(truth, list):
        for item in truth:
            if not isinstance(item, dict):
                yield Assertions(str(item))
            elif "inputs" in item:
                yield from _read(item)
            else:
                is_call = item.get("testtype") == "functional"
                name = item.get("fn_name") or (item.get("metadata") or {}).get("func_name") if is_call else None
                yield _pair(item.get("input", ""), item.get("output", ""), name)


def _pair(given: Any, expected: Any, name: str | None) -> Test:
    if not name:
        return Dialogue(_text(given), _text(expected))
    if not name.isidentifier():
        raise ValueError(f"code: fn_name={name!r} is not the name of a function")
    # in text form every line is one argument
    arguments = [json.loads(line) for line in given.splitlines() if line] if isinstance(given, str) else list(given)
    expected = json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
    return Assertions(
        _CALL.format(name=name, arguments=json.dumps(arguments), expected=json.dumps(expected), tolerance=_TOLERANCE)
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _from_json(truth: Any) -> Any:
    """`truth`, or what it says in JSON; arrays as lists."""
    if isinstance(truth, str):
        try:
            parsed = json.loads(truth)
        except ValueError:
            return truth
        return parsed if isinstance(parsed, dict | list) else truth
    return truth.tolist() if hasattr(truth, "tolist") else truth
