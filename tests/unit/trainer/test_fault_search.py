"""The search for parts at fault: right for any faults, never more questions than allowed, none asked twice."""

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st

from rlpost import aiter
from rlpost.trainer.fault_search import Result, Verdict, find_faults

PARTS = [f"p{i}" for i in range(9)]
parts = st.sets(st.sampled_from(PARTS)).map(frozenset)


def search(units, bad, *, budget=100, close=lambda p: p) -> tuple[Result, list[frozenset[str]]]:
    """`bad(parts)`: whether these fail. Returns the result and the questions."""
    asked: list[frozenset[str]] = []

    async def works(on):
        asked.append(on)
        return not bad(on)

    result = asyncio.run(find_faults(units, works, budget=budget, close=close))
    assert len(asked) == len(set(asked)) == result.num_tests <= budget
    assert result.keep | result.faulty == frozenset().union(*units) or result.verdict is Verdict.NOT_OURS
    return result, asked


def single(names):
    return [frozenset([name]) for name in names]


@given(st.integers(1, 9), st.data())
def test_independent_faults_are_found_exactly(num_units, data):
    names = PARTS[:num_units]
    faults = frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1)))
    result, asked = search(single(names), lambda on: on & faults)
    assert (result.verdict, result.faulty) == (Verdict.FOUND, faults)
    assert len(asked) <= 1 + len(faults) * (math.ceil(math.log2(num_units)) + 1)


@given(st.lists(parts.filter(len), min_size=1, max_size=4))
def test_whatever_must_not_be_together_ends_in_a_combination_that_works_and_cannot_grow(conspiracies):
    """Each conspiracy fails once all of its members are on."""

    def bad(on):
        return any(conspiracy <= on for conspiracy in conspiracies)

    result, _ = search(single(PARTS), bad)
    assert result.verdict is Verdict.FOUND and not bad(result.keep)
    for part in result.faulty:
        assert bad(result.keep | {part})


@given(parts, st.integers(1, 12))
def test_any_budget_is_kept_and_what_is_kept_on_was_seen_to_work(faults, budget):
    result, asked = search(single(PARTS), lambda on: on & faults or on == frozenset(PARTS), budget=budget)
    assert not result.keep & faults
    assert result.verdict is Verdict.FOUND or result.keep in asked


def test_fault_that_stays_with_everything_off_is_not_ours_after_one_question():
    result, asked = search(single(PARTS), lambda on: True)
    assert result.verdict is Verdict.NOT_OURS and asked == [frozenset()]


@given(st.sampled_from(sorted(aiter.ENGINES)), st.sets(st.sampled_from(aiter.FAMILIES), min_size=1, max_size=2))
def test_one_or_two_faulty_families_are_found_within_the_default_number_of_restarts(engine, faults):
    result, asked = search(
        aiter.units(engine),
        lambda on: on & faults,
        budget=11,  # rollout.aiter_max_restarts less the last one
        close=lambda on: aiter.closure(engine, on),
    )
    assert result.verdict is Verdict.FOUND and not result.keep & faults and len(asked) <= 8
    if engine == "vllm":
        assert result.faulty == faults
    elif faults & {"rmsnorm", "rope", "linear"}:  # SGLang turns these off only with all the rest
        assert result.keep == frozenset()
    else:
        assert result.faulty == faults
