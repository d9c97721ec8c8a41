"""Prompts and groups in a checkpoint: they come back as they were, and reading them runs no code."""

import datetime
import decimal
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.trainer.objects import Packer, Unpacker, plain, prompts_in, untag
from rlpost.trajectory import Status
from tests.unit.trainer.rollouts import group, prompt

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.decimals(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["__tuple__", "__object__"]), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner, max_size=2)
        | st.sets(st.integers(), max_size=3)
        | st.frozensets(st.text(), max_size=3)
    ),
    max_leaves=8,
)


def same(one, other):
    """Equal, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def through(state):
    """`state` packed, written and read back."""
    with tempfile.TemporaryDirectory() as folder:
        packer = Packer()
        text = json.dumps(state, default=packer.pack)
        packer.write(Path(folder))
        return json.loads(text, object_hook=Unpacker(Path(folder)).put_back)


@settings(max_examples=300)
@given(value=VALUES)
def test_values_of_a_row_come_back_with_their_types(value):
    assert same(json.loads(json.dumps(plain(value)), object_hook=untag), value)


@given(truth=VALUES)
def test_ground_truths_and_further_columns_come_back(truth):
    asked = prompt(3)
    asked.ground_truth, asked.extra_info = truth, {"of": truth}
    (back,) = through([asked])
    assert same(back.ground_truth, truth) and same(back.extra_info, {"of": truth})
    assert (back.id, back.index, back.token_ids.tolist()) == (asked.id, 3, [0, 1])


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros((0, 2)), np.float32(0.1)])
def test_numpy_values_come_back_with_dtype_and_shape(array):
    back = json.loads(json.dumps(plain(array)), object_hook=untag)
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)


def test_groups_come_back_token_by_token():
    first = group(prompt(0), [1.0, 0.0], num_tokens=3, versions=[4, 5, 5])
    second = group(prompt(1), [0.5], Status.REWARD_ERROR, num_tokens=1)
    second.trajectories[0].error, second.trajectories[0].rollout_logprobs[2] = "too slow", np.inf
    second.trajectories[0].reward_parts = {"accuracy": np.float32(0.5)}
    for before, back in zip([first, second], through([first, second]), strict=True):
        assert (back.id, back.index, back.prompt.id) == (before.id, before.index, before.prompt.id)
        for ours, theirs in zip(back.trajectories, before.trajectories, strict=True):
            for column in ("token_ids", "provenance", "rollout_logprobs", "versions", "rewards"):
                mine, other = getattr(ours, column), getattr(theirs, column)
                assert mine.dtype == other.dtype and mine.tolist() == other.tolist() and mine.flags.writeable
            assert (ours.status, ours.sample_id, ours.error) == (theirs.status, theirs.sample_id, theirs.error)
            assert ours.reward_parts == theirs.reward_parts


def test_what_cannot_be_stored_is_named_with_its_place():
    asked = prompt(7)
    asked.ground_truth = {"check": [lambda answer: True]}
    with pytest.raises(ValueError, match="prompt 'd/0/7': ground_truth holds a builtins.function, which a checkpoint"):
        Packer().pack(asked)


def test_a_pickle_in_place_of_the_objects_is_not_run(tmp_path):
    packer = Packer()
    packer.pack(prompt(0))
    packer.write(tmp_path)
    for name in ("objects.json", "columns.safetensors"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"cbuiltins\nexec\n(Vraise SystemExit(9)\ntR.")
        with pytest.raises(Exception) as error:  # each library has its own
            Unpacker(tmp_path)
        assert not isinstance(error.value, SystemExit)
        (tmp_path / name).write_bytes(whole)


def test_prompts_are_found_wherever_they_are():
    asked = [prompt(i) for i in range(4)]
    slots = [(asked[0], 1, None), (asked[1], 2, group(asked[1], [1.0]))]
    found = prompts_in({"slots": slots, "more": {"window": [asked[3]]}, "n": 1})
    assert [p.index for p in found] == [0, 1, 1, 3]


def test_dates_and_decimals_are_what_parquet_brings():
    row = {"when": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "price": decimal.Decimal("1.10")}
    assert json.loads(json.dumps(plain(row)), object_hook=untag) == row
