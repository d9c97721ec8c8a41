"""TensorBoard event files in `<run folder>/tensorboard`; those of an earlier run there become `tensorboard.old`."""

from typing import Any

from rlpost.files import set_aside
from rlpost.tracking.base import TRACKERS, RunInfo, Tracker, require
from rlpost.tracking.config import TrackingConfig


@TRACKERS.register("tensorboard")
class TensorboardTracker(Tracker):
    """Scalars under their own names; sampled answers as a Markdown table under `samples`."""

    def __init__(self, cfg: TrackingConfig, run: RunInfo):
        super().__init__(cfg, run)
        require("tensorboard", "tracking.logger=tensorboard")
        self._writer_class = require("torch.utils.tensorboard", "tracking.logger=tensorboard").SummaryWriter
        self._writer: Any = None
        self._purge_step: int | None = None

    def log(self, step: int, scalars: dict[str, float]) -> None:
        writer = self._opened()
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:
        names = list(rows[0])
        lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |" for row in rows]
        self._opened().add_text("samples", "\n".join(lines), step)

    def rewind(self, step: int) -> None:
        self._purge_step = step + 1  # TensorBoard hides earlier events from this step on

    def close(self, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        # Not in __init__: the step to purge from is known only once the run has resumed.
        if self._writer is None:
            folder = self.run.folder / "tensorboard"
            if self._purge_step is None:
                set_aside(folder)
            self._writer = self._writer_class(str(folder), purge_step=self._purge_step)
        return self._writer


def _cell(value: Any) -> str:
    """Text of one Markdown cell: a pipe or a line break would end it."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
