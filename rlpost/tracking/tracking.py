"""All trackers of a run behind one object; the trainer talks to nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.tracking.base import RunInfo, Tracker, tracker_class
from rlpost.tracking.config import TrackingConfig


class Tracking:
    """Passes every call on to each of its trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker] = ()):
        self.trackers = list(trackers)
        self._closed = False

    @classmethod
    def build(
        cls, cfg: TrackingConfig, folder: Path, config: dict[str, Any] | None = None, total_steps: int | None = None
    ) -> "Tracking":
        """The trackers that `cfg.logger` names, writing below `folder`.

        Args:
            cfg: the `tracking` section.
            folder: the run folder; made when missing.
            config: the composed config as plain containers, for the trackers that show it.
            total_steps: length of the run, for the time left.

        Raises:
            ValueError: an unknown tracker, or one whose package is missing; those already opened are closed.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        run = RunInfo(folder=folder, config=config or {}, total_steps=total_steps)
        classes = [tracker_class(name) for name in cfg.logger]
        tracking = cls()
        try:
            for tracker in classes:
                tracking.trackers.append(tracker(cfg, run))
        except BaseException:
            tracking.close(failed=True)
            raise
        return tracking

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Record readings of one step."""
        for tracker in self.trackers:
            tracker.log(step, scalars)

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record sampled answers, one row an answer."""
        if rows:
            for tracker in self.trackers:
                tracker.table(step, rows)

    def note(self, text: str) -> None:
        """Tell the person watching; nothing is recorded."""
        for tracker in self.trackers:
            tracker.note(text)

    def rewind(self, step: int) -> None:
        """The run resumes after `step`: drop what was logged beyond it. Call before the first `log`."""
        for tracker in self.trackers:
            tracker.rewind(step)

    def close(self, failed: bool = False) -> None:
        """Close every tracker; `failed` marks the run so where a tracker can. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for tracker in self.trackers:
            tracker.close(failed)
