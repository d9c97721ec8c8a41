"""Bins under a token budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.workers.engine.packing import pack, partition

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(50, 120), st.integers(0, 6))
def test_pack_holds_every_sequence_once_within_the_budget(lengths, max_tokens, num_bins):
    bins = pack(lengths, max_tokens, num_bins)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= max_tokens for b in bins)
    assert len(bins) >= num_bins


@given(LENGTHS, st.integers(1, 6))
def test_partition_differs_by_at_most_one_sequence(lengths, num_bins):
    loads = [sum(lengths[i] for i in b) for b in partition(lengths, num_bins)]
    assert len(loads) == num_bins and sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_pack_of_nothing_is_no_bin():
    assert pack([], 10) == []
    assert pack([], 10, num_bins=2) == [[], []]


def test_pack_names_the_key_of_a_sequence_over_the_budget():
    with pytest.raises(ValueError, match="critic.ppo_max_token_len_per_gpu: a sequence of 11 tokens .* raise .* to 11"):
        pack([3, 11], 10, key="critic.ppo_max_token_len_per_gpu")
