"""Will it fit, and how long is a step? `python -m rlpost.tools.plan [key=value ...]`, without a GPU.

Takes the overrides that `rlpost.main` would get, and keys of its own: the hardware, how long answers are, and the
constants of its model.

    python -m rlpost.tools.plan hardware=h200 num_gpus=8 model=hf model.path=Qwen/Qwen3-8B mean_length=800
"""

import argparse
import json
import sys

from rlpost.tools.planning.advice import advise, faster
from rlpost.tools.planning.costs import predict_costs
from rlpost.tools.planning.memory import predict_memory
from rlpost.tools.planning.report import Plan, as_json, as_text
from rlpost.tools.planning.run import PLAN_KEYS, Run, read_run
from rlpost.tools.planning.steps import predict_step


def main(arguments: list[str] | None = None) -> int:
    """The command; exit status 1 where something does not fit, 2 where the words are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.tools.plan",
        description="Peak memory by phase and step time of a run, before it is launched.",
        epilog=f"keys beside those of the config: {', '.join(PLAN_KEYS)}",
    )
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    args = parser.parse_args(arguments)
    try:
        plan = make_plan(read_run(args.words))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(plan), indent=1) if args.json else as_text(plan))
    return 0 if plan.fits else 1


def make_plan(run: Run) -> Plan:
    """Predict everything; the step time only where an engine can work at all."""
    memory = predict_memory(run)
    step = None if memory.engine.problem else predict_step(run, predict_costs(run, memory.engine), memory.engine)
    changes = faster(run, step.step_s) if step is not None and memory.fits else []
    return Plan(run=run, memory=memory, advice=advise(run, memory.phases), step=step, faster=changes)


if __name__ == "__main__":
    sys.exit(main())
