"""`python -m rlpost.tools.ledger RUN_DIR`: what became of every prompt group of a run, and whether all is well.

Exit status 1: a group was lost or trained twice, a prompt or a step is missing, or the file is damaged.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpost.trainer.history import History

NUM_SHOWN = 8  # ids of a step


def lines(history: History, all_ids: bool) -> list[str]:
    """Counts, resumes and the groups that each step trained."""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(history.counts().items())) or "none"
    shown = [f"groups       {counts}", f"checkpoint   step {history.saved}"]
    for record in history.resumes:
        undone = record["voided"]
        steps = f" and of steps {', '.join(map(str, undone['steps']))}" if undone["steps"] else ""
        shown.append(f"resumed      after step {record['step']}: undone was work on {undone['groups']} groups{steps}")
    if history.torn_bytes:
        shown.append(f"torn end     {history.torn_bytes} bytes, dropped")
    for step, ids in sorted(history.steps.items()):
        rest = len(ids) - NUM_SHOWN
        text = " ".join(ids) if all_ids or rest <= 0 else " ".join(ids[:NUM_SHOWN]) + f" and {rest} more"
        shown.append(f"step {step:<7} {text}")
    return shown


def main(args: Sequence[str] | None = None) -> int:
    """Print the history of a run folder or ledger file; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.tools.ledger", description="What became of every prompt group."
    )
    parser.add_argument("path", type=Path, help="run folder, or a ledger file")
    parser.add_argument("--all", action="store_true", help="every id of every step")
    parser.add_argument("--json", action="store_true", help="counts, trained ids by step and problems, as JSON")
    options = parser.parse_args(args)
    try:
        history = History.read(options.path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    problems = history.problems()
    if options.json:
        print(json.dumps({"counts": history.counts(), "steps": history.steps, "problems": problems}))
    else:
        print("\n".join([*lines(history, options.all), *problems] if problems else lines(history, options.all)))
        print(f"{len(problems)} problems" if problems else "no group lost, none trained twice")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
