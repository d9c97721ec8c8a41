"""What things cost, out of `metrics.jsonl` of colocated runs: the keys of a `Scenario`, fitted by least squares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from rlpost.tools.simulation.lengths import MAX_TAIL, Z99, solve_mu
from rlpost.tracking.jsonl import read_jsonl
from rlpost.trainer.config import AsyncTrainerConfig

SKIPPED = 2  # first steps of a run: kernels are compiled, caches filled
TOLERANCE = 0.002  # of the norm of what is fitted: a better fit than this is no reason for one more cost
SCHEDULE = ("trigger_parameter_sync_step", "staleness_threshold", "max_staleness", "on_stale", "partial_rollout")
MEDIAN_OF_LARGEST = 0.69  # of N draws: the median of the largest is the quantile 1 - 0.69 / N


@dataclass(slots=True, kw_only=True)
class Step:
    """One measured step; times in seconds, tokens over all devices."""

    devices: float
    replicas: int
    slots: int
    groups: int
    answers: int
    updates: int
    prompt_tokens: float  # a prompt
    mean_length: float
    longest: float
    truncated: float
    tokens: float
    generate_s: float
    infer_s: float
    train_s: float
    publish_s: float
    step_s: float
    sync_s: float
    sync_bytes: float

    @property
    def decode_steps(self) -> float:
        """Of the replica with the longest answer, or with more answers than slots of all answers in turn."""
        return max(self.longest, self.answers * self.mean_length / (self.replicas * self.slots))


@dataclass(slots=True, kw_only=True)
class Calibration:
    """Fitted keys of a `Scenario`.

    Attributes:
        values: key -> value; workload and costs.
        errors: phase -> mean |fitted - measured| over the mean measured.
        measured_step_s: mean of the last run's steps.
        notes: what the runs could not tell.
    """

    values: dict[str, Any]
    errors: dict[str, float]
    measured_step_s: float
    notes: list[str]


def calibrate(runs: Sequence[Path], known: Mapping[str, Any]) -> Calibration:
    """Fit the costs to all steps of `runs`; the workload is the last one's, to be run as by trainer=fully_async.

    A decoding replica takes decode_step_s a step, decode_sequence_s a sampled token and prefill_token_s a prompt token;
    runs of one shape cannot tell these apart, which becomes a note: add a run with another batch or n.

    Args:
        runs: run folders, or files like their `metrics.jsonl`.
        known: keys of `Scenario` that are not to be fitted; `devices`, `devices_per_replica` and `slots` also say what
            the runs' folders do not.

    Raises:
        ValueError: a run without usable steps, or whose number of devices is not known.
    """
    each = [read_steps(Path(run), known) for run in runs]
    steps, last = [step for run in each for step in run], each[-1]
    values: dict[str, Any] = {}
    errors, notes = {}, []
    fits = {
        "generate": ("decode_step_s", "decode_sequence_s", "prefill_token_s"),
        "infer": ("infer_token_s",),
        "train": ("train_token_s", "update_s"),
        "sync": ("sync_s", "sync_byte_s"),
    }
    for phase, names in fits.items():
        columns, measured = _equations(phase, steps)
        fitted, errors[phase] = _fit_phase(names, columns, measured, known)
        values |= fitted
        free = [i for i, name in enumerate(names) if name not in known]
        if len(free) > 1 and alike(columns[:, free]):
            notes.append(f"{phase}: all steps are alike, so {', '.join(names[i] for i in free)} cannot be told apart")
    if byte_s := values.pop("sync_byte_s"):
        values["weight_bytes"], values["sync_bytes_per_s"] = last[-1].sync_bytes, 1 / byte_s
    else:
        values["weight_bytes"] = 0.0
    values["move_s"] = max(0.0, float(np.mean([s.publish_s - s.sync_s for s in steps])))
    asynchronous = AsyncTrainerConfig()
    values |= _workload(last) | {"steps_per_batch": 1} | {key: getattr(asynchronous, key) for key in SCHEDULE}
    return Calibration(
        values=values | dict(known),
        errors=errors,
        measured_step_s=float(np.mean([step.step_s for step in last])),
        notes=notes,
    )


def nonnegative_fit(columns: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 of `columns` (`[n, k]`, k small) that give `measured` (`[n]`) with the least squares.

    Tries every subset that holds one of the first two columns. Of those that fit almost alike the smallest is taken.
    """
    best, best_error = np.zeros(columns.shape[1]), float(np.linalg.norm(measured))
    slack = TOLERANCE * best_error
    for size in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), size):
            scale = columns[:, chosen].max(axis=0)
            if chosen[0] > 1 or not scale.all():
                continue
            found = np.linalg.lstsq(columns[:, chosen] / scale, measured, rcond=1e-9)[0] / scale
            error = float(np.linalg.norm(columns[:, chosen] @ found - measured))
            if (found >= 0).all() and error < best_error - slack:
                best, best_error = np.zeros(columns.shape[1]), error
                best[list(chosen)] = found
    return best


def alike(columns: np.ndarray) -> bool:
    """Whether the rows of `columns` (`[n, k]`) differ by no more than a twentieth, up to a common factor."""
    singular = np.linalg.svd(columns / np.maximum(columns.max(axis=0), 1e-12), compute_uv=False)
    return len(columns) == 1 or bool(singular[1] < 0.05 * len(columns) ** 0.5)


def tail_of(mean: float, limit: int, length: float, reached: float) -> float:
    """`tail` of the log-normal lengths, cut at `limit`, of which a share `reached` is at least `length` long."""
    normal = NormalDist()
    low, high = 1e-3, Z99
    for _ in range(50):
        sigma = (low + high) / 2
        beyond = 1 - normal.cdf((log(length) - solve_mu(mean, sigma, limit)) / sigma)
        low, high = (sigma, high) if beyond < reached else (low, sigma)
    return min(MAX_TAIL, exp(Z99 * low - low**2 / 2))


def read_steps(run: Path, known: Mapping[str, Any]) -> list[Step]:
    """Usable steps of one run.

    Raises:
        ValueError: see `calibrate`.
    """
    metrics = run / "metrics.jsonl" if run.is_dir() else run
    if not metrics.is_file():
        raise ValueError(f"{metrics}: no such file; name the run folder of a colocated run with jsonl tracking")
    facts = _facts(run / ".hydra" / "config.yaml") | dict(known)
    if "devices" not in facts:
        raise ValueError(f"{run}: does not tell how many devices it ran on; add devices=<number>")
    rows = [row for row in read_jsonl(metrics) if "timing_s/generate" in row]
    if any(key.startswith("async/") for row in rows for key in row):
        raise ValueError(f"{metrics}: of an asynchronous run, whose generation overlaps training; name a colocated one")
    # waves of dynamic sampling overlap nothing: such steps are not one generation of known size
    rows = [row for row in rows[SKIPPED:] if not any(k.startswith("groups/dropped") and row[k] for k in row)]
    if not rows:
        raise ValueError(
            f"{metrics}: no step after the first {SKIPPED} without dropped groups; calibrate on a longer run with "
            "algo.filter_groups.enable=false"
        )
    return [_step(row, facts) for row in rows]


def _step(row: Mapping[str, float], facts: Mapping[str, Any]) -> Step:
    per_answer = row["prompt_length/mean"] + row["response_length/mean"]
    return Step(
        devices=facts["devices"],
        replicas=max(1, int(facts["devices"] / facts.get("devices_per_replica", 1))),
        slots=facts.get("slots", 256),
        groups=round(row["groups/kept"]),
        answers=round(row["throughput/tokens"] / per_answer),
        updates=max(1, round(row["groups/kept"] / facts.get("mini_batch", row["groups/kept"]))),
        prompt_tokens=row["prompt_length/mean"],
        mean_length=row["response_length/mean"],
        longest=row["response_length/max"],
        truncated=row["response_length/truncated"],
        tokens=row["throughput/tokens"],
        generate_s=row["timing_s/generate"],
        infer_s=row["timing_s/infer"],
        train_s=row["timing_s/train"],
        publish_s=row["timing_s/publish"],
        step_s=row["timing_s/step"],
        sync_s=row["weight_sync/seconds_s"],
        sync_bytes=row["weight_sync/bytes"],
    )


def _facts(path: Path) -> dict[str, Any]:
    """What a run's own configuration says."""
    if not path.is_file():
        return {}
    cfg = OmegaConf.load(path)
    facts = {
        "mini_batch": cfg.actor.ppo_mini_batch_size,
        "slots": cfg.rollout.max_num_seqs,
        "devices_per_replica": cfg.rollout.tensor_model_parallel_size,
    }
    if cfg.cluster.n_gpus_per_node is not None:
        facts["devices"] = cfg.cluster.nnodes * cfg.cluster.n_gpus_per_node
    return facts


def _equations(phase: str, steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
    """Columns `[steps, costs]` and what they should add up to, `[steps]`."""
    match phase:
        case "generate":
            rows = [
                (s.decode_steps, s.answers * s.mean_length / s.replicas, s.answers * s.prompt_tokens / s.replicas)
                for s in steps
            ]
            return np.array(rows), np.array([s.generate_s for s in steps])
        case "infer":
            return np.array([[s.tokens / s.devices] for s in steps]), np.array([s.infer_s for s in steps])
        case "train":
            return np.array([(s.tokens / s.devices, s.updates) for s in steps]), np.array([s.train_s for s in steps])
    return np.array([(1.0, s.sync_bytes) for s in steps]), np.array([s.sync_s for s in steps])


def _fit_phase(
    names: Sequence[str], columns: np.ndarray, measured: np.ndarray, known: Mapping[str, Any]
) -> tuple[dict[str, float], float]:
    """Costs by name, and the mean relative error; those in `known` are taken as they are."""
    fixed = np.array([known.get(name, 0.0) for name in names])
    free = [i for i, name in enumerate(names) if name not in known]
    fixed[free] = nonnegative_fit(columns[:, free], measured - columns @ fixed) if free else []
    error = float(np.abs(columns @ fixed - measured).mean() / max(measured.mean(), 1e-12))
    return {name: float(value) for name, value in zip(names, fixed, strict=True)}, error


def _workload(steps: Sequence[Step]) -> dict[str, Any]:
    """Lengths and sizes of a run."""
    mean = float(np.mean([s.mean_length for s in steps]))
    truncated = float(np.mean([s.truncated for s in steps]))
    longest = float(np.mean([s.longest for s in steps]))
    limit = round(max(s.longest for s in steps))
    # where answers reach the limit, their share says how long the tail is; else the longest of so many does
    length, reached = (limit, truncated) if truncated > 0 else (longest, MEDIAN_OF_LARGEST / steps[0].answers)
    return {
        "devices": steps[0].devices,
        "devices_per_replica": steps[0].devices / steps[0].replicas,
        "slots": steps[0].slots,
        "batch": steps[0].groups,
        "n": round(steps[0].answers / steps[0].groups),
        "prompt_tokens": round(np.mean([s.prompt_tokens for s in steps])),
        "mean_length": mean,
        "tail": tail_of(mean, limit, length, reached),
        "max_length": limit,
        "updates": steps[0].updates,
    }
