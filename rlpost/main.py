"""`python -m rlpost.main`: train. See `rlpost.launch` for what the exit status says."""

from pathlib import Path
from typing import Any

from rlpost.config import Config
from rlpost.launch import launch


def execute(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Train `cfg` to its end in `run_dir`."""
    from rlpost.trainer.build import execute as train  # heavy imports only once the configuration is known to be right

    return train(cfg, run_dir)


if __name__ == "__main__":
    launch(execute)
