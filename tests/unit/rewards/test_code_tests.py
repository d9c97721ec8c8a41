"""The reward for code: forms of tests, what counts as passed, and programs that try to pass without being right."""

import json
import textwrap
from typing import Any

import numpy as np
import pytest

from rlpost.rewards.base import Answer, Reward
from rlpost.rewards.code_tests import Assertions, Dialogue, code, extract, read_tests, same_text
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.rewards.limits import MIB, CallLimits, Sandbox
from rlpost.rewards.sandbox import jail
from rlpost.rewards.scorer import RewardScorer
from rlpost.trajectory import Prompt

MISSING = jail._probe(Sandbox.FULL)
SANDBOX = Sandbox.LIMITS if MISSING else Sandbox.FULL  # what is judged outside of the program holds in both
LIMITS = CallLimits(timeout_s=20.0, memory_bytes=512 * MIB, max_output_bytes=MIB, sandbox=SANDBOX)
ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\ncheck(f)"
METHOD = "class Solution:\n    def f(self, a: List[int]): return tuple(a)"
PLUS = ["assert f(1, 2) == 3", "assert f(3, 4) == 7"]


def score(source: str, truth: Any, limits: CallLimits = LIMITS, **kwargs: Any) -> Reward:
    prompt = Prompt(id="x/0/0", index=0, token_ids=np.array([1]), text="q", data_source="d", ground_truth=truth)
    answer = Answer(text=f"So:\n```python\n{textwrap.dedent(source)}\n```\nDone.", token_ids=[1])
    (reward,) = code(prompt, [answer], call_limits=limits, **kwargs)
    return reward


def passed(source: str, truth: Any, **kwargs: Any) -> float:
    return score(source, truth, **kwargs).value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nfirst\n```\nbetter:\n```python\nlast\n```", "last\n"),
        ("```python\nmine\n```\nIt prints\n```\n7\n```", "mine\n"),
        ("```\nplain\n```", "plain\n"),
        ("```py\nshort\n```", "short\n"),
        ("```cpp\nint x;\n```", None),
        ("no code", None),
        ("```python\ncut off", None),
    ],
)
def test_program_is_the_last_python_block(text: str, expected: str | None) -> None:
    assert extract(text) == expected


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3", "3\n", True),
        ("1 2 \n3\n\n", "1  2\n3", True),
        ("0.3333333333", "0.33333333", True),
        ("2.0", "2", True),
        ("YES", "yes", False),
        ("1 2", "1\n2", False),
        ("1000000", "1000001", False),
        ("nan.", "x.y", False),
        ("", "", True),
    ],
)
def test_output_is_compared_by_words(printed: str, expected: str, same: bool) -> None:
    assert same_text(printed, expected) is same


@pytest.mark.parametrize("as_text", [False, True])
def test_tests_are_read_in_every_form(as_text: bool) -> None:
    def read(truth: Any) -> list:
        return list(read_tests(json.dumps(truth) if as_text else truth))

    assert read(ADD) == [Dialogue("1 2\n", "3\n"), Dialogue("3 4\n", "7")]
    assert read({"inputs": [["1", "2"]], "outputs": [["3"]]}) == [Dialogue("1\n2", "3")]
    assert read(PLUS) == read({"assert_case": PLUS}) == [Assertions(test) for test in PLUS]
    assert read({"functional": "check(f)"}) == [Assertions("check(f)")]
    assert read([{"input": "1", "output": "2", "testtype": "stdin"}]) == [Dialogue("1", "2")]
    assert list(read_tests("assert f(1) == 2")) == [Assertions("assert f(1) == 2")]
    assert list(read_tests(np.array(PLUS))) == [Assertions(test) for test in PLUS]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "holds no tests"),
        ([], "holds no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "a.b"}, "fn_name='a.b' is not the name"),
    ],
)
def test_ground_truth_without_tests_is_an_error(truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score("pass", truth)


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        ("print(sum(map(int, input().split())))", ADD),
        ("def f(a, b): return a + b", PLUS),
        ("def f(a, b): return a + b", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}),
        (METHOD, {"inputs": ["[1, 2]"], "outputs": ["[1, 2]"], "fn_name": "f"}),
        ("def f(x): return {1: x / 3}", {"inputs": [[1]], "outputs": [{"1": 0.33333333}], "fn_name": "f"}),
        ("def f(a, b): return a + b", {"functional": CHECK}),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and {1} == {1}"),
        ("def f(x): return {(1, b'x'): {2, 3}, 'z': 1j, None: frozenset()}", "assert f(1)[1, b'x'] == {2, 3}"),
        (
            "class Stack:\n    def __init__(self): self.held = []\n    def push(self, x): self.held.append(x)\n"
            "    def size(self): return len(self.held)",
            "s = Stack()\ns.push(10**5000)\nassert s.size() == len(s.held) == 1",
        ),
        (
            "def f(a, b): return a + b",
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1, 2), 3)\n"
            "unittest.main()",
        ),
        ("def pow(a): return a", {"inputs": [[5]], "outputs": [5], "fn_name": "pow"}),
        ("import numpy\ndef f(n): return numpy.arange(n)", "assert f(3) == [0, 1, 2]"),
    ],
)  # fmt: skip
def test_right_program_passes(source: str, truth: Any) -> None:
    assert score(source, truth) == Reward(value=1.0, parts={"passed": 1.0, "timed_out": 0.0})


def test_value_is_all_or_nothing_or_the_share_of_tests() -> None:
    wrong = "def f(a, b): return 3"
    assert score(wrong, PLUS).value == 0.0
    assert score(wrong, PLUS[::-1], partial=True) == Reward(value=0.5, parts={"passed": 0.5, "timed_out": 0.0})
    assert passed("print(3)", ADD, partial=True) == 0.5


@pytest.mark.parametrize(
    "source",
    [
        "print(3); raise SystemExit(1)",
        "print(3); 1 / 0",
        "print('3\\n7')",
        "def broken(:",
        "held = bytearray(2**30); print(3)",
        "while True: print(3)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; print(3, flush=True); os.abort()",
    ],
)
def test_program_at_fault_fails_and_is_no_error(source: str) -> None:
    assert score(source, {"inputs": [""], "outputs": ["3"]}).value == 0.0


def test_answer_without_a_program_is_worth_nothing() -> None:
    prompt = Prompt(id="x", index=0, token_ids=np.array([1]), text="q", data_source="d", ground_truth=ADD)
    assert code(prompt, [Answer(text="7", token_ids=[1])], call_limits=LIMITS)[0].value == 0.0


def test_slow_program_fails_within_the_calls_own_time() -> None:
    """Or the pool would end the call, and an answer that hangs would be left out of training rather than wrong."""
    limits = CallLimits(timeout_s=2.0, sandbox=SANDBOX)
    slow = score(
        "while True: pass", {"inputs": [""] * 9, "outputs": [""] * 9}, limits, partial=True, test_timeout_s=1.0
    )
    assert slow == Reward(value=0.0, parts={"passed": 0.0, "timed_out": 1.0})
    hang = score("def f(a, b):\n    while True: pass", PLUS, CallLimits(timeout_s=1.0, sandbox=SANDBOX))
    assert hang == Reward(value=0.0, parts={"passed": 0.0, "timed_out": 1.0})


FORGERIES = {
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "exit in the call": "import os\ndef f(*_): os._exit(0)",
    "SystemExit in the call": "def f(*_): raise SystemExit(0)",
    "printing": "print('passed'); print('{}'); print('OK')",
    "equals anything": """
        class Any:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = None
        def f(*_): return Any()
        """,
    "int that equals anything": """
        class Any(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 0
        def f(*_): return Any(9)
        """,
    "builtins": """
        import builtins
        def f(*_): return 9
        for name in ("compile", "exec", "isinstance", "all", "len", "AssertionError", "Exception"):
            setattr(builtins, name, lambda *a, **k: True)
        """,
    "names of the tests": """
        f = same = abs = list = check = lambda *_: True
        math = json = function = expected = result = 9
        def __eq__(*_): return True
        """,
    "modules of the protocol": """
        import json, sys, os
        os.write(1, b"{}")
        for fd in range(3, 64):
            try: os.write(fd, b'{}\\n{"value": {}}\\n{"value": true}\\n')
            except OSError: pass
        def f(*_): return 9
        """,
    "stack and memory": """
        import gc, sys
        def f(*_):
            frame = sys._getframe()
            while frame:
                for value in frame.f_locals.values():
                    if "7" in str(value) or "assert" in str(value):
                        return value
                frame = frame.f_back
            return [o for o in gc.get_objects() if isinstance(o, dict) and "expected" in o]
        """,
    "StopIteration": "def f(*_): raise StopIteration",
    "handlers and atexit": """
        import atexit, os, signal, sys
        atexit.register(os._exit, 0)
        sys.excepthook = lambda *_: os._exit(0)
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU): signal.signal(number, lambda *_: os._exit(0))
        raise AssertionError
        """,
    "tracing": """
        import sys, threading
        sys.settrace(lambda *_: None); sys.setprofile(lambda *_: None)
        def f(*_): return 9
        """,
    "deep value": "def f(*_):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "endless value": "def f(*_):\n    x = []\n    x.append(x)\n    return x",
}
CHECKS: dict[str, Any] = {
    "asserts": PLUS,
    "all in a loop": "assert all(map(lambda case: f(*case[0]) == case[1], [((1, 2), 3), ((3, 4), 7)]))",
    "call": {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "f"},
    "check": {"functional": CHECK},
    "dialogue": ADD,
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_verdict_cannot_be_forged(forgery: str, check: str) -> None:
    limits = CallLimits(timeout_s=8.0, memory_bytes=512 * MIB, max_output_bytes=MIB, sandbox=SANDBOX)
    assert score(FORGERIES[forgery], CHECKS[check], limits).parts["passed"] == 0.0


@pytest.mark.skipif(bool(MISSING), reason=f"no sandbox on this host: {MISSING}")
def test_expected_values_are_not_within_reach_of_the_program() -> None:
    """Neither in its files and arguments nor in anything its interpreter holds."""
    search = """
        import gc, glob, os, sys
        texts = [repr(sys.argv), repr(dict(os.environ)), *[o for o in gc.get_objects() if isinstance(o, str)]]
        for path in [*glob.glob("**", recursive=True), "/proc/self/cmdline", "../"]:
            try: texts.append(open(path).read().split("# end")[1])
            except (OSError, IndexError): pass
        wanted = "se" + "cret"
        found = [text for text in texts if wanted in text]
        def f(): return found[0] if found else None
        print(f())
        # end"""
    assert passed(search, {"inputs": [""], "outputs": ["secret-value"]}) == 0.0
    assert passed(search, ["assert f() == 'secret-value'"]) == 0.0
    assert passed(search, {"inputs": [""], "outputs": ["None"]}) == 1.0


def test_test_that_cannot_be_split_from_the_program_is_an_error() -> None:
    with pytest.raises(ValueError, match="a test passes a function to the code: only plain values travel"):
        score("def f(g): return g(1)", ["def g(x): return x\nassert f(g) == 1"])


def test_test_that_does_not_test_the_program_is_an_error() -> None:
    """A function called like a builtin is the builtin for statements, which any answer would pass."""
    with pytest.raises(ValueError, match="a test uses nothing that the code defines: 'assert sum"):
        score("def sum(x): return 9", ["assert sum([1, 2]) == 3"])


def test_code_term_runs_in_the_pool_and_is_refused_without_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    terms = {"accuracy": RewardTermConfig(fn="code")}
    prompt = Prompt(id="x", index=0, token_ids=np.array([1]), text="q", data_source="d", ground_truth=ADD)
    right = Answer(text="```python\nprint(sum(map(int, input().split())))\n```", token_ids=[1])
    hanging = Answer(text="```python\nwhile True: pass\n```", token_ids=[1])
    scorer = RewardScorer(RewardConfig(terms=terms, sandbox=str(SANDBOX), timeout_s=4.0), 8)
    try:
        rewards = asyncio.run(scorer.score(prompt, [right, hanging]))
    finally:
        scorer.close()
    assert [(r.value, r.parts["accuracy/timed_out"]) for r in rewards] == [(1.0, 0.0), (0.0, 1.0)]

    monkeypatch.setattr(jail, "_probe", lambda sandbox: "it has no lock")
    with pytest.raises(ValueError, match="reward.sandbox=full: .*it has no lock.*reward.sandbox=limits"):
        RewardScorer(RewardConfig(terms=terms), 8)
    RewardScorer(RewardConfig(terms={"accuracy": RewardTermConfig(fn="exact_match")}), 8)  # needs none
