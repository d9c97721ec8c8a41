"""Do engine and trainer agree? `python -m rlpost.tools.check model=hf model.path=FOLDER rollout=vllm`.

Both compute the logprobs of the same sampled tokens: as loaded, after a weight sync, after a sleep, with weights that
were changed and not synced (which the parity gate must notice), and after syncing those. Where they disagree, suspects
are cleared one at a time, until the two agree. `trainer.parity_probe_size` sequences are compared in each stage.

Tables go to standard error, JSON to standard output and `<run folder>/check.json`. Exit status: 0 all is well, 1 not.
"""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.algos.config import AlgoConfig
from rlpost.config import Config
from rlpost.launch import launch
from rlpost.rewards.config import RewardConfig, RewardTermConfig

if TYPE_CHECKING:
    from rlpost.tools.agreement import Stage
    from rlpost.tools.variants import Trial


def execute(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Compare, narrow the cause where there is one to find, and report."""
    return asyncio.run(_execute(prepared(cfg), run_dir))


def prepared(cfg: Config) -> Config:
    """`cfg` with nothing but an actor: no reference, no critic, and a reward that cannot fail."""
    cfg.algo = AlgoConfig(adv_estimator="reinforce_plus_plus")
    length = RewardTermConfig(fn="length", kwargs={"max_length": cfg.data.max_response_length})
    cfg.reward = RewardConfig(terms={"length": length})
    return cfg


async def _execute(cfg: Config, run_dir: Path) -> dict[str, Any]:
    from rlpost.platform import platform
    from rlpost.tools.agreement import examine
    from rlpost.tools.variants import conclude, narrow, needs_trials, suspects
    from rlpost.trainer.build import prepare, start_ray

    for role in (cfg.rollout, cfg.actor):  # what `auto` means, so that a variant is seen to change nothing
        role.dtype = str(platform().dtype(role.dtype)).removeprefix("torch.")
    facts = prepare(cfg)
    stop_ray = start_ray(cfg.cluster)
    try:
        stages = await examine(cfg, facts)
        trials: list[Trial] = []
        if needs_trials(stages):
            trials = await narrow(
                cfg, suspects(cfg, platform().kind), lambda variant: examine(variant, prepare(variant))
            )
    finally:
        stop_ray()
    summary = {
        "passed": all(stage.passed for stage in stages),
        "cause": conclude(stages, trials),
        "model": cfg.model.path,
        "engine": cfg.rollout.name,
        "platform": platform().kind,
        "dtype": {"engine": cfg.rollout.dtype, "trainer": cfg.actor.dtype},
        "limit": stages[0].limit,
        "stages": [dataclasses.asdict(stage) | {"agrees": stage.agrees, "passed": stage.passed} for stage in stages],
        "variants": [dataclasses.asdict(trial) for trial in trials],
        "run_dir": str(run_dir),
    }
    (run_dir / "check.json").write_text(json.dumps(summary, indent=1))
    show(summary, stages, trials)
    return summary


def show(summary: dict[str, Any], stages: "list[Stage]", trials: "list[Trial]") -> None:
    """The tables, on standard error."""
    from rich.console import Console
    from rich.table import Table

    from rlpost.tools.agreement import SIZES

    console = Console(stderr=True)
    dtype = summary["dtype"]
    title = f"{summary['model']}: {summary['engine']} ({dtype['engine']}) and trainer ({dtype['trainer']})"
    table = Table("difference of logprobs, nats", "tokens", "mean", "p99", "max", "", title=title, title_justify="left")
    for stage in stages:
        p, verdict = stage.parity, "agree" if stage.agrees else "differ"
        numbers = (f"{value:.1e}" for value in (p.mean, p.p99, p.max))
        mark = f"[green]{verdict}" if stage.passed else f"[bold red]{verdict}"
        table.add_row(stage.name, str(p.num_tokens), *numbers, mark + ("" if stage.expected else ", as meant"))
    console.print(table)
    shares = Table("tokens by difference", *(stage.name for stage in stages))
    bins = [f"to {size:.0e}" for size in SIZES] + ["above"]
    for i, label in enumerate(bins):
        shares.add_row(label, *(bar(stage.histogram[i] / stage.parity.num_tokens) for stage in stages))
    console.print(shares)
    for trial in trials:
        result = trial.error or f"{trial.mean:.1e}, {'all stages pass' if trial.agrees else 'still wrong'}"
        console.print(f"tried {trial.variant.name} ({trial.variant.settings}): {result}", markup=False)
    console.print("engine and trainer agree" if summary["passed"] else f"cause: {summary['cause']}", markup=False)


def bar(share: float, width: int = 8) -> str:
    """A share of 1 as a bar and a percentage; "" for nothing."""
    return f"{'█' * max(1, round(share * width))} {share:.0%}" if share else ""


if __name__ == "__main__":
    launch(execute)
