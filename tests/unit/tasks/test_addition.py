import pytest

from rlpost.tasks.addition import problems


def test_addition_problems_are_right_and_reproducible() -> None:
    rows = problems(digits=2, size=500, seed=1)
    assert rows == problems(digits=2, size=500, seed=1)
    assert rows != problems(digits=2, size=500, seed=2)
    for row in rows:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(left) + int(right) == int(row["ground_truth"])
        assert len(left) == len(right) == 2


def test_addition_held_out_pairs_never_occur_in_training() -> None:
    train = {row["prompt"] for row in problems(digits=2, size=7000, seed=1, split="train")}
    held_out = {row["prompt"] for row in problems(digits=2, size=600, seed=2, split="val")}
    swapped = {"+".join(reversed(text.removesuffix("=").split("+"))) + "=" for text in held_out}
    assert len(train) == 7000 and len(held_out) == 600
    assert not train & (held_out | swapped)


def test_addition_more_problems_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size=101: there are only \d+ train problems of 1 digits"):
        problems(digits=1, size=101)
    with pytest.raises(ValueError, match="split=test: expected train or val"):
        problems(split="test")
