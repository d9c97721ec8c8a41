"""What a run tells: metrics of each step, validation tables, rollouts on disk, and the closing summary."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlpost.tracking.curves import plot_curves
from rlpost.tracking.tracking import Tracking
from rlpost.trajectory import Group


class Reporter:
    """Sends numbers to the trackers and keeps what the summary needs.

    Args:
        tracking: the trackers.
        folder: the run folder.
        decode: token ids -> text, for rollouts on disk.
        rollout_dir: every rollout as JSONL, one file a step; None: off.
    """

    def __init__(
        self,
        tracking: Tracking,
        folder: Path,
        *,
        decode: Callable[[Any], str],
        rollout_dir: Path | None,
    ):
        self._tracking, self.folder = tracking, folder
        self.decode, self._rollout_dir = decode, rollout_dir
        self._validations: list[dict[str, float]] = []
        self._first_rows: list[dict[str, Any]] = []
        self._last_rows: list[dict[str, Any]] = []

    def step(self, step: int, values: dict[str, float]) -> None:
        """Log one training step."""
        tokens, seconds = values.get("throughput/tokens", 0.0), values.get("timing_s/step", 0.0)
        if seconds:
            values["throughput/tokens_per_s"] = tokens / seconds
        self._tracking.log(step, values)

    def validation(self, step: int, report: dict[str, float], rows: list[dict[str, Any]]) -> None:
        """Log one validation with its table of answers."""
        self._tracking.log(step, report)
        self._tracking.table(step, rows)
        self._validations.append({"step": step, **report})
        if step == 0:
            self._first_rows = rows
        else:
            self._last_rows = rows

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Write the step's trajectories to `rollout_dir/<step>.jsonl`."""
        if self._rollout_dir is None:
            return
        self._rollout_dir.mkdir(parents=True, exist_ok=True)
        with open(self._rollout_dir / f"{step}.jsonl", "w") as file:
            for group in groups:
                for t in group.trajectories:
                    row = {
                        "group": group.id,
                        "sample": t.sample_id,
                        "data_source": group.data_source,
                        "prompt": group.prompt.text,
                        "answer": self.decode(t.response_ids),
                        "ground_truth": group.prompt.ground_truth,
                        "reward": t.reward,
                        "parts": t.reward_parts,
                        "status": str(t.status),
                        "error": t.error,
                        "num_tokens": len(t.response_ids),
                        "version": int(t.versions.max()),
                    }
                    file.write(json.dumps(row, default=str) + "\n")

    def summary(self, step: int, wall_s: float, finished: bool) -> dict[str, Any]:
        """The last line of output. Accuracy is that of the last validation's first set, before the first step and after
        it, None where there was none."""
        headline = next((k for v in reversed(self._validations) for k in v if k.endswith("/accuracy")), "")
        before = [v.get(headline) for v in self._validations if v["step"] == 0]
        after = [v.get(headline) for v in self._validations if v["step"] > 0]
        return {
            "accuracy_before": before[0] if before else None,
            "accuracy_after": after[-1] if after else None,
            "steps": step,
            "wall_s": round(wall_s, 1),
            "finished": finished,
            "run_dir": str(self.folder),
        }

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        self._tracking.note(text)

    def finish(self) -> None:
        """Close the trackers, draw the curves, and say where everything is and how answers changed."""
        metrics = self.folder / "metrics.jsonl"
        if metrics.is_file():
            self.note(f"metrics     {metrics}")
            try:
                self.note(f"curves      {plot_curves(metrics, self.folder / 'curves.png')}")
            except ValueError as error:  # no matplotlib, or nothing logged: no reason to fail a finished run
                self.note(f"curves      none: {error}")
        for name in ("tensorboard", "checkpoints", "hf"):
            if (self.folder / name).exists():
                self.note(f"{name:<11} {self.folder / name}")
        after = {row["prompt"]: row["answer"] for row in self._last_rows}
        for row in self._first_rows:
            if row["prompt"] in after:
                self.note(
                    f"sample      {row['prompt']!r} (right: {row['ground_truth']!r})  "
                    f"before {row['answer']!r}  after {after[row['prompt']]!r}"
                )
        self._tracking.close()

    def close(self) -> None:
        """Close the trackers of a run that did not get to `finish`; safe after it."""
        self._tracking.close(failed=True)

    def state_dict(self) -> dict[str, Any]:
        """Validations so far, so that a resumed run still knows its start."""
        return {"validations": self._validations, "first_rows": self._first_rows}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Restore `state_dict` and drop what the trackers logged after `step`."""
        self._validations, self._first_rows = state["validations"], state["first_rows"]
        self._tracking.rewind(step)
