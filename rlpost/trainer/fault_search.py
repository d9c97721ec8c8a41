"""Which of several parts are at fault, when all that can be asked is whether a combination of them works. Pure."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

Parts = frozenset[str]


class Verdict(StrEnum):
    """How a search ended."""

    FOUND = "found"  # `keep` works, and with any part at fault added back it did not
    NOT_OURS = "not ours"  # fails with every part off, so none of them is the cause
    GAVE_UP = "gave up"  # the budget is spent: `keep` is the largest combination that was seen to work


@dataclass(slots=True, frozen=True, kw_only=True)
class Result:
    """What a search says: parts to keep on and parts to turn off, after `num_tests` questions."""

    verdict: Verdict
    keep: Parts
    faulty: Parts
    num_tests: int


async def find_faults(
    units: Sequence[Parts],
    works: Callable[[Parts], Awaitable[bool]],
    *,
    budget: int,
    close: Callable[[Parts], Parts] = lambda parts: parts,
) -> Result:
    """Search `units`, which together are known to fail, for those at fault.

    First with everything off. Then, with the parts that are known to work on, a binary search for the shortest prefix
    of the rest that fails: its last unit is at fault and stays off, and the search goes on behind it. A fault among U
    units costs about log2(U) + 1 questions. Where only a pair fails together, the later one is turned off.

    Args:
        units: parts that are turned on and off together, in the order in which they are added.
        works: whether exactly these parts, on, give right results. Never asked twice about the same.
        budget: how often `works` may be asked, at least 1.
        close: of parts that are to be on, those that then really are.
    """
    answers: dict[Parts, bool] = {close(frozenset().union(*units)): False}
    num_tests = 0

    async def ask(parts: Parts) -> bool:
        nonlocal num_tests
        parts = close(parts)
        if parts not in answers:
            if num_tests == budget:
                raise _BudgetSpent
            num_tests += 1
            answers[parts] = await works(parts)
        return answers[parts]

    everything: Parts = frozenset().union(*units)
    good: Parts = frozenset()
    rest = list(units)
    try:
        if not await ask(good):
            return Result(verdict=Verdict.NOT_OURS, keep=close(everything), faulty=frozenset(), num_tests=num_tests)
        while rest and not await ask(good.union(*rest)):
            low, high = 0, len(rest)  # the first `low` of the rest work, the first `high` fail
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if await ask(good.union(*rest[:middle])) else (low, middle)
            good, rest = good.union(*rest[:low]), rest[high:]
        good = good.union(*rest)
        verdict = Verdict.FOUND
    except _BudgetSpent:
        good = max((parts for parts, worked in answers.items() if worked), key=len, default=frozenset())
        verdict = Verdict.GAVE_UP
    keep = close(good)
    return Result(verdict=verdict, keep=keep, faulty=everything - keep, num_tests=num_tests)


class _BudgetSpent(Exception):
    pass
