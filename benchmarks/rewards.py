"""Rewards scored a second, by kind of reward and number of reward processes.

    python -m benchmarks.rewards [--processes 1 2] [--answers 256] [--n 8] [--tokens 512] [--out DIR]

`RewardScorer` as a workflow worker uses it: all groups of `n` answers are asked for at once. `code` runs the model's
programs in the sandbox, with two tests each; `custom` is a function of the user's that does nothing. `loop busy` is
the share of the time in which the worker's own event loop could do nothing else.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import write
from rlpost.rewards.base import Answer, Reward
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.rewards.scorer import RewardScorer
from rlpost.trajectory import Prompt

WORDS = "Let me think about this step by step, since the sum of both is needed. "
PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TESTS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
KINDS: dict[str, tuple[str, Any, str]] = {  # reward function, ground truth, end of the answer
    "number": ("number_match", "42", "#### 42"),
    "math": ("math_answer", "\\frac{1}{2}", "The answer is $\\boxed{\\frac{2}{4}}$."),
    "code": ("code", TESTS, PROGRAM),
    "custom": ("benchmarks.rewards.nothing", None, ""),
    "custom, async": ("benchmarks.rewards.nothing_async", None, ""),
}


def nothing(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    """The cost of a call alone."""
    return [1.0] * len(answers)


async def nothing_async(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    """The same on the event loop."""
    return [1.0] * len(answers)


def groups(kind: str, num_answers: int, n: int, num_tokens: int) -> list[tuple[Prompt, list[Answer]]]:
    """Right answers of `num_tokens` tokens of four characters."""
    _, truth, end = KINDS[kind]
    text = (WORDS * (4 * num_tokens // len(WORDS) + 1))[: 4 * num_tokens] + "\n" + end
    answer = Answer(text=text, token_ids=list(range(num_tokens)))
    return [
        (
            Prompt(
                id=f"p/0/{i}", index=i, token_ids=np.ones(8, np.int64), text="?", data_source="p", ground_truth=truth
            ),
            [answer] * n,
        )
        for i in range(num_answers // n)
    ]


async def measure(kind: str, num_processes: int, num_answers: int, n: int, num_tokens: int) -> dict[str, Any]:
    """A row of the table.

    Raises:
        RuntimeError: an answer was not scored as right.
    """
    terms = {"accuracy": RewardTermConfig(fn=KINDS[kind][0])}
    scorer = RewardScorer(RewardConfig(terms=terms, num_processes=num_processes, timeout_s=600.0), num_tokens)
    try:
        asked = groups(kind, num_answers, n, num_tokens)
        warm = asked[:1] * (2 * num_processes)
        await asyncio.gather(*(scorer.score(*group) for group in warm))  # processes start and import
        start, busy = time.perf_counter(), time.thread_time()
        scored = await asyncio.gather(*(scorer.score(*group) for group in asked))
        wall_s, busy_s = time.perf_counter() - start, time.thread_time() - busy
    finally:
        scorer.close()
    for one in (reward for group in scored for reward in group):
        if not isinstance(one, Reward) or one.value != 1.0:
            raise RuntimeError(f"{kind}: {one!r}, expected a reward of 1")
    total = sum(len(group) for group in scored)
    return {
        "reward": kind,
        "processes": num_processes,
        "answers": total,
        "answers/s": total / wall_s,
        "ms an answer": 1e3 * wall_s / total,
        "loop busy": f"{busy_s / wall_s:.0%}",
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="reward.num_processes")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--answers", type=int, default=256, help="of each kind")
    parser.add_argument("--n", type=int, default=8, help="answers a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--out", type=Path, help="folder for rewards.json and rewards.md")
    return parser.parse_args()


def main() -> None:
    """Measure every kind with every number of processes."""
    args = _parse()
    rows = [
        asyncio.run(measure(kind, processes, args.answers, args.n, args.tokens))
        for kind in args.kinds
        for processes in args.processes
    ]
    write(args.out, "rewards", rows, f"answers of {args.tokens} tokens, {args.n} a prompt")


if __name__ == "__main__":
    main()
