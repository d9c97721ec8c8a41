"""Simulated runs side by side: rows, a Markdown table, and a picture."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.tools.simulation.runs import Outcome, simulate_async, simulate_colocated
from rlpost.tools.simulation.scenario import Scenario
from rlpost.tracking.base import require
from rlpost.tracking.jsonl import read_jsonl

SIZE_INCHES = (11, 7)


@dataclass(slots=True, kw_only=True)
class Pair:
    """One scenario, both ways."""

    scenario: Scenario
    colocated: Outcome
    fully_async: Outcome

    @property
    def ratio(self) -> float:
        """How many times faster the async run is."""
        return self.colocated.batch_s / self.fully_async.batch_s

    def row(self, keys: Sequence[str]) -> dict[str, Any]:
        """For JSON: the values of `keys`, the ratio and both outcomes."""
        return {
            **{key: getattr(self.scenario, key) for key in keys},
            "ratio": self.ratio,
            "colocated": dataclasses.asdict(self.colocated),
            "fully_async": dataclasses.asdict(self.fully_async),
        }


def simulate(scenario: Scenario) -> Pair:
    """Run `scenario` both ways."""
    return Pair(scenario=scenario, colocated=simulate_colocated(scenario), fully_async=simulate_async(scenario))


COLUMNS: dict[str, Callable[[Pair], str]] = {
    "colocated s/batch": lambda p: f"{p.colocated.batch_s:.4g}",
    "async s/batch": lambda p: f"{p.fully_async.batch_s:.4g}",
    "ratio": lambda p: f"{p.ratio:.2f}",
    "colocated tokens/s/device": lambda p: f"{p.colocated.tokens_per_s_per_device:.0f}",
    "async tokens/s/device": lambda p: f"{p.fully_async.tokens_per_s_per_device:.0f}",
    "colocated idle": lambda p: f"{p.colocated.devices_idle:.0%}",
    "rollout idle": lambda p: f"{p.fully_async.rollout_idle:.0%}",
    "trainer idle": lambda p: f"{p.fully_async.trainer_idle:.0%}",
    "balanced share": lambda p: f"{p.fully_async.balanced_rollout_share:.2f}",
    "versions behind, mean (max)": lambda p: f"{p.fully_async.mean_lag:.1f} ({max(p.fully_async.groups_lag)})",
}


def markdown(pairs: Sequence[Pair], swept: Sequence[str]) -> str:
    """One row a scenario, the swept keys first."""
    lines = ["| " + " | ".join([*swept, *COLUMNS]) + " |", "|" + "---|" * (len(swept) + len(COLUMNS))]
    for pair in pairs:
        cells = [f"{getattr(pair.scenario, key)}" for key in swept] + [column(pair) for column in COLUMNS.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(pairs: Sequence[Pair], swept: Sequence[str], out: Path) -> Path:
    """A sweep over its first key, one line for each value of the others; without a sweep, one run batch by batch.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = require("matplotlib.figure", "drawing").Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = list(figure.subplots(2, 2).flat)
    if swept:
        _draw_sweep(axes, pairs, swept)
    else:
        _draw_run(axes, pairs[0])
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.set_ylim(0, panel.dataLim.ymax * 1.15)
        panel.legend(fontsize="x-small", framealpha=0.5)
    figure.savefig(out, dpi=100)
    return out


def _draw_sweep(axes: Sequence[Any], pairs: Sequence[Pair], swept: Sequence[str]) -> None:
    x_key, others = swept[0], swept[1:]
    lines: dict[str, list[Pair]] = {}
    for pair in pairs:
        label = ", ".join(f"{key}={getattr(pair.scenario, key)}" for key in others)
        lines.setdefault(label, []).append(pair)
    panels: list[tuple[str, list[tuple[str, Callable[[Pair], float]]]]] = [
        (
            "seconds a batch",
            [("colocated", lambda p: p.colocated.batch_s), ("async", lambda p: p.fully_async.batch_s)],
        ),
        ("colocated / async", [("", lambda p: p.ratio)]),
        (
            "async: idle share",
            [("rollout", lambda p: p.fully_async.rollout_idle), ("trainer", lambda p: p.fully_async.trainer_idle)],
        ),
        ("versions behind (mean over groups)", [("", lambda p: p.fully_async.mean_lag)]),
    ]
    for panel, (title, readings) in zip(axes, panels, strict=True):
        for number, (label, line) in enumerate(lines.items()):
            for style, (name, value) in zip(("-", "--"), readings, strict=False):
                x = [getattr(pair.scenario, x_key) for pair in line]
                shown = " ".join(part for part in (name, label) if part) or "async"
                panel.plot(x, [value(p) for p in line], style, marker="o", ms=3, color=f"C{number}", label=shown)
        panel.set(title=title, xlabel=x_key)
        if x_key == "devices":
            panel.set_xscale("log", base=2)


def _draw_run(axes: Sequence[Any], pair: Pair) -> None:
    colocated, asynchronous = pair.colocated, pair.fully_async
    for name, outcome in (("colocated", colocated), ("async", asynchronous)):
        axes[0].plot(range(1, len(outcome.batches_s) + 1), outcome.batches_s, marker="o", ms=3, label=name)
    axes[0].set(title="seconds of each batch", xlabel="batch")
    ratios = np.divide(colocated.batches_s, asynchronous.batches_s)
    axes[1].plot(range(1, len(ratios) + 1), ratios, marker="o", ms=3, label=f"mean {pair.ratio:.2f}")
    axes[1].set(title="colocated / async", xlabel="batch")
    shares = {"rollout idle": asynchronous.rollout_idle, "trainer idle": asynchronous.trainer_idle}
    shares |= {f"blocked: {name}": share for name, share in asynchronous.blocked.items()}
    axes[2].bar(list(shares), list(shares.values()), label="async")
    axes[2].set(title="shares of time")
    for name, lag, shift in (("groups", asynchronous.groups_lag, -0.2), ("tokens", asynchronous.tokens_lag, 0.2)):
        axes[3].bar([k + shift for k in lag], list(lag.values()), width=0.4, label=name)
    axes[3].set(title="async: share by versions behind", xlabel="versions")


def compare(pair: Pair, measured: Path, skip: int) -> dict[str, tuple[float, float]]:
    """Name -> (predicted, measured) of an async run's `metrics.jsonl`, without its first `skip` steps.

    Raises:
        ValueError: no such steps.
    """
    metrics = measured / "metrics.jsonl" if measured.is_dir() else measured
    rows = [row for row in read_jsonl(metrics) if "async/trainer_idle" in row][skip:] if metrics.is_file() else []
    if not rows:
        raise ValueError(f"{metrics}: no async step after the first {skip}; name the folder of an asynchronous run")
    outcome = pair.fully_async
    predicted = {
        "timing_s/step": outcome.batch_s / pair.scenario.steps_per_batch,
        "async/rollout_idle": outcome.rollout_idle,
        "async/trainer_idle": outcome.trainer_idle,
        "async/staleness/mean": outcome.mean_lag,
    }
    return {
        name: (value, float(np.mean([row[name] for row in rows if row.get(name) is not None])))
        for name, value in predicted.items()
    }
