"""Engine and trainer on the same tokens, through a weight sync, a sleep and a planted stale weight."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from rlpost.config import Config
from rlpost.data import PromptStream
from rlpost.platform import platform
from rlpost.trainer.build import Facts, build_algorithm, build_gate, start_processes
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.parity import Parity, ParityError, compare, differences
from rlpost.trainer.source import RolloutSource
from rlpost.trainer.sources import colocated_source, takes_turns

PLANTED_SCALE = 0.8  # of every weight: flattens the distribution, however sure the model is
LOADED, SYNCED, WOKEN, STALE, SYNCED_AGAIN = (
    "as loaded",
    "after a weight sync",
    "after sleep and wake",
    "weights changed, not synced",
    "the change synced",
)
SIZES = [10.0**k for k in range(-7, 1)]  # nats; upper ends of the histogram's bins, the last has none


@dataclass(slots=True, kw_only=True)
class Stage:
    """One comparison.

    Attributes:
        name: what had happened before.
        parity: how far engine and trainer are apart.
        histogram: tokens by the size of their difference, one count for each of `SIZES` and one for what is larger.
        limit: of the mean, nats.
        expected: whether they should agree.
        cause: where they do not, the gate's explanation.
        proven: the gate tried something, and with it they agreed.
    """

    name: str
    parity: Parity
    histogram: list[int]
    limit: float
    expected: bool = True
    cause: str = ""
    proven: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the gate lets this pass; False also where a difference is no number."""
        return self.parity.mean <= self.limit

    @property
    def passed(self) -> bool:
        """Whether the gate did what it should."""
        return self.agrees == self.expected


async def examine(cfg: Config, facts: Facts) -> list[Stage]:
    """Start engine and trainer, take them through every stage, and end them.

    Raises:
        ValueError: nothing was sampled that could be compared.
        Exception: an engine or a trainer that does not start or dies, as in training.
    """
    async with AsyncExitStack() as stack:
        sleeps, on_cpu = takes_turns(cfg), platform().kind == "cpu"
        stream = PromptStream(cfg.data, facts.tokenizer, cfg.seed)
        pool, workers = await start_processes(cfg, facts, 1, sleeps, stack)
        source = colocated_source(cfg, facts.spec, stream, build_algorithm(cfg), pool, workers)
        gate = build_gate(cfg, workers)
        stages = [await compare_once(LOADED, gate, source, 0)]
        await source.publish(1)
        stages.append(await compare_once(SYNCED, gate, source, 1))
        if on_cpu:  # where engines take turns with the trainer, each sample ends with a sleep, the next begins awake
            await pool.sleep()
            await pool.wake()
        if sleeps or on_cpu:
            stages.append(await compare_once(WOKEN, gate, source, 1))
        await workers.call_async("scale_weights", PLANTED_SCALE)
        stages.append(await compare_once(STALE, gate, source, 1, expected=False))
        await source.publish(2)
        stages.append(await compare_once(SYNCED_AGAIN, gate, source, 2))
        return stages


async def compare_once(
    name: str, gate: ParityGate, source: RolloutSource, version: int, expected: bool = True
) -> Stage:
    """Sample under `version`, let the trainer compute the same tokens, and ask the gate."""
    batch = await gate.sample(source)
    parity = compare(batch, version)
    if not parity.num_tokens:
        raise ValueError(f"{name}: no token of weight version {version} was sampled; look at the workflow and the data")
    stage = Stage(
        name=name,
        parity=parity,
        histogram=histogram(differences(batch, version)),
        limit=gate.limit,
        expected=expected,
    )
    try:
        await gate.check(batch, version)
    except ParityError as error:
        stage.cause, stage.proven = str(error).partition("Likely cause: ")[2], not error.may_be_kernels
    return stage


def histogram(values: torch.Tensor) -> list[int]:
    """How many of `values` (`[n]`) are at most 1e-7, at most 1e-6, ..., at most 1 and above it, in size.

    What is no number counts as above.
    """
    sizes = torch.where(values.isnan(), torch.inf, values.abs())
    places = torch.bucketize(sizes, torch.tensor(SIZES, dtype=sizes.dtype))
    return torch.bincount(places, minlength=len(SIZES) + 1).tolist()


def worst(stages: Sequence[Stage]) -> float:
    """The largest mean difference among the stages in which engine and trainer should agree."""
    return max(stage.parity.mean for stage in stages if stage.expected)
