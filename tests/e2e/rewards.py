"""Reward functions of the whole runs, found by their dotted path."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from rlpost.rewards.base import Answer, RewardError
from rlpost.trajectory import Prompt


async def parity(prompt: Prompt, answers: Sequence[Answer], hold: str = "", hold_from: int = 0) -> list[float]:
    """1 where the sum of the token ids is even; async, so that no process has to be started for it.

    Training prompts from the `hold_from`-th on wait for as long as the file `hold` exists, and `hold`.reached says that
    one waits: this stops a run at a known point.
    """
    while _held(prompt, hold, hold_from):
        await asyncio.sleep(0.02)
    return _parity(answers)


def parity_apart(
    prompt: Prompt, answers: Sequence[Answer], hold: str = "", hold_from: int = 0, pause_s: float = 0.0
) -> list[float]:
    """The same in a process of its own, after a pause."""
    time.sleep(pause_s)
    while _held(prompt, hold, hold_from):
        time.sleep(0.02)
    return _parity(answers)


def _parity(answers: Sequence[Answer]) -> list[float]:
    return [float(sum(answer.token_ids) % 2 == 0) for answer in answers]


def _held(prompt: Prompt, hold: str, hold_from: int) -> bool:
    if not hold or prompt.index < hold_from or prompt.id.startswith("val.") or not Path(hold).exists():
        return False
    Path(f"{hold}.reached").touch()
    return True


async def constant(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    """All answers alike: no group has a signal."""
    return [1.0] * len(answers)


async def rare(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    """Only the answers to every eighth prompt differ: few groups have a signal."""
    return [float(i % 2) if prompt.index % 8 == 0 else 1.0 for i in range(len(answers))]


def broken(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    raise RuntimeError("the scorer is out of order")


def nan(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    return [float("nan")] * len(answers)


def fails_at_times(prompt: Prompt, answers: Sequence[Answer], pause_s: float = 0.0) -> list[float | RewardError]:
    """Like `parity_apart`, but the first answer to every fifth prompt cannot be scored: 5 % of 4 answers a prompt."""
    time.sleep(pause_s)
    fails = prompt.index % 5 == 0 and not prompt.id.startswith("val.")
    scores: list[float | RewardError] = list(_parity(answers))
    return [RewardError("out of order"), *scores[1:]] if fails else scores
