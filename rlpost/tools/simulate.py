"""How fast would it be? `python -m rlpost.tools.simulate [SCENARIO.json] [key=value[,value...] ...]`.

Runs a scenario (keys: `rlpost.tools.simulation.scenario.Scenario`) colocated and fully asynchronous, in virtual time,
through the code that schedules real runs. Several values of a key are a sweep.

    python -m rlpost.tools.simulate devices=32 rollout_share=0.375,0.5,0.625 --plot sweep.png
    python -m rlpost.tools.simulate --calibrate outputs/<colocated run> --save ours.json
    python -m rlpost.tools.simulate ours.json rollout_share=0.5 --against outputs/<async run>
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlpost.tools.simulation.calibrate import SKIPPED, calibrate
from rlpost.tools.simulation.report import compare, markdown, plot, simulate
from rlpost.tools.simulation.scenario import read_scenario


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    args = parse(arguments)
    try:
        print(fitted(args) if args.calibrate else simulated(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; `scenario` and `overrides` are told apart by the equals sign."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.tools.simulate",
        description="Step time, idle shares and staleness, colocated and fully asynchronous, without a GPU.",
    )
    parser.add_argument("words", nargs="*", metavar="SCENARIO.json | key=value[,value...]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the sweep, or the run batch by batch")
    parser.add_argument(
        "--calibrate",
        type=Path,
        action="append",
        metavar="RUN",
        help="fit the costs to a colocated run, or to several: may be repeated; key=value is taken as it is",
    )
    parser.add_argument("--save", type=Path, metavar="JSON", help="with --calibrate: write the scenario")
    parser.add_argument("--against", type=Path, metavar="RUN", help="compare with what an async run measured")
    args = parser.parse_args(arguments)
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        parser.error(f"more than one scenario: {', '.join(files)}")
    args.scenario = Path(files[0]) if files else None
    args.overrides = [word for word in args.words if "=" in word]
    return args


def simulated(args: argparse.Namespace) -> str:
    """Simulate what the command line says; the text to print."""
    swept, scenarios = read_scenario(args.scenario, args.overrides)
    pairs = [simulate(scenario) for scenario in scenarios]
    if args.plot is not None:
        plot(pairs, list(swept), args.plot)
    comparison = compare(pairs[0], args.against, SKIPPED) if args.against is not None else {}
    if args.json:
        rows: list[dict[str, Any]] = [pair.row(list(swept)) for pair in pairs]
        if comparison:
            rows[0]["against"] = {name: {"predicted": p, "measured": m} for name, (p, m) in comparison.items()}
        return json.dumps(rows, indent=1)
    text = markdown(pairs, list(swept))
    if comparison:
        lines = [f"| {name} | {p:.4g} | {m:.4g} | {_off(p, m)} |" for name, (p, m) in comparison.items()]
        text += "\n\n" + "\n".join(["| | predicted | measured | off by |", "|---|---|---|---|", *lines])
    return text


def fitted(args: argparse.Namespace) -> str:
    """Calibrate, save the scenario, and say how well it fits; the text to print."""
    swept, (scenario, *_) = read_scenario(args.scenario, args.overrides)
    if swept:
        raise ValueError(f"--calibrate takes one value of a key; several of {', '.join(swept)}")
    names = [override.partition("=")[0] for override in args.overrides]
    found = calibrate(args.calibrate, {name: getattr(scenario, name) for name in names})
    if args.save is not None:
        args.save.write_text(json.dumps(found.values, indent=1) + "\n")
    if args.json:
        return json.dumps({"scenario": found.values, "errors": found.errors, "notes": found.notes}, indent=1)
    lines = ["| key | value |", "|---|---|", *(f"| {key} | {_short(value)} |" for key, value in found.values.items())]
    lines += ["", "| phase | mean error of the fit |", "|---|---|"]
    lines += [f"| {phase} | {error:.1%} |" for phase, error in found.errors.items()]
    lines += [f"\nmeasured step: {found.measured_step_s:.4g} s", *(f"note: {note}" for note in found.notes)]
    return "\n".join(lines)


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if type(value) in (int, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
