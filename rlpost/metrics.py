"""Numbers that a step reports: a value with its weight, so that a mean over ranks is the mean over what was counted."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Reduce(StrEnum):
    """How two readings of the same metric combine."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(slots=True, frozen=True)
class Metric:
    """One reading. `weight` is what a mean is taken over (tokens, sequences, calls); other reductions ignore it."""

    value: float
    weight: float = 1.0
    reduce: Reduce = Reduce.MEAN

    def __add__(self, other: "Metric") -> "Metric":
        if self.reduce != other.reduce:
            raise ValueError(f"metric reduced as {self.reduce} meets one reduced as {other.reduce}")
        match self.reduce:
            case Reduce.SUM:
                return Metric(self.value + other.value, 1.0, self.reduce)
            case Reduce.MAX:
                return Metric(max(self.value, other.value), 1.0, self.reduce)
            case Reduce.MIN:
                return Metric(min(self.value, other.value), 1.0, self.reduce)
        weight = self.weight + other.weight
        if weight == 0:
            return self
        return Metric((self.value * self.weight + other.value * other.weight) / weight, weight)


Metrics = dict[str, Metric]


def mean(values: Sequence[float]) -> Metric:
    """Their mean, weighed by how many there are; of none a reading that weighs nothing."""
    return Metric(sum(values) / max(1, len(values)), len(values))


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Combine readings from micro-batches, mini-batches or ranks, name by name. Zero-weight means drop out."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


def scalars(metrics: Metrics) -> dict[str, float]:
    """Plain floats for the trackers; a mean over nothing (weight 0) is left out rather than shown as 0."""
    return {k: m.value for k, m in metrics.items() if m.reduce is not Reduce.MEAN or m.weight > 0}


class Timers:
    """Wall time of named phases of one step, in seconds: `with timers("generate"): ...`; read with `pop()`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def pop(self) -> Metrics:
        """`timing_s/<phase>` for every phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return {f"timing_s/{phase}": Metric(seconds, reduce=Reduce.SUM) for phase, seconds in taken.items()}
