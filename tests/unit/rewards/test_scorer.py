import asyncio
import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpost.rewards.base import Answer, Reward, RewardError
from rlpost.rewards.config import OverlongBufferConfig, RewardConfig, RewardTermConfig
from rlpost.rewards.scorer import RewardScorer, Scored, check_rewards
from rlpost.trajectory import Prompt

FUNCTIONS = '''
import asyncio, os, time
from rlpost.rewards.base import Reward, RewardError

def misbehave(prompt, answers):
    """Does to the process what the answers say."""
    for answer in answers:
        if answer.text == "hang":
            time.sleep(60)
        if answer.text == "crash":
            os._exit(3)
        if answer.text == "raise":
            raise LookupError("no such thing")
    return [float("nan") if a.text == "nan" else float(len(a.text)) for a in answers]

def too_few(prompt, answers):
    return [1.0] * (len(answers) - 1)

def where(prompt, answers):
    return [float(os.getpid()) for _ in answers]

def ranked(prompt, answers, *, scale=1.0):
    """Sees the whole group."""
    longest = max(len(a.text) for a in answers)
    return [Reward(value=scale * len(a.text) / longest, parts={"length": len(a.text)}) for a in answers]

async def slow(prompt, answers):
    await asyncio.sleep(60)

async def asynchronous(prompt, answers):
    await asyncio.sleep(0)
    return [RewardError("judge refused") if a.text == "bad" else 2 for a in answers]

def needs_model(prompt, answers, *, reward_model):
    return [0.0 for _ in answers]

not_a_function = 3
'''
PROMPT = Prompt(id="x/0/0", index=0, token_ids=np.array([1]), text="q", data_source="d", ground_truth="7")


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def score() -> Iterator[Any]:
    """`score(texts, terms, **config)`: one group scored by a scorer of its own."""
    made: list[RewardScorer] = []

    def run(texts: list[str], terms: dict[str, Any], max_response_length: int = 8, **config: Any) -> list[Scored]:
        scorer = RewardScorer(RewardConfig(terms=as_terms(terms), **config), max_response_length)
        made.append(scorer)
        return asyncio.run(scorer.score(PROMPT, [Answer(text=text, token_ids=list(text.encode())) for text in texts]))

    yield run
    for scorer in made:
        scorer.close()


def as_terms(terms: dict[str, Any]) -> dict[str, RewardTermConfig]:
    return {key: RewardTermConfig(**({"fn": term} if isinstance(term, str) else term)) for key, term in terms.items()}


def build(terms: dict[str, Any], **config: Any) -> RewardScorer:
    return RewardScorer(RewardConfig(terms=as_terms(terms), **config), 8)


def test_terms_are_weighted_and_parts_are_not(score: Any) -> None:
    terms = {
        "accuracy": {"fn": "number_match", "weight": 2.0},
        "form": {"fn": "my_rewards.ranked", "weight": 0.5, "kwargs": {"scale": 4.0}},
        "watch": {"fn": "exact_match", "weight": 0.0},
    }
    right, wrong = score(["is 7", "88"], terms)
    assert right == Reward(value=4.0, parts={"accuracy": 1.0, "form": 4.0, "form/length": 4.0, "watch": 0.0})
    assert wrong == Reward(value=1.0, parts={"accuracy": 0.0, "form": 2.0, "form/length": 2.0, "watch": 0.0})


def test_overlong_punishment_is_added_and_reported(score: Any) -> None:
    overlong = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0)
    rewards = score(["7777", "777777", "77777777"], {"accuracy": "exact_match"}, overlong_buffer=overlong)
    assert [(r.value, r.parts["overlong"]) for r in rewards] == [(0.0, 0.0), (-1.0, -1.0), (-2.0, -2.0)]


def test_overlong_buffer_defaults_to_a_quarter_of_the_limit(score: Any) -> None:
    rewards = score(["7" * 6, "7" * 7], {"accuracy": "exact_match"}, overlong_buffer=OverlongBufferConfig(enable=True))
    assert [r.parts["overlong"] for r in rewards] == [0.0, -0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hang", "timed out: the call took more than 1 s"),
        ("crash", r"its process died during the call \(exit status 3\)"),
        ("raise", "LookupError: no such thing"),
        ("nan", "its value is nan"),
    ],
)
def test_failure_is_an_error_of_its_answer_alone(score: Any, text: str, message: str) -> None:
    terms = {"mine": {"fn": "my_rewards.misbehave", "per_answer": True}, "accuracy": "exact_match"}
    before, failed, after = score(["a", text, "bb"], terms, timeout_s=1.0)
    assert (before.value, after.value) == (1.0, 2.0)
    with pytest.raises(RewardError, match=r"reward term 'mine' \(my_rewards.misbehave\): " + message):
        raise failed


def test_failure_of_a_group_call_is_an_error_of_the_group_and_not_of_the_next() -> None:
    scorer = build({"mine": "my_rewards.misbehave"}, timeout_s=1.0)
    try:
        hanging = [Answer(text=text, token_ids=[1]) for text in ("a", "hang")]
        assert all(isinstance(item, RewardError) for item in asyncio.run(scorer.score(PROMPT, hanging)))
        assert asyncio.run(scorer.score(PROMPT, hanging[:1])) == [Reward(value=1.0, parts={"mine": 1.0})]
    finally:
        scorer.close()


def test_wrong_length_is_an_error_of_every_answer(score: Any) -> None:
    for item in score(["a", "b"], {"mine": "my_rewards.too_few"}):
        assert isinstance(item, RewardError) and "returned 1 rewards for 2 answers" in str(item)


def test_async_function_times_out_and_may_fail_single_answers(score: Any) -> None:
    for item in score(["a", "b"], {"mine": "my_rewards.slow"}, timeout_s=0.1):
        assert isinstance(item, RewardError) and "timed out: the call took more than 0.1 s" in str(item)
    fine, failed = score(["a", "bad"], {"mine": "my_rewards.asynchronous"})
    assert fine.value == 2.0
    assert str(failed) == "reward term 'mine' (my_rewards.asynchronous): judge refused"


def test_user_function_runs_in_another_process_and_quick_terms_here(score: Any) -> None:
    (reward,) = score(["a"], {"mine": "my_rewards.where"})
    assert reward.value != os.getpid()
    assert build({"accuracy": "exact_match"})._pool is None


def test_catastrophic_pattern_is_an_error(score: Any) -> None:
    terms = {"form": {"fn": "format", "kwargs": {"pattern": "(a+)+b"}}}
    (item,) = score(["a" * 40], terms, timeout_s=1.0)
    assert isinstance(item, RewardError) and "timed out" in str(item)


def test_math_answer_that_explodes_costs_only_itself(score: Any) -> None:
    pytest.importorskip("math_verify")
    explodes, right = score([r"\boxed{9^{9^{9^9}}}", r"\boxed{7}"], {"accuracy": "math_answer"}, timeout_s=2.0)
    assert isinstance(explodes, RewardError) and "timed out" in str(explodes)
    assert right == Reward(value=1.0, parts={"accuracy": 1.0})


def test_empty_group_has_no_rewards(score: Any) -> None:
    assert score([], {"accuracy": "exact_match", "other": "number_match"}) == []


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1, True], [1.0, 1.0]),
        (np.array([0.5, 1.0], dtype=np.float32), [0.5, 1.0]),
        ((np.float32(0.5), np.bool_(True)), [0.5, 1.0]),
        ([math.inf, 1.0], ["its value is inf", 1.0]),
        ([None, "1"], ["its value is a NoneType, expected a number", "its value is a str, expected a number"]),
        ([Reward(value=1.0, parts={"a": math.nan}), 1.0], ["part 'a' is nan", 1.0]),
    ],
)
def test_check_rewards_accepts_numbers_and_names_the_rest(result: Any, expected: list) -> None:
    checked = check_rewards(result, 2)
    assert [str(item) if isinstance(item, RewardError) else item.value for item in checked] == expected


@pytest.mark.parametrize("result", [None, "ab", {"a": 1}, 1.0])
def test_check_rewards_refuses_what_is_no_list(result: Any) -> None:
    with pytest.raises(RewardError, match="returned a .*, expected a list of 2 rewards"):
        check_rewards(result, 2)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({}, "reward.terms is empty"),
        ({"a": "number_macth"}, r"reward.terms.a.fn=number_macth: no such reward term; did you mean 'number_match'"),
        ({"a": "my_rewards.rankd"}, r"reward.terms.a.fn=my_rewards.rankd: .* has no 'rankd'; did you mean 'ranked'"),
        ({"a": "my_rewards.not_a_function"}, r"reward.terms.a.fn=my_rewards.not_a_function: not a function"),
        ({"a": "no_such.module"}, r"reward.terms.a.fn=no_such.module: module 'no_such' does not import"),
        (
            {"a": {"fn": "exact_match", "kwargs": {"first_lin": True}}},
            r"reward.terms.a.kwargs.first_lin: 'exact_match' takes no such keyword; did you mean 'first_line'",
        ),
        ({"a": "format"}, r"reward.terms.a.fn=format cannot be called .*'pattern'"),
        ({"a": "reward_model"}, r"reward.terms.a.fn=reward_model asks a reward model, but none is served"),
        (
            {"a": {"fn": "verl", "kwargs": {"path": "mine/reward.py"}}},
            r"reward.terms.a.kwargs.path=mine/reward.py: .* not a file: write .*=reward.my_function",
        ),
        ({"a": {"fn": "verl", "kwargs": {"path": "math.pi"}}}, "reward.terms.a.kwargs.path=math.pi: not a function"),
    ],
)
def test_term_that_cannot_run_is_refused_when_built(terms: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(terms)


def test_reward_model_is_given_to_the_async_term_that_asks_for_it() -> None:
    asked: list = []

    async def served(texts: list) -> list[float]:
        asked.extend(texts)
        return [float(len(text)) for text in texts]

    scorer = RewardScorer(RewardConfig(terms=as_terms({"rm": "reward_model"})), 8, reward_model=served)
    rewards = asyncio.run(scorer.score(PROMPT, [Answer(text="abc", token_ids=[1])]))
    assert (rewards, asked) == ([Reward(value=4.0, parts={"rm": 4.0})], ["qabc"])
    with pytest.raises(ValueError, match="takes a 'reward_model' and so must be async"):
        RewardScorer(RewardConfig(terms=as_terms({"rm": "my_rewards.needs_model"})), 8, reward_model=served)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else found(name))
    with pytest.raises(ValueError, match=r"needs the package 'math_verify': pip install 'rlpost\[rewards\]'"):
        build({"accuracy": "math_answer"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardConfig(timeout_s=0), "reward.timeout_s=0: must be > 0"),
        (lambda: RewardConfig(num_processes=0), "reward.num_processes=0"),
        (lambda: RewardConfig(max_error_rate=2), "reward.max_error_rate=2"),
        (lambda: RewardConfig(terms=as_terms({"overlong": "length"})), "reward.terms.overlong: a term may not be"),
        (lambda: RewardTermConfig(fn="x", weight=math.inf), "weight=inf: must be finite"),
        (lambda: OverlongBufferConfig(len=0), "reward.overlong_buffer.len=0"),
        (lambda: OverlongBufferConfig(penalty_factor=-1.0), "reward.overlong_buffer.penalty_factor=-1"),
        (lambda: build({"a": "exact_match"}, overlong_buffer=OverlongBufferConfig(enable=True, len=9)), "exceeds"),
    ],
)
def test_config_refuses_what_makes_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
