"""`metrics.jsonl` as a picture: `python -m rlpost.tracking.curves outputs/<day>/<time>`."""

import sys
from pathlib import Path
from typing import Any

from rlpost.tracking.base import require
from rlpost.tracking.jsonl import read_jsonl

SIZE_INCHES = (11, 7)
PANELS: tuple[tuple[str, str, list[Any]], ...] = (  # title, unit on the y axis, names as exact text or (prefix, suffix)
    ("Reward", "mean reward of a step", ["reward/mean"]),
    ("Validation accuracy", "share of right answers", [("val/", "/accuracy")]),
    ("Trainer against engine", "mean |logprob difference| (nats)", ["train_rollout_logprob_abs_diff/mean"]),
    ("Throughput", "tokens/s", ["throughput/tokens_per_s"]),
)


def series(rows: list[dict[str, Any]], wanted: list[Any]) -> dict[str, tuple[list[int], list[float]]]:
    """Metric name -> (steps, values) of every metric that `wanted` names; nulls are left out, the last counts."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and any(_matches(name, want) for want in wanted):
                found.setdefault(name, {})[row["step"]] = value
    return {name: (sorted(points), [points[s] for s in sorted(points)]) for name, points in sorted(found.items())}


def _matches(name: str, want: str | tuple[str, str]) -> bool:
    return name == want if isinstance(want, str) else name.startswith(want[0]) and name.endswith(want[1])


def plot_curves(metrics: Path, out: Path) -> Path:
    """Draw reward, validation accuracy, logprob difference and throughput over steps; returns `out`.

    Raises:
        ValueError: no such file, nothing logged in it, or matplotlib is not installed.
    """
    if not Path(metrics).is_file():
        raise ValueError(f"{metrics}: no such file; runs with jsonl in tracking.logger write it to their run folder")
    rows = read_jsonl(metrics)
    if not rows:
        raise ValueError(f"{metrics}: nothing was logged")
    figure = require("matplotlib.figure", "drawing curves").Figure(figsize=SIZE_INCHES, layout="constrained")
    for axes, (title, unit, wanted) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        lines = series(rows, wanted)
        for name, (steps, values) in lines.items():
            axes.plot(steps, values, marker="o", markersize=3, linewidth=1.5, label=name)
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize="small")
        if not lines:
            axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes, color="gray")
    figure.savefig(out, dpi=120)  # a Figure made without pyplot draws with Agg: no display, no global state
    return Path(out)


def main() -> None:
    """Write `curves.png` beside the `metrics.jsonl` of each folder named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m rlpost.tracking.curves RUN_FOLDER...")
    for folder in map(Path, sys.argv[1:]):
        print(plot_curves(folder / "metrics.jsonl", folder / "curves.png"))


if __name__ == "__main__":
    main()
