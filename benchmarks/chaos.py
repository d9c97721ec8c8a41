"""`kill -9` again and again: runs whose processes are killed at random moments, beside the same ones undisturbed.

    python -m benchmarks.chaos --kills 50 --seed 1 --engine hf --trainer colocated fully_async [--out FILE]

Every run takes `--kills-per-run` of them; its targets and moments follow from the seed. Exit status 1: a
group was lost or trained twice, a run did not get on, or its ledger or (engine hf) losses are others, where colocated.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import cycle, product
from pathlib import Path

from rlpost.trainer.about import versions
from tests.e2e.chaos import Blow, Chaos, Comparison, Target, compare, num_steps, overrides, plan
from tests.e2e.runs import Run, write_checkpoint

MOMENTS = ("start", "issued", "scored", "trained", "saved")
EARLY = 0.25  # of kills after a restart


@dataclass(slots=True, kw_only=True)
class Result:
    """One run."""

    engine: str
    trainer: str
    steps: int
    wall_s: float
    blows: list[Blow]
    comparison: Comparison
    problems: list[str]

    def row(self) -> str:
        """Of the table of runs."""
        ended, compared = sum(blow.ended for blow in self.blows), self.comparison
        deviation = "" if compared.deviation is None else f"{compared.deviation:.1e}"
        cells = [self.engine, self.trainer, self.steps, len(self.blows), ended, compared.lost, compared.repeated]
        return "| " + " | ".join(map(str, [*cells, deviation, f"{self.wall_s:.0f}"])) + " |"


def disturbed(folder: Path, checkpoint: Path, engine: str, trainer: str, num_kills: int, seed: int) -> Result:
    """A run with kills, and then the colocated one without, in `folder`."""
    kills = plan(num_kills, seed, early=EARLY)
    steps = num_steps(kills)
    start = time.monotonic()
    chaos = Chaos(Run(folder / "disturbed", *overrides(checkpoint, engine, trainer, steps, 2 * num_kills)))
    chaos.to_the_end(kills)
    wall_s = time.monotonic() - start
    undisturbed = Run(folder / "undisturbed", *overrides(checkpoint, engine, "colocated", steps, 0))
    undisturbed.succeed()
    chaos.check_processes()
    in_turn = trainer == "colocated"
    comparison = compare(chaos.run, undisturbed, ledger=in_turn, metrics=in_turn and engine == "hf")
    return Result(
        engine=engine,
        trainer=trainer,
        steps=steps,
        wall_s=wall_s,
        blows=chaos.blows,
        comparison=comparison,
        problems=[*chaos.problems, *comparison.problems],
    )


def report(results: Sequence[Result], command: str) -> str:
    """Kills by target and moment, and the runs, as Markdown."""
    blows = [blow for result in results for blow in result.blows]
    counts = Counter((blow.target, blow.at) for blow in blows)
    ended = Counter(blow.target for blow in blows if blow.ended)
    lines = [
        f"# Chaos: {len(blows)} kills",
        "",
        f"{date.today()}, {', '.join(f'{name} {version}' for name, version in versions().items())}:",
        "",
        "```",
        command,
        "```",
        "",
        "Kills by target, and by the last record in the ledger at that moment (start: none yet since the command was "
        "started):",
        "",
        f"| target | {' | '.join(MOMENTS)} | kills | run resumed |",
        "|---" * (len(MOMENTS) + 3) + "|",
    ]
    for target in Target:
        cells = [counts[target, at] for at in MOMENTS]
        lines.append(f"| {target} | {' | '.join(map(str, cells))} | {sum(cells)} | {ended[target]} |")
    lines += [
        "",
        "| engine | trainer | steps | kills | resumes | groups lost | groups repeated | metrics differ by | wall s |",
        "|---" * 9 + "|",
        *(result.row() for result in results),
        "",
    ]
    problems = [problem for result in results for problem in result.problems]
    lost, repeated = (sum(getattr(r.comparison, name) for r in results) for name in ("lost", "repeated"))
    lines.append(
        f"{len(blows)} kills, {sum(blow.ended for blow in blows)} resumes, groups lost {lost}, repeated {repeated}, "
        f"problems {len(problems)}."
    )
    return "\n".join([*lines, *(f"- {problem}" for problem in problems)]) + "\n"


def main() -> int:
    """Runs of every engine and trainer that is named, until there were as many kills as asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="Kill -9, again and again.")
    parser.add_argument("--kills", type=int, default=50, help="in all, at least; rounded up to whole runs")
    parser.add_argument("--kills-per-run", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=1, help="runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", nargs="+", default=["hf"], choices=["hf", "vllm"])
    parser.add_argument("--trainer", nargs="+", default=["colocated", "fully_async"])
    parser.add_argument("--out", type=Path, help="file for the report, written after each run")
    options = parser.parse_args()
    command = "python -m benchmarks.chaos " + " ".join(sys.argv[1:])
    kinds = cycle(product(options.engine, options.trainer))
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as root, ThreadPoolExecutor(options.at_once) as pool:
        checkpoint = write_checkpoint(Path(root) / "checkpoint")

        def one(number: int, kind: tuple[str, str]) -> Result:
            seed, folder = options.seed + number, Path(root) / str(number)
            return disturbed(folder, checkpoint, *kind, options.kills_per_run, seed)

        for result in pool.map(one, range(-(-options.kills // options.kills_per_run)), kinds):
            results.append(result)
            text = report(results, command)
            if options.out:
                options.out.write_text(text)
            print(text, flush=True)
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
