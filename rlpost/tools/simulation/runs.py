"""A scenario, colocated and asynchronous, through the real sources, buffer and meters."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig
from rlpost.metrics import scalars
from rlpost.rewards.config import RewardConfig
from rlpost.tools.simulation.clock import run_virtual
from rlpost.tools.simulation.delivery import make_buffer
from rlpost.tools.simulation.engines import SimulatedPool, SimulatedSync, SimulatedTrainers
from rlpost.tools.simulation.lengths import Lengths, lengths_of
from rlpost.tools.simulation.scenario import Scenario
from rlpost.trainer.autopilot import Autopilot
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.fully_async import AsyncSource
from rlpost.trainer.prompts import PromptQueue
from rlpost.trainer.source import RolloutSource
from rlpost.trajectory import Group, Prompt


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One simulated run, over its measured batches.

    Attributes:
        batch_s: seconds a batch: a colocated step, `steps_per_batch` async ones.
        batches_s: of each of them.
        tokens_per_s_per_device: prompt and sampled tokens that were trained.
        rollout_idle, trainer_idle: shares of time in which that side of the run did not work (`IdleMeter`); where they
            take turns they add up to 1 and what neither used.
        devices_idle: the same over all devices.
        blocked: why rollout started no more groups, as shares of time.
        groups_lag, tokens_lag: share of the trained groups (by their oldest token) and tokens by versions behind.
        dropped: groups by what became of them other than training.
        sync_every, capacity: the buffer's limits at the end; of an async run.
        balanced_rollout_share: of the devices, which the idle shares call for; NaN where they take turns.
    """

    batch_s: float
    batches_s: list[float]
    tokens_per_s_per_device: float
    rollout_idle: float
    trainer_idle: float
    devices_idle: float
    blocked: dict[str, float] = field(default_factory=dict)
    groups_lag: dict[int, float] = field(default_factory=dict)
    tokens_lag: dict[int, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    sync_every: int = 1
    capacity: int = 0
    balanced_rollout_share: float | None = None

    @property
    def mean_lag(self) -> float:
        """Mean versions behind over groups, by their oldest token."""
        return sum(lag * share for lag, share in self.groups_lag.items())


class Prompts:
    """As many numbered prompts as are wanted; stands for a `PromptStream`."""

    def __init__(self, tokens: int):
        self._next, self._tokens = 0, np.zeros(tokens, np.int64)

    def next(self, n: int) -> list[Prompt]:
        """See `PromptStream.next`."""
        numbers = range(self._next, self._next + n)
        self._next += n
        return [Prompt(id=str(i), index=i, token_ids=self._tokens, text="", data_source="simulated") for i in numbers]

    def state_dict(self) -> dict[str, int]:
        """See `PromptStream.state_dict`."""
        return {"next": self._next}


@dataclass(slots=True)
class Log:
    """What the simulated trainer notes of each step."""

    ends_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    groups_lag: list[Counter[int]] = field(default_factory=list)
    tokens_lag: list[Counter[int]] = field(default_factory=list)


def simulate_colocated(scenario: Scenario, lengths: Lengths | None = None) -> Outcome:
    """Rollout and training in turn, both on all devices."""
    return run_virtual(_colocated(scenario, lengths or lengths_of(scenario)))


def simulate_async(scenario: Scenario, lengths: Lengths | None = None) -> Outcome:
    """Rollout and training at once, each on its share of the devices."""
    return run_virtual(_async(scenario, lengths or lengths_of(scenario)))


async def _colocated(scenario: Scenario, lengths: Lengths) -> Outcome:
    pool = SimulatedPool(scenario, scenario.devices, lengths)
    source = ColocatedSource(
        stream=cast(Any, Prompts(scenario.prompt_tokens)),
        trainers=cast(Any, SimulatedTrainers(scenario.move_s)),
        sleep=True,
        **_common(scenario, pool),
    )
    pool.room = min(pool.room, scenario.groups)
    log = await _train(scenario, source, scenario.groups, 1, scenario.devices, infers=True, meter=pool.meter)
    outcome = _outcome(scenario, log, 1)
    outcome.devices_idle = outcome.rollout_idle + outcome.trainer_idle - 1
    return outcome


async def _async(scenario: Scenario, lengths: Lengths) -> Outcome:
    pool = SimulatedPool(scenario, scenario.rollout_devices, lengths)
    limits = scenario.limits
    room = min(pool.room, limits.capacity)
    source = AsyncSource(
        buffer=make_buffer(scenario),
        prompts=PromptQueue(cast(Any, Prompts(scenario.prompt_tokens))),
        partial_rollout=scenario.partial_rollout,
        stop_on_error=True,
        room=room,
        clock=asyncio.get_running_loop().time,
        autopilot=Autopilot(limits, rollout_share=scenario.rollout_share, adjust=scenario.autobalance),
        **_common(scenario, pool),
    )
    devices = scenario.devices - scenario.rollout_devices
    log = await _train(
        scenario,
        source,
        scenario.groups_per_step,
        scenario.steps_per_batch,
        devices,
        infers=scenario.recompute_logprobs,
        meter=None,
    )
    present = source.buffer.limits
    await source.close()
    outcome = _outcome(scenario, log, scenario.steps_per_batch)
    share = scenario.rollout_share
    outcome.devices_idle = share * outcome.rollout_idle + (1 - share) * outcome.trainer_idle
    outcome.sync_every, outcome.capacity = present.sync_every, present.capacity
    return outcome


def _common(scenario: Scenario, pool: SimulatedPool) -> dict[str, Any]:
    """Arguments that both sources take."""
    filtering = FilterGroupsConfig(
        enable=scenario.keep_rate < 1, max_num_gen_batches=max(10, round(4 / scenario.keep_rate))
    )
    return {
        "algorithm": Algorithm(AlgoConfig(filter_groups=filtering), max_response_length=1),
        "pool": pool,
        "sync": SimulatedSync(pool, scenario.push_s),
        "spec": None,
        "n": scenario.n,
        "filter_groups": filtering,
        "reward": RewardConfig(),
    }


async def _train(
    scenario: Scenario,
    source: RolloutSource,
    groups_per_step: int,
    steps_per_batch: int,
    devices: float,
    *,
    infers: bool,
    meter: Any,
) -> Log:
    """The trainer's loop, in which everything but the source is a pause; `meter`: of a source that has none."""
    loop, log = asyncio.get_running_loop(), Log()
    await source.publish(0)
    for step in range(1, (scenario.warmup + scenario.batches) * steps_per_batch + 1):
        if meter is not None:
            meter.waiting(True)
        groups = await source.take(groups_per_step)
        if meter is not None:
            meter.waiting(False)
        tokens = _note(log, scenario, groups, step - 1)
        await asyncio.sleep(scenario.training_s(tokens, 1 / steps_per_batch, devices, infers))
        await source.publish(step)
        metrics = scalars(source.metrics())
        if meter is not None:
            metrics |= {f"async/{name}": share for name, share in meter.pop().items()}
        log.metrics.append(metrics)
        log.ends_s.append(loop.time())
    return log


def _note(log: Log, scenario: Scenario, groups: Sequence[Group], version: int) -> int:
    """Write down how old the groups are; returns their tokens."""
    groups_lag: Counter[int] = Counter()
    tokens_lag: Counter[int] = Counter()
    for group in groups:
        tokens: Counter[int] = group.trajectories[0].extras["tokens"]
        groups_lag[version - min(tokens)] += 1
        for sampled_by, count in tokens.items():
            tokens_lag[version - sampled_by] += count
    log.groups_lag.append(groups_lag)
    log.tokens_lag.append(tokens_lag)
    log.tokens.append(tokens_lag.total() + len(groups) * scenario.n * scenario.prompt_tokens)
    return log.tokens[-1]


def _outcome(scenario: Scenario, log: Log, steps_per_batch: int) -> Outcome:
    """Averages over the measured batches; shares of time are weighed by it."""
    first = scenario.warmup * steps_per_batch
    edges = [0.0, *log.ends_s][first::steps_per_batch]
    seconds = np.diff([0.0, *log.ends_s])[first:]
    total = float(seconds.sum())

    def share(name: str) -> float:
        values = [metrics.get(f"async/{name}", 0.0) for metrics in log.metrics[first:]]
        return float(np.dot(values, seconds) / total)

    names = sorted({k.removeprefix("async/") for m in log.metrics for k in m if k.startswith("async/blocked_")})
    fates: Counter[str] = Counter()
    for metrics in log.metrics[first:]:
        fates.update({k: v for k, v in metrics.items() if k.startswith("groups/") and k != "groups/kept"})
    balance = [m["async/balanced_rollout_share"] for m in log.metrics[first:] if "async/balanced_rollout_share" in m]
    return Outcome(
        batch_s=total / scenario.batches,
        batches_s=[later - earlier for earlier, later in itertools.pairwise(edges)],
        tokens_per_s_per_device=sum(log.tokens[first:]) / total / scenario.devices,
        rollout_idle=share("rollout_idle"),
        trainer_idle=share("trainer_idle"),
        devices_idle=0.0,
        blocked={name.removeprefix("blocked_"): share(name) for name in names},
        groups_lag=_shares(log.groups_lag[first:]),
        tokens_lag=_shares(log.tokens_lag[first:]),
        dropped={name.removeprefix("groups/"): count for name, count in fates.items() if count},
        balanced_rollout_share=float(np.mean(balance)) if balance else None,
    )


def _shares(counts: Sequence[Counter[int]]) -> dict[int, float]:
    merged = sum(counts, Counter[int]())
    return {key: merged[key] / merged.total() for key in sorted(merged)}
