"""What to change where a phase does not fit, or a step could be faster.

Every change is tried by planning again, and named with what it gives.
"""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlpost.tools.planning.costs import predict_costs
from rlpost.tools.planning.hardware import GIB, GPUS_PER_NODE
from rlpost.tools.planning.memory import Phase, predict_memory
from rlpost.tools.planning.run import Run, set_devices
from rlpost.tools.planning.steps import predict_step
from rlpost.trainer.config import AsyncTrainerConfig

STEPS = 16  # that a value is lowered in
MOST_GPUS = 1024
LEAST_GAIN = 0.03  # of a step, for a change to be named

Change = dict[str, Any]  # key of the command -> value


@dataclass(slots=True, kw_only=True)
class Advice:
    """One way to make a phase fit: all of `change`, after which its peak is `total_bytes`."""

    phase: str
    change: Change
    total_bytes: float

    def __str__(self) -> str:
        return f"{self.phase}: {_words(self.change)} ({self.total_bytes / GIB:.0f} GiB)"


@dataclass(slots=True, kw_only=True)
class Faster:
    """A change after which all still fits and a step takes `step_s` seconds, which is less."""

    change: Change
    step_s: float

    def __str__(self) -> str:
        return f"{_words(self.change)} ({self.step_s:.3g} s)"


def advise(run: Run, phases: list[Phase]) -> list[Advice]:
    """For each phase that does not fit, every single change that makes it fit; where there is none, all together."""
    found: list[Advice] = []
    for phase in phases:
        if phase.fits:
            continue
        single = [advice for tries in _changes(run, phase) if (advice := _first_fit(run, phase, tries)) is not None]
        found += single or _together(run, phase)
    return found


def faster(run: Run, step_s: float) -> list[Faster]:
    """Single changes that leave the algorithm as it is and take `LEAST_GAIN` or more off a step; the best first."""
    found: list[Faster] = []
    for change in _speedups(run):
        try:
            other = changed(run, change)
            memory = predict_memory(other)
        except ValueError:
            continue
        if memory.fits:
            seconds = predict_step(other, predict_costs(other, memory.engine), memory.engine).step_s
            found.append(Faster(change=change, step_s=seconds))
    return sorted((f for f in found if f.step_s <= (1 - LEAST_GAIN) * step_s), key=lambda f: f.step_s)


def _speedups(run: Run) -> Iterator[Change]:
    """What may save time where memory allows."""
    cfg, engines = run.cfg, run.pools.rollout // run.tensor_parallel
    if cfg.model.enable_gradient_checkpointing:
        yield {"model.enable_gradient_checkpointing": False}
    if run.takes_turns:
        yield {"rollout.free_cache_engine": False}
    if run.engines_per_device == 1:
        yield {"rollout.num_replicas": 2 * engines}
    else:
        yield {"rollout.num_replicas": engines}
    if run.tensor_parallel > 1:
        yield {"rollout.tensor_model_parallel_size": run.tensor_parallel // 2}
    higher = round(cfg.rollout.gpu_memory_utilization + 0.2, 2)
    if higher < 1:
        yield {"rollout.gpu_memory_utilization": higher}


def changed(run: Run, change: Change) -> Run:
    """A copy with other values.

    Raises:
        ValueError: devices that cannot be divided so.
    """
    other = dataclasses.replace(run, cfg=copy.deepcopy(run.cfg))
    for key, value in change.items():
        if key == "num_gpus":
            set_devices(other.cfg, value)
            continue
        *sections, last = key.split(".")
        at: Any = other.cfg
        for section in sections:
            at = getattr(at, section)
        setattr(at, last, value)
    return other.checked()


def _changes(run: Run, phase: Phase) -> Iterator[list[Change]]:
    """Keys that may help a phase, each with its values from the one that costs least."""
    cfg = run.cfg
    engine_is_there = any(name == "engine: KV cache" for name in phase.parts)
    if phase.name == "train" and not cfg.model.enable_gradient_checkpointing:
        yield [{"model.enable_gradient_checkpointing": True}]
    if phase.name in ("train", "logprob"):
        yield _lower_budgets(run)
        yield _slices(run)
    if phase.name == "generate" and run.takes_turns:
        yield [{"actor.fsdp.optimizer_offload": True}]
        yield [{"actor.fsdp.param_offload": True}]
    if phase.name == "sync" and run.takes_turns:
        yield [{"actor.fsdp.optimizer_offload": True}]
    if "ref: weights" in phase.parts and not cfg.ref.param_offload and phase.name != "logprob":
        yield [{"ref.param_offload": True}]
    if not run.is_async and not cfg.rollout.free_cache_engine:
        yield [{"rollout.free_cache_engine": True}]
    if engine_is_there:
        yield _utilizations(run, raised=bool(phase.problem))
    if phase.name == "generate" or "engine: weights" in phase.parts:
        sizes = (1, 2, 4, 8)
        yield [{"rollout.tensor_model_parallel_size": size} for size in sizes if size > run.tensor_parallel]
    if phase.devices != "rollout":
        yield _more_devices(run)
        if not cfg.model.lora_rank:
            yield [{"model.lora_rank": 32}]


def _lower_budgets(run: Run) -> list[Change]:
    """Smaller micro-batches, down to what holds the longest sequence."""
    sections = ["actor", *(["critic"] if run.cfg.algo.needs_critic else [])]
    tries = []
    for step in range(STEPS - 1, 0, -1):
        change: Change = {}
        for section in sections:
            role = getattr(run.cfg, section)
            least = -(-run.longest // role.ulysses_sequence_parallel_size)
            rounded = role.ppo_max_token_len_per_gpu * step // STEPS // 256 * 256
            change[f"{section}.ppo_max_token_len_per_gpu"] = max(least, rounded)
        tries.append(change)
    return tries


def _slices(run: Run) -> list[Change]:
    """Sequences that several ranks share, with micro-batches that hold one of the longest."""
    tries: list[Change] = []
    for size in (2, 4, 8):
        least = -(-run.longest // size // 256) * 256
        if run.pools.train % size or run.shape.heads % size or least >= run.cfg.actor.ppo_max_token_len_per_gpu:
            continue
        sections = ["actor", *(["critic"] if run.cfg.algo.needs_critic else [])]
        change: Change = {f"{section}.ulysses_sequence_parallel_size": size for section in sections}
        tries.append(change | {f"{section}.ppo_max_token_len_per_gpu": least for section in sections})
    return tries


def _utilizations(run: Run, *, raised: bool) -> list[Change]:
    """The engine's share of a device, in steps of 0.05: upwards or downwards."""
    present = run.cfg.rollout.gpu_memory_utilization
    steps = [round(0.05 * i, 2) for i in range(1, 20)]
    values = [v for v in steps if v > present] if raised else [v for v in reversed(steps) if v < present]
    return [{"rollout.gpu_memory_utilization": value} for value in values]


def _more_devices(run: Run) -> list[Change]:
    """Twice as many, and so on; of disjoint pools, those that train."""
    pools, trainer = run.pools, run.cfg.trainer
    tries, factor = [], 2
    while (train := pools.train * factor) <= MOST_GPUS:
        if pools.shared or not isinstance(trainer, AsyncTrainerConfig):
            tries.append({"num_gpus": train})
        elif not (train + pools.rollout) % GPUS_PER_NODE or train + pools.rollout < GPUS_PER_NODE:
            total = train + pools.rollout
            tries.append({"num_gpus": total, "trainer.train_gpus": train, "trainer.rollout_gpus": pools.rollout})
        factor *= 2
    return tries


def _first_fit(run: Run, phase: Phase, tries: list[Change]) -> Advice | None:
    for change in tries:
        after = _after(run, phase, change)
        if after is not None and after.fits:
            return Advice(phase=phase.name, change=change, total_bytes=after.total_bytes)
    return None


def _together(run: Run, phase: Phase) -> list[Advice]:
    """Change after change, the mildest value of each key that suffices, until the phase fits."""
    whole: Change = {}
    best = phase
    for tries in _changes(run, phase):
        for change in tries:
            after = _after(run, phase, whole | change)
            if after is not None and after.total_bytes < best.total_bytes:
                whole, best = whole | change, after
            if best.fits:
                return [Advice(phase=phase.name, change=whole, total_bytes=best.total_bytes)]
    return []


def _after(run: Run, phase: Phase, change: Change) -> Phase | None:
    """The phase after a change; None where the devices cannot be divided so, or the phase is gone."""
    try:
        phases = predict_memory(changed(run, change)).phases
    except ValueError:
        return None
    return next((p for p in phases if p.name == phase.name and p.devices == phase.devices), None)


def _words(change: Change) -> str:
    return " ".join(f"{key}={_word(value)}" for key, value in change.items())


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
