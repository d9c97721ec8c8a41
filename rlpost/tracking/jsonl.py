"""Metrics and sampled answers as JSON lines in the run folder."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from rlpost.files import set_aside
from rlpost.tracking.base import TRACKERS, RunInfo, Tracker
from rlpost.tracking.config import TrackingConfig


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; a torn last line, left by a killed run, is skipped.

    Raises:
        ValueError: a line other than the last is not JSON; names file and line.
    """
    lines = Path(path).read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: not a JSON line ({error}); repair or delete that line") from error
    return rows


class JsonlFile:
    """Appends one line a record, flushed at once, so that a killed run loses at most its last line.

    A file that is there already is moved to `<name>.old` unless the run resumes (`rewind`).
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: TextIO | None = None
        self._resumed = False

    def rewind(self, step: int) -> None:
        """Keep the lines up to and including `step`; the file is replaced atomically."""
        assert self._file is None, "rewind comes before the first write"
        self._resumed = True
        if not self.path.exists():
            return
        kept = [row for row in read_jsonl(self.path) if row["step"] <= step]
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(partial, self.path)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            if not self._resumed:
                set_aside(self.path)
            self._file = open(self.path, "a")
        self._file.write(json.dumps(record, allow_nan=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@TRACKERS.register("jsonl")
class JsonlTracker(Tracker):
    """`metrics.jsonl`: `{"step": 3, "time_s": <Unix time>, "reward/mean": 0.5, ...}`; `samples.jsonl`: the answers.

    NaN and infinities are written as null, since JSON has neither.
    """

    def __init__(self, cfg: TrackingConfig, run: RunInfo):
        super().__init__(cfg, run)
        self._metrics = JsonlFile(run.folder / "metrics.jsonl")
        self._samples = JsonlFile(run.folder / "samples.jsonl")

    def log(self, step: int, scalars: dict[str, float]) -> None:
        readings = {name: _finite(float(value)) for name, value in scalars.items()}
        self._metrics.write({"step": step, "time_s": round(time.time(), 3)} | readings)

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            cells = {name: _finite(cell) if isinstance(cell, float) else cell for name, cell in row.items()}
            self._samples.write({"step": step} | cells)

    def rewind(self, step: int) -> None:
        self._metrics.rewind(step)
        self._samples.rewind(step)

    def close(self, failed: bool = False) -> None:
        self._metrics.close()
        self._samples.close()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
