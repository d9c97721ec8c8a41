"""Every way in which a reward can fail, through the real pool: a kind of its own, and no harm to the next call."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlpost.rewards.base import Answer, Reward, RewardError
from rlpost.rewards.child import _kind
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.rewards.limits import ErrorKind, Sandbox
from rlpost.rewards.sandbox.jail import SandboxError
from rlpost.rewards.scorer import RewardScorer
from rlpost.trajectory import Prompt

FUNCTIONS = '''
import ctypes, os, sys, time
held = []

def misbehave(prompt, answers):
    """Does what the answer says."""
    (answer,) = answers
    return ACTS[answer.text]()

def flood():
    while True:
        print("x" * 1000)

def flood_err():
    while True:
        os.write(2, b"x" * 1000)

def hoard():
    while True:
        held.append(bytearray(2**22))

def closed():
    os.closerange(0, 100)
    return [1.0]

class Odd:
    pass

ACTS = {
    "fine": lambda: print("a word") or [1.0],
    "hang": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "closed": closed,
    "raise": lambda: [1 / 0],
    "sys.exit": lambda: sys.exit(0),
    "recursion": lambda: ACTS["recursion"](),
    "hoard": hoard,
    "large": lambda: bytearray(2**32),
    "flood": flood,
    "flood_err": flood_err,
    "huge result": lambda: [b"x" * 2**23],
    "endless": lambda: (1.0 for _ in iter(int, 1)),
    "nan": lambda: [float("nan")],
    "infinite": lambda: [-float("inf")],
    "none": lambda: None,
    "text": lambda: ["1.0"],
    "two": lambda: [1.0, 1.0],
}
'''
PROMPT = Prompt(id="x/0/0", index=0, token_ids=np.array([1]), text="q", data_source="d", ground_truth="7")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardScorer]:
    folder: Path = tmp_path_factory.mktemp("rewards")
    (folder / "unruly_rewards.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        terms = {"mine": RewardTermConfig(fn="unruly_rewards.misbehave", per_answer=True)}
        scorer = RewardScorer(RewardConfig(terms=terms, timeout_s=3.0, memory_limit_mb=200, max_output_mb=4), 8)
        yield scorer
        scorer.close()


def score(scorer: RewardScorer, text: str) -> Reward | RewardError:
    (scored,) = asyncio.run(scorer.score(PROMPT, [Answer(text=text, token_ids=[1])]))
    return scored


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("hang", ErrorKind.TIMEOUT, "took more than 3 s"),
        ("exit", ErrorKind.CRASH, "exit status 3"),
        ("segfault", ErrorKind.CRASH, "signal SIGSEGV"),
        ("closed", ErrorKind.CRASH, "its process died"),
        ("raise", ErrorKind.EXCEPTION, "ZeroDivisionError"),
        ("sys.exit", ErrorKind.EXCEPTION, "SystemExit: 0"),
        ("recursion", ErrorKind.EXCEPTION, "RecursionError"),
        ("hoard", ErrorKind.MEMORY, "MemoryError.*reward.memory_limit_mb allows 200 MiB"),
        ("large", ErrorKind.MEMORY, "MemoryError"),
        ("flood", ErrorKind.OUTPUT, "the call printed more than 4194304 bytes .reward.max_output_mb"),
        ("flood_err", ErrorKind.OUTPUT, "the call printed more than"),
        ("huge result", ErrorKind.OUTPUT, "the call returned more than 4194304 bytes"),
        ("endless", ErrorKind.EXCEPTION, "cannot pickle 'generator'"),
        ("nan", ErrorKind.NOT_FINITE, "its value is nan"),
        ("infinite", ErrorKind.NOT_FINITE, "its value is -inf"),
        ("none", ErrorKind.WRONG_TYPE, "returned a NoneType"),
        ("text", ErrorKind.WRONG_TYPE, "its value is a str"),
        ("two", ErrorKind.WRONG_TYPE, "returned 2 rewards for 1 answers"),
    ],
)
def test_failure_has_its_kind_and_the_next_call_works(
    scorer: RewardScorer, text: str, kind: ErrorKind, message: str
) -> None:
    failed = score(scorer, text)
    assert isinstance(failed, RewardError) and failed.kind is kind
    with pytest.raises(RewardError, match=message):
        raise failed
    assert score(scorer, "fine") == Reward(value=1.0, parts={"mine": 1.0})


def test_what_a_call_prints_is_passed_on(scorer: RewardScorer, capsys: pytest.CaptureFixture) -> None:
    score(scorer, "fine")
    assert capsys.readouterr().err == "a word\n"


def test_memory_that_a_process_holds_already_is_not_the_calls() -> None:
    """torch and its threads map far more than this; it is imported with the prompt's own class."""
    terms = {"form": RewardTermConfig(fn="format", kwargs={"pattern": "a"})}
    scorer = RewardScorer(RewardConfig(terms=terms, memory_limit_mb=32), 8)
    try:
        assert score(scorer, "a") == Reward(value=1.0, parts={"form": 1.0})
    finally:
        scorer.close()


def test_error_keeps_its_kind_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RewardError("why", ErrorKind.CRASH)))
    assert (str(error), error.kind) == ("why", ErrorKind.CRASH)


def test_sandbox_that_fails_is_a_kind_of_its_own() -> None:
    """A function cannot name its kind in any other way."""
    odd = ValueError("x")
    odd.kind = "odd"  # type: ignore[attr-defined]
    assert [_kind(SandboxError("x")), _kind(odd)] == [ErrorKind.SANDBOX, ErrorKind.EXCEPTION]


def test_limits_of_the_config_reach_the_call() -> None:
    limits = RewardConfig(timeout_s=3, memory_limit_mb=None, max_output_mb=1, sandbox="limits").call_limits()
    assert (limits.timeout_s, limits.memory_bytes, limits.max_output_bytes) == (3, None, 2**20)
    assert limits.sandbox is Sandbox.LIMITS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_limit_mb": 0}, "reward.memory_limit_mb=0: must be >= 1"),
        ({"max_output_mb": 0}, "reward.max_output_mb=0: must be >= 1"),
        ({"on_error": "drop"}, "reward.on_error=drop: expected mask, drop_group, stop"),
        ({"sandbox": "none"}, "reward.sandbox=none: expected full, limits"),
        ({"stop_error_rate": 1.5}, "reward.stop_error_rate=1.5"),
    ],
)
def test_config_refuses_what_makes_no_sense(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(**changes)
