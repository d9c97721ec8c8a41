"""How long answers are: drawn from a distribution, or recorded ones drawn again."""

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from rlpost.tools.simulation.scenario import Scenario

Z99 = NormalDist().inv_cdf(0.99)
MAX_TAIL = math.floor(100 * math.exp(Z99**2 / 2)) / 100  # of a log-normal; rounded down, as messages say it
QUANTILES = 1000


class Lengths(Protocol):
    """Sampled tokens of the answers to one prompt."""

    def __call__(self, index: int, n: int) -> np.ndarray:
        """int64 `[n]` >= 1, always the same for the prompt number `index`."""


class LogNormal:
    """Log-normal lengths, cut at a limit, with a mean that may grow from prompt to prompt.

    With p99 / mean = r of the uncut distribution, ln r = z sigma - sigma^2 / 2 where z is the normal's 99th percentile:
    sigma = z - sqrt(z^2 - 2 ln r).

    Args:
        mean: after the cut, of the first prompt.
        tail: r.
        limit: the longest answer.
        grow_to, grow_over: mean of the prompt number `grow_over` and all after it.
        seed: of the run.

    Raises:
        ValueError: an r that no log-normal distribution has, or a mean beyond the limit.
    """

    def __init__(
        self, mean: float, tail: float, limit: int, grow_to: float | None = None, grow_over: int = 1, seed: int = 1
    ):
        if not 1.0 <= tail <= MAX_TAIL:
            raise ValueError(f"tail={tail:g}: a log-normal p99 is between 1 and {MAX_TAIL} times the mean")
        for key, value in (("mean_length", mean), ("grow_to", mean if grow_to is None else grow_to)):
            if not 1 <= value <= limit:
                raise ValueError(f"{key}={value:g}: must be between 1 and max_length={limit}")
        self._sigma = Z99 - math.sqrt(Z99**2 - 2 * math.log(tail))
        self._limit, self._grow_over, self._seed = limit, max(1, grow_over), seed
        self._mu = [solve_mu(value, self._sigma, limit) for value in (mean, mean if grow_to is None else grow_to)]

    def __call__(self, index: int, n: int) -> np.ndarray:
        """See `Lengths`."""
        progress = min(1.0, index / self._grow_over)
        mu = self._mu[0] + progress * (self._mu[1] - self._mu[0])
        drawn = np.exp(mu + self._sigma * np.random.default_rng([self._seed, index]).standard_normal(n))
        return np.clip(np.rint(drawn), 1, self._limit).astype(np.int64)

    @property
    def mean_position(self) -> float:
        """Tokens that an answer to the first prompt has so far, on average over its decoding steps: E[L^2] / 2 E[L]."""
        normal = [NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)]
        lengths = np.minimum(np.exp(self._mu[0] + self._sigma * np.array(normal)), self._limit)
        return float((lengths**2).mean() / lengths.mean() / 2)


def solve_mu(mean: float, sigma: float, limit: int) -> float:
    """The mu with which a log-normal variable, cut at `limit`, has `mean`: by bisection."""
    normal, low, high = NormalDist(), math.log(mean) - sigma**2, math.log(limit) + 4 * sigma + 1

    def cut_mean(mu: float) -> float:
        if sigma == 0:
            return min(math.exp(mu), limit)
        z = (math.log(limit) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * normal.cdf(z - sigma) + limit * (1 - normal.cdf(z))

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return (low + high) / 2


class Recorded:
    """Whole groups of a recorded run, drawn again in random order.

    Args:
        groups: int64 `[answers]` of each group.
        seed: of the run.
    """

    def __init__(self, groups: list[np.ndarray], seed: int = 1):
        self._groups, self._seed = groups, seed

    def __call__(self, index: int, n: int) -> np.ndarray:
        """See `Lengths`. Where a group recorded another number of answers than `n`, they are drawn from it."""
        rng = np.random.default_rng([self._seed, index])
        group = self._groups[rng.integers(len(self._groups))]
        return group if len(group) == n else rng.choice(group, n)

    @property
    def mean(self) -> float:
        """Of all answers."""
        return float(np.concatenate(self._groups).mean())


def read_recorded(folder: Path, seed: int = 1) -> Recorded:
    """Lengths out of `trainer.rollout_data_dir` (`<step>.jsonl`, of whose rows `group` and `num_tokens` are read).

    Raises:
        ValueError: no such files.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for path in sorted(Path(folder).glob("*.jsonl")):
        with open(path) as file:
            for line in file:
                row = json.loads(line)
                if not row.keys() >= {"group", "num_tokens"}:
                    raise ValueError(f"lengths={folder}: {path.name} holds other rows than those of rollouts")
                groups[path.stem, row["group"]].append(max(1, row["num_tokens"]))
    if not groups:
        raise ValueError(f"lengths={folder}: holds no rollouts; runs write them with trainer.rollout_data_dir=FOLDER")
    return Recorded([np.array(group, np.int64) for group in groups.values()], seed)


def lengths_of(scenario: Scenario) -> Lengths:
    """What `scenario` asks for; growth is spread over all its batches."""
    if scenario.lengths is not None:
        return read_recorded(Path(scenario.lengths), scenario.seed)
    return LogNormal(
        scenario.mean_length,
        scenario.tail,
        scenario.max_length,
        scenario.grow_to,
        round(scenario.groups * (scenario.warmup + scenario.batches) / scenario.keep_rate),
        scenario.seed,
    )
