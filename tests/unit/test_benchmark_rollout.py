"""What the rollout benchmark counts must be right, or its ratios are not."""

import argparse

import numpy as np
import pytest

from benchmarks.rollout_variants import DEFAULT, Workload, parse


def workload(lengths: list[list[int]], split: bool = False) -> Workload:
    return Workload(np.array(lengths), prompt_tokens=4, split=split, seed=1)


def test_steps_are_those_of_slots_that_take_the_next_request_as_they_end():
    assert workload([[5, 5], [5, 5]]).num_steps(4) == 5
    assert workload([[5, 5], [5, 5]]).num_steps(2) == 10
    assert workload([[9, 1], [1, 1]]).num_steps(2) == 9
    assert workload([[9, 1], [1, 1]]).num_steps(1) == 12


def test_whole_and_split_requests_ask_for_the_same_tokens():
    for split in (False, True):
        asked = workload([[5, 5], [5, 5]], split).requests(0, vocab_size=32)
        assert sum(n * length for _, _, n, length in asked) == workload([[5, 5], [5, 5]]).num_tokens == 20
    assert workload([[5, 5]]).prompts(0, 99) != workload([[5, 5]]).prompts(1, 99)


def test_variants_that_one_engine_serves_share_a_start():
    assert parse("bare+seeds").start == parse("bare+logprobs").start == parse("bare").start
    assert len({parse(name).start for name in ("bare", "bare+v1", "bare+seqs64", "pool", "bare+text")}) == 5
    assert all(parse(name).name == name for name in DEFAULT)


def test_numbers_of_a_variant_replace_the_command_lines():
    args = argparse.Namespace(max_num_seqs=1024, replicas=1)
    assert parse("pool+replicas4+seqs256").slots(args) == parse("bare").slots(args) == 1024
    assert parse("pool+replicas2").slots(args) == 2048


@pytest.mark.parametrize("name", ["fast", "bare+quick", "bare+seqs", "pool+replicasmany"])
def test_unknown_variants_are_refused_by_name(name):
    with pytest.raises(ValueError, match="--variants .*none of"):
        parse(name)
