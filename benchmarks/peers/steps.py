"""From what a system writes to its steps: when each ended, what it trained on and where its time went."""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

TRL_MARK = "TRL_STEP "
_STEP = re.compile(r"\bstep:(\d+) - ")
_VERL_VALUE = re.compile(r"(\S+?):(?:np\.\w+\()?(-?(?:\d[\d.]*(?:e[+-]?\d+)?|nan|inf))\)?(?= - |$)")
_VERL_PHASES = {
    "gen": "generate",
    "old_log_prob": "old_logprobs",
    "reward": "reward",
    "update_actor": "update",
    "update_weights": "weight_sync",
    "step": "reported_step",
}
_VERL_DIFFERENCES = ("training/rollout_probs_diff_mean", "rollout_corr/kl", "rollout_corr/k3_kl")
_RLPOST_PHASES = {
    "generate": "generate",
    "infer": "old_logprobs",
    "train": "update",
    "publish": "weight_sync",
    "step": "reported_step",
}
_RLPOST_DIFFERENCE = "train_rollout_logprob_abs_diff/mean"
_TRL_DIFFERENCE = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step.

    Attributes:
        end_s: Unix time at which it was reported.
        tokens: response tokens that it trained on.
        phases: seconds of each, where the system tells them.
        differences: between the engine's and the trainer's (log)probabilities, under the system's own names.
    """

    number: int
    end_s: float
    tokens: float
    phases: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)


def verl_steps(log: Iterable[str], num_sequences: int) -> list[Step]:
    """Steps of verl's console logger in a log of lines `<Unix time>\\t<line>`."""
    steps = []
    for end_s, line in _stamped(log):
        if (found := _STEP.search(line)) is None:
            continue
        values = {name: float(value) for name, value in _VERL_VALUE.findall(line[found.start() :])}
        if "response_length/mean" not in values:
            continue
        phases = {name: values[f"timing_s/{key}"] for key, name in _VERL_PHASES.items() if f"timing_s/{key}" in values}
        steps.append(
            Step(
                number=int(found[1]),
                end_s=end_s,
                tokens=values["response_length/mean"] * num_sequences,
                phases=phases,
                differences={name: values[name] for name in _VERL_DIFFERENCES if name in values},
            )
        )
    return steps


def trl_steps(log: Iterable[str], num_sequences: int) -> list[Step]:
    """Steps that `benchmarks.peers.trl_train` prints."""
    steps = []
    for _, line in _stamped(log):
        if TRL_MARK not in line:
            continue
        row = json.loads(line.partition(TRL_MARK)[2])
        differences = {_TRL_DIFFERENCE: row[_TRL_DIFFERENCE]} if _TRL_DIFFERENCE in row else {}
        steps.append(
            Step(
                number=row["step"],
                end_s=row["end_s"],
                tokens=row["completions/mean_length"] * num_sequences,
                phases=row["phases"],
                differences=differences,
            )
        )
    return steps


def rlpost_steps(rows: Iterable[dict[str, Any]], num_sequences: int) -> list[Step]:
    """Steps of a `metrics.jsonl`."""
    steps = []
    for row in rows:
        if "timing_s/step" not in row:
            continue
        differences = {_RLPOST_DIFFERENCE: row[_RLPOST_DIFFERENCE]} if _RLPOST_DIFFERENCE in row else {}
        phases = {name: row[f"timing_s/{key}"] for key, name in _RLPOST_PHASES.items() if f"timing_s/{key}" in row}
        steps.append(
            Step(
                number=row["step"],
                end_s=row["time_s"],
                tokens=row["response_length/mean"] * num_sequences,
                phases=phases,
                differences=differences,
            )
        )
    return steps


def summary(steps: Sequence[Step], warmup: int) -> dict[str, Any]:
    """What the steps after the first `warmup` say: medians of times, means of tokens and differences.

    A step lasts from the report of the one before it to its own: whatever happens in between counts.

    Raises:
        ValueError: no step is left, or the first one, whose beginning nobody reports, would count.
    """
    if warmup < 1 or len(steps) <= warmup:
        raise ValueError(f"{len(steps)} steps with {warmup} to warm up: at least one of each is needed")
    counted = steps[warmup:]
    seconds = [step.end_s - before.end_s for before, step in zip(steps[warmup - 1 :], counted, strict=False)]
    total = sum(seconds)
    return {
        "steps": len(counted),
        "step_s": statistics.median(seconds),
        "step_s_each": [round(value, 3) for value in seconds],
        "tokens_per_step": statistics.mean(step.tokens for step in counted),
        "tokens_per_s": sum(step.tokens for step in counted) / total,
        "phases_s": _medians([step.phases for step in counted]),
        "differences": _medians([step.differences for step in counted]),
    }


def _medians(readings: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for reading in readings for name in reading)
    return {name: statistics.median(r[name] for r in readings if name in r) for name in names}


def _stamped(log: Iterable[str]) -> Iterable[tuple[float, str]]:
    for line in log:
        stamp, tab, text = line.rstrip("\n").partition("\t")
        if tab:
            yield float(stamp), text
