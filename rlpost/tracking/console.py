"""Progress on the terminal: a live bar where there is one, plain lines in a log file."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from rlpost.tracking.base import TRACKERS, RunInfo, Tracker
from rlpost.tracking.config import TrackingConfig

CELL_CHARS = 400  # of a sampled answer; the whole text is in samples.jsonl


def headline(scalars: dict[str, float]) -> dict[str, str]:
    """The few readings worth a line, formatted; those that are not there are left out.

    `reward` is `reward/mean`, `accuracy` is `reward/accuracy` of the training answers, and `val` is the mean of
    `val/<data source>/accuracy` over the data sources.
    """
    shown = {}
    for label, name in (("reward", "reward/mean"), ("accuracy", "reward/accuracy")):
        if name in scalars:
            shown[label] = f"{scalars[name]:.3f}"
    validation = [v for name, v in scalars.items() if name.startswith("val/") and name.endswith("/accuracy")]
    if validation:
        shown["val"] = f"{sum(validation) / len(validation):.3f}"
    if "throughput/tokens_per_s" in scalars:
        shown["tok/s"] = f"{scalars['throughput/tokens_per_s']:,.0f}"
    return shown


@TRACKERS.register("console")
class ConsoleTracker(Tracker):
    """Writes to standard error, so that standard output stays for the run's result.

    Args:
        console: where to write; None: standard error.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        cfg: TrackingConfig,
        run: RunInfo,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(cfg, run)
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time from which speed is measured
        self._step = 0
        self._shown: dict[str, str] = {}
        self._progress: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._start_bar()

    def _start_bar(self) -> None:
        self._progress = Progress(
            TextColumn("step {task.fields[position]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            refresh_per_second=2,
            # Prints would tear the bar; a redirected standard output is not on the screen and stays as it is.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("", total=self.run.total_steps, position=self._position(), numbers="")
        self._progress.start()

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._step = max(self._step, step)
        if self._first is None:
            self._first = (self._step, self._clock())
        fresh = headline(scalars)
        self._shown |= fresh
        if self._progress is not None:
            numbers = self._line(self._shown)
            self._progress.update(self._task, completed=self._step, position=self._position(), numbers=numbers)
        elif fresh:
            self._plain(f"step {self._position()}  {self._line(fresh)}")

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:
        if self._progress is None:
            for row in rows:
                self._plain(f"step {step} sample  " + "  ".join(f"{k}={_cell(v)!r}" for k, v in row.items()))
            return
        table = Table(title=f"answers at step {step}", title_justify="left", show_lines=True)
        for name in rows[0]:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_cell(row.get(name, ""))) for name in rows[0]))
        self._progress.console.print(table)

    def note(self, text: str) -> None:
        self._plain(text)

    def rewind(self, step: int) -> None:
        self._step = step

    def close(self, failed: bool = False) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _plain(self, line: str) -> None:
        # Text and soft_wrap: a model's answer may look like markup, and a log file has no width.
        self._console.print(Text(line), soft_wrap=True)

    def _position(self) -> str:
        return f"{self._step}/{self.run.total_steps}" if self.run.total_steps else str(self._step)

    def _line(self, shown: dict[str, str]) -> str:
        left = self._left_s()
        parts = [f"{label} {value}" for label, value in shown.items()]
        return "  ".join(parts + ([f"{timedelta(seconds=round(left))} left"] if left is not None else []))

    def _left_s(self) -> float | None:
        """Seconds to the last step at the mean speed so far, validation included; None before a second step."""
        if self._first is None or not self.run.total_steps or self._step <= self._first[0]:
            return None
        first_step, start = self._first
        return (self._clock() - start) / (self._step - first_step) * (self.run.total_steps - self._step)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= CELL_CHARS else text[: CELL_CHARS - 3] + "..."
