"""Step time by phase: the predicted costs, run through the simulator that schedules as real runs do."""

from dataclasses import dataclass
from typing import Any

from rlpost.tools.planning.costs import Costs
from rlpost.tools.planning.memory import Engine
from rlpost.tools.planning.run import Run
from rlpost.tools.simulation.runs import Outcome, simulate_async, simulate_colocated
from rlpost.tools.simulation.scenario import Scenario
from rlpost.trainer.config import AsyncTrainerConfig

BATCHES, WARMUP = 2, 1  # of colocated runs, which are alike
ASYNC_BATCHES, ASYNC_WARMUP = 6, 4


@dataclass(slots=True, kw_only=True)
class StepTime:
    """One step.

    Attributes:
        phases: name -> seconds. Of an asynchronous run they overlap: `generate` is the time that the trainer waits.
        step_s: from one step to the next.
        tokens_per_s, tokens_per_s_per_device: prompt and sampled tokens that are trained.
        mfu, bound: see `Costs`.
        slots: sequences that an engine decodes at once.
        rollout_idle, trainer_idle: shares of time, asynchronous.
    """

    phases: dict[str, float]
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    bound: str
    slots: int
    rollout_idle: float | None = None
    trainer_idle: float | None = None


def scenario_of(run: Run, costs: Costs, engine: Engine) -> Scenario:
    """The simulator's form of a run and its costs."""
    trainer, pools = run.cfg.trainer, run.pools
    values: dict[str, Any] = {
        "devices": float(pools.total),
        "devices_per_replica": run.tensor_parallel / run.engines_per_device,
        "slots": engine.slots,
        "batch": run.cfg.data.train_batch_size,
        "n": run.cfg.rollout.n,
        "prompt_tokens": run.prompt_tokens,
        "mean_length": run.mean_length,
        "tail": run.workload.tail,
        "max_length": run.cfg.data.max_response_length,
        "keep_rate": run.workload.keep_rate,
        "decode_step_s": costs.decode_step_s,
        "decode_sequence_s": costs.decode_sequence_s,
        "device_step_s": costs.device_step_s,
        "device_sequence_s": costs.device_sequence_s,
        "prefill_token_s": costs.prefill_token_s,
        "infer_token_s": sum(seconds * run.inferred[column] for column, seconds in costs.infer_token_s.items()),
        "train_token_s": costs.train_token_s,
        "update_s": costs.update_s,
        "updates": run.updates,
        "sync_s": costs.sync_s,
        "weight_bytes": 0.0,  # in sync_s already
        "move_s": costs.move_s,
        "steps_per_batch": 1,
        "seed": run.cfg.seed,
        "batches": BATCHES,
        "warmup": WARMUP,
    }
    if isinstance(trainer, AsyncTrainerConfig):
        values |= {
            "rollout_share": pools.rollout / pools.total if not pools.shared else 0.5,
            "trigger_parameter_sync_step": trainer.trigger_parameter_sync_step,
            "staleness_threshold": trainer.staleness_threshold,
            "max_staleness": trainer.max_staleness,
            "on_stale": trainer.on_stale,
            "partial_rollout": trainer.partial_rollout,
            "max_concurrent_groups": trainer.max_concurrent_groups,
            "recompute_logprobs": bool(run.inferred),
            "autobalance": trainer.autobalance,
            "batches": ASYNC_BATCHES,
            "warmup": ASYNC_WARMUP,
        }
    return Scenario(**values)


def predict_step(run: Run, costs: Costs, engine: Engine) -> StepTime:
    """Simulate some steps."""
    scenario = scenario_of(run, costs, engine)
    overlaps = run.is_async and not run.pools.shared
    outcome = simulate_async(scenario) if overlaps else simulate_colocated(scenario)
    phases = _phases(run, costs, outcome.batch_s)
    tokens_per_s = run.tokens / outcome.batch_s
    return StepTime(
        phases=phases,
        step_s=outcome.batch_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / run.pools.total,
        mfu=costs.mfu,
        bound=costs.bound,
        slots=engine.slots,
        **_idle(outcome if overlaps else None),
    )


def _phases(run: Run, costs: Costs, step_s: float) -> dict[str, float]:
    """Seconds by phase; what the others leave of the step is generation, or waiting for it."""
    names = {"old_logprobs": "old logprobs", "ref_logprobs": "reference", "values": "values"}
    share = run.tokens / run.pools.train
    phases = {names[column]: seconds * share * run.inferred[column] for column, seconds in costs.infer_token_s.items()}
    phases["update"] = costs.train_token_s * share + costs.update_s * run.updates
    every = run.cfg.trainer.trigger_parameter_sync_step if isinstance(run.cfg.trainer, AsyncTrainerConfig) else 1
    phases["sync"] = costs.sync_s / every
    if costs.move_s:
        phases["sleep and wake"] = costs.move_s
    return {"generate": max(0.0, step_s - sum(phases.values()))} | phases


def _idle(outcome: Outcome | None) -> dict[str, float]:
    return {} if outcome is None else {"rollout_idle": outcome.rollout_idle, "trainer_idle": outcome.trainer_idle}
