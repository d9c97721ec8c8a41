"""The table of one cell: a column for each figure, a row for each system, and what rlpost is to each of them."""

from collections.abc import Sequence
from typing import Any

from benchmarks.common import markdown

OURS = "rlpost"


def table(rows: Sequence[dict[str, Any]], facts: dict[str, str]) -> str:
    """Markdown: facts, figures, differences and commands."""
    said = ", ".join(f"{key} {value}" for key, value in facts.items())
    ours = next((row for row in rows if row["system"] == OURS and "tokens_per_s" in row), None)
    notes = [_note(row) for row in rows]
    return "\n\n".join([said, markdown([_figures(row, ours) for row in rows]), *notes])


def _figures(row: dict[str, Any], ours: dict[str, Any] | None) -> dict[str, Any]:
    figures: dict[str, Any] = {"system": f"{row['system']} ({row['variant']})", "ended": row["ended"]}
    if "step_s" not in row:
        return figures
    memory = row["peak_memory_mib"]
    figures |= {
        "step s": row["step_s"],
        "each": " ".join(f"{value:.1f}" for value in row["step_s_each"]),
        "tokens a step": round(row["tokens_per_step"]),
        "tokens/s": round(row["tokens_per_s"]),
        "rlpost / it": ours["tokens_per_s"] / row["tokens_per_s"] if ours else None,
        **{f"{name} s": seconds for name, seconds in row["phases_s"].items()},
        "peak GB": None if memory is None else memory * 2**20 / 1e9,
        "first step after s": row["first_step_after_s"],
    }
    return figures


def _note(row: dict[str, Any]) -> str:
    versions = " ".join(f"{name} {version}" for name, version in row["versions"].items())
    differences = ", ".join(f"{name} {value:.4g}" for name, value in row.get("differences", {}).items())
    said = f"**{row['system']}** on {row['device']}: {versions}" + (f"; {differences}" if differences else "")
    return f"{said}\n\n```\n{' '.join(row['command'])}\n```"
