"""Lanes as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rlpost.tools.timelines.lanes import Lane, Window, accounted
from rlpost.tracking.base import require

COLORS = {
    "start": "#8c8c8c",
    "generate": "#4c9ed9",
    "reward": "#f0b429",
    "infer": "#8f6fc9",
    "train": "#e4572e",
    "publish": "#3fa34d",
    "memory": "#b58463",
    "pause": "#c9c9c9",
    "validate": "#2ab7ca",
    "save": "#d46a9f",
}
OTHER_COLOR = "#444444"
WIDTH_INCHES, LANE_INCHES, MARGIN_INCHES = 13.0, 0.5, 1.4
FILL = 0.8  # of a lane's height
NARROWEST = 1 / 1500  # share of the picture that a piece has at least, so that it is seen


def names_of(lanes: Sequence[Lane]) -> list[str]:
    """The phases in some lane: those that are known in the order of a step, then the others."""
    there = {piece.name for lane in lanes for piece in lane.pieces}
    return [name for name in COLORS if name in there] + sorted(there - COLORS.keys())


def as_markdown(lanes: Sequence[Lane], window: Window) -> str:
    """Seconds of each lane by phase, and what is left of the window; how much of the driver's time phases explain."""
    names = names_of(lanes)
    rows = [["", *names, "idle", "idle share"]]
    for lane in lanes:
        seconds, idle_s = lane.seconds(), window.length_s - lane.busy_s
        cells = [f"{seconds[name]:.3f}" if name in seconds else "" for name in names]
        rows.append([_title(lane), *cells, f"{idle_s:.3f}", f"{idle_s / window.length_s:.0%}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(
        [
            f"{steps_of(window)}: {window.length_s:.3f} s; seconds by phase:",
            "",
            *lines,
            "",
            f"Phases account for {accounted(lanes, window):.1%} of the driver's time.",
        ]
    )


def steps_of(window: Window) -> str:
    """Such as "Steps 3 to 5"."""
    first, last = min(window.steps), max(window.steps)
    return f"Step {first}" if first == last else f"Steps {first} to {last}"


def draw(lanes: Sequence[Lane], window: Window, out: Path) -> Path:
    """One bar a lane, coloured by phase and as high as it is often open, over seconds of the window; returns `out`.

    Raises:
        ValueError: matplotlib is not installed.
    """
    size = WIDTH_INCHES, MARGIN_INCHES + LANE_INCHES * len(lanes)
    figure = require("matplotlib.figure", "drawing a timeline").Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    legend = {}
    for row, lane in enumerate(lanes):
        base = len(lanes) - 1 - row
        axes.axhline(base, color="#dddddd", linewidth=0.6, zorder=0)
        for name in names_of([lane]):
            heights, edges = _stairs(lane, name, base, window)
            color = COLORS.get(name, OTHER_COLOR)
            legend[name] = axes.stairs(heights, edges, baseline=base, fill=True, color=color, linewidth=0)
    for step, (begin, _) in window.steps.items():
        axes.axvline(begin - window.begin, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            f"step {step}", (begin - window.begin, 1), xycoords=("data", "axes fraction"), xytext=(3, 3),
            textcoords="offset points", fontsize="small",
        )  # fmt: skip
    axes.set(xlim=(0, window.length_s), ylim=(-0.15, len(lanes)), xlabel="seconds")
    axes.set_yticks([len(lanes) - 1 - row + FILL / 2 for row in range(len(lanes))], [_label(lane) for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = names_of(lanes)
    figure.legend([legend[name] for name in names], names, loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(out, dpi=120)
    return out


def _stairs(lane: Lane, name: str, base: float, window: Window) -> tuple[list[float], list[float]]:
    """Tops of one phase's pieces and of the gaps between them, and the edges of all, in seconds of the window."""
    mine = [piece for piece in lane.pieces if piece.name == name]
    peak = max(piece.count for piece in mine)
    heights: list[float] = []
    edges = [mine[0].begin - window.begin]
    for piece in mine:
        begin = piece.begin - window.begin
        end = max(piece.end - window.begin, begin + NARROWEST * window.length_s)
        if begin > edges[-1]:
            heights.append(base)
            edges.append(begin)
        if end > edges[-1]:
            heights.append(base + FILL * piece.count / peak)
            edges.append(end)
    return heights, edges


def _title(lane: Lane) -> str:
    return lane.name if lane.num_processes == 1 else f"{lane.name} ({lane.num_processes} processes)"


def _label(lane: Lane) -> str:
    return _title(lane) if lane.peak <= 1 else f"{_title(lane)}\nup to {lane.peak} at once"
