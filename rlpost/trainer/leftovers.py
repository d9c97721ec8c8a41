"""What an earlier run left in a folder in which another begins anew: kept, but not among the new files."""

from pathlib import Path

from rlpost.files import set_aside
from rlpost.trainer.replay import REPLAY


def set_earlier_aside(run_dir: Path, rollout_dir: Path | None) -> None:
    """Rename what could pass for the new run's to `*.old`: replay bundles, rollouts, exported model, pictures.

    Trackers and checkpoints do so by themselves.

    Other files in `rollout_dir`, which may be any folder of the user's, are left alone.
    """
    for name in (REPLAY, "hf", "curves.png", "timeline.png"):
        set_aside(run_dir / name)
    if rollout_dir is not None:
        for path in rollout_dir.glob("*.jsonl"):
            if path.stem.isdigit():
                set_aside(path)
