"""`python -m rlpost.tools.timeline RUN_FOLDER`: which process was in which phase when, as a picture and a table.

The run must have been told to write this down, with `trainer.timeline=true`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpost.tools.timelines.lanes import find_lanes, find_window, read_spans
from rlpost.tools.timelines.report import as_markdown, draw

NUM_STEPS = 3  # that are shown unless some are named: more do not fit in a picture
MOST_LANES = 8


def main(args: Sequence[str] | None = None) -> int:
    """Draw steps of a run and print where their time went; returns the exit status, 1 where it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.tools.timeline", description="Who did what when in a step.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="one, or the first and the last")
    parser.add_argument("--out", type=Path, help="the picture; RUN_FOLDER/timeline.png")
    parser.add_argument("--lanes", type=int, default=MOST_LANES, help="a kind of processes with more has one for all")
    options = parser.parse_args(args)
    if options.steps and len(options.steps) > 2:
        parser.error("--steps takes one step, or the first and the last")
    first, last = [*(options.steps or []), None, None][:2]
    try:
        spans = read_spans(options.run)
        window = find_window(spans, first, last, NUM_STEPS)
        lanes = find_lanes(spans, window, options.lanes)
        out = draw(lanes, window, options.out or options.run / "timeline.png")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{as_markdown(lanes, window)}\n\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
