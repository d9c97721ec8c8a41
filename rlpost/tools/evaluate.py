"""Generation and evaluation alone: `python -m rlpost.tools.evaluate model=hf model.path=... data=gsm8k reward=number`.

Samples `data.val_files` with `rollout.val_kwargs`, scores the answers, writes them to
`<run folder>/answers.jsonl` and prints the metrics of each data source as JSON.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rlpost.config import Config
from rlpost.endings import begun
from rlpost.launch import launch


def execute(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Evaluate `cfg.model` on `cfg.data.val_files`.

    Raises:
        ValueError: no validation files.
    """
    if not cfg.data.val_files:
        raise ValueError("data.val_files is empty: nothing to evaluate on")
    return asyncio.run(_execute(cfg, run_dir))


async def _execute(cfg: Config, run_dir: Path) -> dict[str, Any]:
    from rlpost.trainer.build import build_evaluator, build_placement, build_pool, prepare, start_ray

    async with AsyncExitStack() as stack:
        facts = prepare(cfg)
        evaluator = build_evaluator(cfg, facts)
        assert evaluator is not None
        stack.callback(start_ray(cfg.cluster))
        pool = await build_pool(cfg, facts, build_placement(cfg, stack), stack)
        with begun():
            report, groups = await evaluator.run(pool.run)
        with open(run_dir / "answers.jsonl", "w") as file:
            for row in evaluator.rows(groups):
                file.write(json.dumps(row) + "\n")
        return {**report, "run_dir": str(run_dir)}


if __name__ == "__main__":
    launch(execute)
