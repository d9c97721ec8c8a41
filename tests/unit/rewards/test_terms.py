import json
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpost.rewards.base import REWARDS, Answer
from rlpost.rewards.match import exact_match, final_number, last_boxed, number_match
from rlpost.rewards.shaping import format_match, length, soft_overlong_punishment
from rlpost.trajectory import Prompt

DATA = Path(os.environ.get("RLPOST_DATA", Path(__file__).parents[4] / "shared" / "data"))


def prompt(truth: Any = None, **extra_info: Any) -> Prompt:
    return Prompt(
        id="x/0/0",
        index=0,
        token_ids=np.array([1]),
        text="q",
        data_source="d",
        ground_truth=truth,
        extra_info=extra_info,
    )


def answers(*texts: str) -> list[Answer]:
    return [Answer(text=text, token_ids=list(text.encode())) for text in texts]


def score(name: str, truth: Any, texts: Sequence[str], **kwargs: Any) -> list[float]:
    return list(REWARDS.get(name).fn(prompt(truth), answers(*texts), **kwargs))


def test_registry_knows_the_built_in_terms() -> None:
    assert REWARDS.names() == [
        "code",
        "exact_match",
        "format",
        "length",
        "math_answer",
        "number_match",
        "reasoning_gym",
        "reward_model",
        "verl",
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 72.", "72"),
        ("4 apples\n#### 1,072 apples, 3 baskets", "1072"),
        ("10-2", "2"),
        ("x = -2", "-2"),
        ("\u22125", "-5"),
        ("(3)-2", "2"),
        ("$72.50", "145/2"),
        (".5", "1/2"),
        (r"\boxed{3/4} of 12", "3/4"),
        ("1, 2", "2"),
        ("1/0", "0"),
        ("none", None),
        ("#### none", None),
        ("9" * 300, None),
        ("The answer is -$5", "-5"),
        ("#### - 5", "-5"),
        (r"\boxed{- \$5}", "-5"),
        ("x = - 5", "-5"),
        ("10 - $5", "5"),
        ("eggs - 5", "5"),
        ("So:\n- 4 eggs\n- 5 eggs", "5"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"it is \dfrac{-1}{2}", "-1/2"),
        (r"\boxed{-\frac12}", "-1/2"),
        (r"\boxed{3\frac{1}{2}}", "7/2"),
        (r"\boxed{1{,}072}", "1072"),
        ("1e-05", "1/100000"),
        ("1.5E3 in all", "1500"),
        ("1e99999999", None),
        ("1e" + "9" * 5000, None),
    ],
)
def test_final_number_of_a_text(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("72", "so 72.0", "73"),
        ("72", "#### 72", ""),
        ("72", r"\boxed{72}", r"\boxed{7}"),
        ("1,072", "1072", "72"),
        (r"\frac{3}{4}", r"\boxed{\frac{3}{4}}", r"\boxed{\frac{1}{4}}"),
        ("3/4", r"\boxed{\frac{3}{4}}", r"\boxed{4}"),
        ("-$5", "-5", "5"),
        (1e-05, "0.00001", "5"),
        (2.5, "5/2", "5"),
        (r"50\%", "50%", "5"),
        (r"5.4 \text{ cents}", "5.4", "4"),
        ("12 big eggs", "12", "2"),
        ("3 and 4 are 7\n#### 7", "7", "3"),
    ],
)
def test_number_match_compares_values(truth: Any, right: str, wrong: str) -> None:
    assert score("number_match", truth, [right, wrong]) == [1, 0]


@pytest.mark.parametrize(
    "truth", ["none", "", None, True, r"2\sqrt{3}", "2 or 3", "3x", "2 pi", "3 million", "1/0", "nan"]
)
def test_number_match_refuses_a_truth_that_is_not_one_number(truth: Any) -> None:
    with pytest.raises(ValueError, match="the ground truth '.*' is not one number .* set reward=math"):
        number_match(prompt(truth), answers("3"))


@pytest.mark.parametrize(
    "box, number",
    [
        (r"2\sqrt{3}", None),
        (r"10^2", None),
        (r"7.2 \times 10^1", None),
        (r"x = \sqrt{2}", None),
        (r"3\pi", None),
        (r"x^2 = 9", 9),
        (r"3 \times 4 = 12", 12),
        (r"90^{\circ}", 90),
        (r"12\text{ cm}^2", 12),
        (r"12\mathrm{cm}^{2}", 12),
        (r"\text{12 cm}", 12),
    ],
)
def test_a_box_that_ends_on_an_expression_holds_no_number(box: str, number: int | None) -> None:
    assert final_number(f"The answer 4 is \\boxed{{{box}}}.") == number


def test_number_match_accepts_every_gsm8k_solution() -> None:
    if not (DATA / "gsm8k").exists():
        pytest.skip(f"no gsm8k in {DATA}; set RLPOST_DATA to its folder")
    for line in (DATA / "gsm8k" / "test.jsonl").read_text().splitlines():
        solution = json.loads(line)["answer"]
        truth = solution.rpartition("####")[2].strip().replace(",", "")
        texts = [solution, f"The answer is {truth} dollars.", str(int(truth) + 1)]
        assert score("number_match", truth, texts) == [1, 1, 0], line


def test_exact_match_strips_and_takes_the_first_line_on_demand() -> None:
    assert score("exact_match", "46", [" 46\n", "46\nnext", "460"]) == [1, 0, 0]
    assert score("exact_match", "46", ["\n46 \nnext", "0\n46"], first_line=True) == [1, 0]
    assert score("exact_match", ["Yes", "y"], ["yes", "Y", "no"], ignore_case=True) == [1, 1, 0]
    assert score("exact_match", 46, ["46"]) == [1]
    with pytest.raises(ValueError, match="no ground truth"):
        exact_match(prompt(None), answers("1"))


def test_format_searches_or_matches_all() -> None:
    texts = ["<a>1\n2</a>", "x <a>1</a>", "<a>"]
    assert format_match(prompt(), answers(*texts), pattern="<a>.*</a>") == [1, 1, 0]
    assert format_match(prompt(), answers(*texts), pattern="<a>.*</a>", full=True) == [1, 0, 0]


def test_length_is_linear_between_free_and_max() -> None:
    assert length(prompt(), answers("", "a" * 4, "a" * 6, "a" * 8, "a" * 20), max_length=8, free=4) == [
        0,
        0,
        -0.5,
        -1,
        -1,
    ]
    with pytest.raises(ValueError, match="free=8 must be >= 0 and below max_length=8"):
        length(prompt(), answers("a"), max_length=8, free=8)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (12, 0.0), (13, -0.5), (14, -1.0), (16, -2.0), (17, -2.0)])
def test_soft_overlong_punishment_follows_the_paper(tokens: int, expected: float) -> None:
    assert soft_overlong_punishment(tokens, max_length=16, buffer_len=4, penalty_factor=2.0) == pytest.approx(expected)


def test_last_boxed_balances_braces() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\frac{1}{2}") is None
    assert last_boxed("none") is None


@pytest.mark.parametrize(
    ("truth", "text", "expected"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}", 1),
        (r"\frac{1}{2}", "The answer is $1/2$.", 1),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        (r"we get \boxed{7}", "7", 1),
        ("7", r"\boxed{8}", 0),
        ("5", r"\boxed{3}, no: I forgot two. So it is" "\n" r"\boxed{5}", 1),
        ("3", r"\boxed{3}, no: I forgot two. So it is" "\n" r"\boxed{5}", 0),
        (r"10\%", r"\boxed{10}", 1),
        (r"10\%", r"\boxed{10\%}", 1),
        (r"$10\%$", "it is 10%", 1),
        (r"10\%", r"\boxed{11}", 0),
        ("0.1", r"\boxed{10\%}", 1),
        ("7", "", 0),
    ],
)
def test_math_answer_judges_equivalence(truth: str, text: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert score("math_answer", truth, [text]) == [expected]


def test_math_answer_boxed_only_ignores_the_rest() -> None:
    pytest.importorskip("math_verify")
    assert score("math_answer", "7", ["it is 7", r"\boxed{7}"], boxed_only=True) == [0, 1]
    assert score("math_answer", r"7\%", ["it is $7$", r"\boxed{8} or \boxed{7\%}"], boxed_only=True) == [0, 1]


def test_math_answer_refuses_a_truth_that_is_no_expression() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="the ground truth '' is not a mathematical expression"):
        score("math_answer", "", ["7"])


def test_math_answer_accepts_math500_solutions() -> None:
    pytest.importorskip("math_verify")
    if not (DATA / "math500").exists():
        pytest.skip(f"no math500 in {DATA}; set RLPOST_DATA to its folder")
    for line in (DATA / "math500" / "test.jsonl").read_text().splitlines()[::5]:
        row = json.loads(line)
        assert score("math_answer", row["answer"], [row["solution"]]) == [1], row["answer"]


def test_reasoning_gym_asks_the_task_that_made_the_prompt() -> None:
    pytest.importorskip("reasoning_gym")
    from rlpost.data_sources import read_source

    columns = read_source("reasoning-gym://chain_sum?size=1&seed=3", "data.train_files").rows[0].columns
    asked = prompt(columns["ground_truth"], reasoning_gym=columns["reasoning_gym"])
    truth = columns["ground_truth"]
    texts = [truth, f"Well, <answer>1</answer> no, <answer> {truth} </answer>", f"{truth}1"]
    rewards = REWARDS.get("reasoning_gym").fn(asked, answers(*texts))
    assert rewards[:2] == [1.0, 1.0] and rewards[2] < 1.0
    with pytest.raises(ValueError, match="does not come from a reasoning-gym"):
        REWARDS.get("reasoning_gym").fn(prompt("1"), answers("1"))


def test_verl_function_is_called_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl_style.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
        "    right = float(solution_str == ground_truth)\n"
        "    return {'score': right + bonus, 'acc': right, 'said': solution_str} if bonus else right\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = "verl_style.compute_score"
    assert [r.value for r in score("verl", "7", ["7", "8"], path=path)] == [1.0, 0.0]
    (reward,) = score("verl", "7", ["7"], path=path, bonus=0.5)
    assert (reward.value, reward.parts) == (1.5, {"acc": 1.0})
