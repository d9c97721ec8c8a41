"""What every benchmark says of itself, and how its rows are printed and kept."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def environment() -> dict[str, str]:
    """Date, device and versions."""
    from rlpost.platform import platform  # imports torch, which a table alone does without
    from rlpost.trainer.about import versions

    return {"date": datetime.now(UTC).date().isoformat(), "device": platform().device_name()} | versions()


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table with a column for every key that a row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([_text(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def write(out: Path | None, name: str, rows: Sequence[dict[str, Any]], notes: str = "") -> None:
    """Print the table; with a folder `out` also keep `<name>.json` and `<name>.md` there."""
    facts = environment()
    said = ", ".join(f"{key} {value}" for key, value in facts.items())
    text = "\n\n".join(part for part in (f"# {name}", said, notes, markdown(rows)) if part)
    print(text, flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(text + "\n")
        (out / f"{name}.json").write_text(json.dumps({**facts, "notes": notes, "rows": list(rows)}, indent=1) + "\n")
