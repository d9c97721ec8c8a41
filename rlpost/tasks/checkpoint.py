"""Folders that a maker fills once: what is in them is trusted only with the marker that was written last."""

import json
from pathlib import Path
from typing import Any

MARKER = "MADE_BY"  # no suffix: exported checkpoints copy the files that have one


def finished(folder: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The facts of the checkpoint in `folder` if it is whole and was made for this `request`, else None."""
    marker = folder / MARKER
    if not all((folder / name).is_file() for name in (MARKER, "config.json", "tokenizer.json", "model.safetensors")):
        return None
    written = json.loads(marker.read_text())
    return written["facts"] if written["request"] == request else None


def mark(folder: Path, request: dict[str, Any], facts: dict[str, Any]) -> None:
    """Declare `folder` whole: the last thing a maker does."""
    (folder / MARKER).write_text(json.dumps({"request": request, "facts": facts}, indent=2))


def clear(folder: Path) -> None:
    """Make `folder`, without a marker: until `mark` is called it counts as unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
