"""rlpost, verl and TRL do the same GRPO steps one after another on one GPU: seconds, tokens, memory, side by side.

    python -m benchmarks.peers --model 0.6b --tokenizer SMOLLM2 --lengths fixed512 --out FILE.json \\
        --path verl=A:B:C --path trl=A:C --path rlpost=C

Results are merged into FILE.json (and FILE.md beside it), so that systems may be measured by separate calls on one
GPU. See benchmarks/README.md.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.cell import MICRO_TOKENS, Cell, Lengths, parse_lengths
from benchmarks.peers.process import gpu_name, run, turn
from benchmarks.peers.steps import summary
from benchmarks.peers.systems import SYSTEMS, System
from benchmarks.peers.table import table
from benchmarks.shapes import VOCABULARY

ROOT = Path(__file__).resolve().parents[2]
FACTS = "import json; from benchmarks.common import environment; print(json.dumps(environment()))"
VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, help=f"{', '.join(MICRO_TOKENS)} (random weights), or a checkpoint folder"
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of SmolLM2's tokenizer, for random weights")
    parser.add_argument("--systems", default="verl,trl,rlpost", help="in this order")
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("fixed512"))
    parser.add_argument("--prompts", type=int, default=64, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--micro-tokens", type=int, help="tokens of one forward and backward pass")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5, help="of every engine")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="of random weights")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="hf: where there is no GPU")
    parser.add_argument("--path", action="append", default=[], metavar="SYSTEM=A:B", help="ahead on its PYTHONPATH")
    parser.add_argument("--set", action="append", default=[], metavar="SYSTEM:KEY=VALUE", help="a further setting")
    parser.add_argument("--variant", action="append", default=[], metavar="SYSTEM=plain", help="not fast first")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for each system and variant; the steps done by then count"
    )
    parser.add_argument("--work", type=Path, help="folder for weights and logs; default: a temporary one")
    parser.add_argument("--out", type=Path, help="JSON file, merged with what is there")
    args = parser.parse_args(argv)
    for name in args.systems.split(","):
        if name not in SYSTEMS:
            parser.error(f"--systems {name}: expected some of {', '.join(SYSTEMS)}")
    if args.model in MICRO_TOKENS and args.tokenizer is None:
        parser.error("--tokenizer: random weights need SmolLM2's folder")
    return args


def make_cell(args: argparse.Namespace, work: Path, env: dict[str, str]) -> Cell:
    """Make weights and prompts, in a process that leaves the GPU again."""
    lengths: Lengths = args.lengths
    is_shape = args.model in MICRO_TOKENS
    folder = work / "models" / f"{args.model if is_shape else Path(args.model).name}-{lengths.name}"
    num_prompts = args.prompts * (args.warmup + args.steps + 1)
    command = [sys.executable, "-m", "benchmarks.peers.materials", "--shape", args.model, "--lengths", lengths.text]
    command += ["--out", str(folder), "--num-prompts", str(num_prompts)]
    command += ["--vocabulary", str(args.vocabulary)]
    if args.tokenizer:
        command += ["--tokenizer", str(args.tokenizer)]
    subprocess.run(command, check=True, env=env)
    return Cell(
        model=str(folder),
        no_eos=str(folder / "no_eos"),
        prompts=str(folder / "prompts"),
        lengths=lengths,
        num_prompts=args.prompts,
        num_samples=args.samples,
        steps=args.warmup + args.steps,
        micro_tokens=args.micro_tokens or MICRO_TOKENS.get(args.model, 16_384),
        gpu_memory_utilization=args.gpu_memory_utilization,
        engine=args.engine,
    )


def trained(system: System, folder: Path) -> bool:
    """All steps are done."""
    return len(system.steps(folder)) >= system.cell.steps


def measure(system: System, first: str, warmup: int, env: dict[str, str], work: Path, timeout_s: float) -> Any:
    """The row of one system: of the first variant, from `first` on, that does not fail before its steps count."""
    row: dict[str, Any] = {"system": system.name}
    for variant in system.variants[system.variants.index(first) :]:
        folder = Path(tempfile.mkdtemp(prefix=f"{system.name}-{variant}-", dir=work))
        command = system.command(variant, folder)
        print(f"{system.name} ({variant}): {folder}/log.txt", flush=True)
        outcome = run(command, env, folder, partial(trained, system, folder), timeout_s)
        steps = system.steps(folder)
        row |= {"variant": variant, "ended": outcome.ended, "command": command, "log": str(folder / "log.txt")}
        if len(steps) > warmup:
            start_s = steps[0].end_s - outcome.started_s
            row |= summary(steps, warmup) | {"first_step_after_s": start_s, "peak_memory_mib": outcome.peak_memory_mib}
            return row
        tail = "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-30:])
        print(f"{system.name} ({variant}): {outcome.ended} after {len(steps)} steps\n{tail}", flush=True)
        if outcome.ended == "timeout":  # says nothing about the settings
            break
    return row


def system_env(name: str, paths: dict[str, str]) -> dict[str, str]:
    """Environment of one system: its packages first, then this repository."""
    ahead = paths.get(name, os.environ.get("PYTHONPATH", ""))
    parts = [*ahead.split(os.pathsep), str(ROOT)] if ahead else [str(ROOT)]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(parts)), "HF_HUB_OFFLINE": "1"}


def ask(script: str, arguments: Sequence[str], env: dict[str, str]) -> dict[str, str]:
    """What a script prints as JSON; in a process of its own, since it may look at the GPU, or needs another's path."""
    told = subprocess.run([sys.executable, "-c", script, *arguments], env=env, check=True, stdout=subprocess.PIPE)
    return json.loads(told.stdout.splitlines()[-1])


def device() -> str:
    """The GPU's name, without touching it."""
    try:
        query = ["nvidia-smi", f"--id={gpu_name()}", "--query-gpu=name,uuid", "--format=csv,noheader"]
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "cpu"


def save(out: Path | None, facts: dict[str, Any], row: dict[str, Any]) -> None:
    """Merge the row into `out` and print the table.

    A system's newest row replaces its older one, unless only the older one has figures.
    """
    rows = json.loads(out.read_text())["rows"] if out is not None and out.is_file() else []
    older = next((old for old in rows if old["system"] == row["system"]), None)
    if older is None or "step_s" in row or "step_s" not in older:
        rows = [old for old in rows if old is not older] + [row]
    text = table(rows, facts)
    print(text, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
        out.with_suffix(".md").write_text(text + "\n")


def end_on_sigterm() -> None:
    """Leave in order, so that what was started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    end_on_sigterm()
    work = (args.work or Path(tempfile.mkdtemp(prefix="peers-work-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    paths = dict(item.split("=", 1) for item in args.path)
    first = dict(item.split("=", 1) for item in args.variant)
    cell = make_cell(args, work, system_env("rlpost", paths))
    facts = ask(FACTS, [], system_env("rlpost", paths)) | {
        "device": device(),
        "model": args.model,
        "lengths": args.lengths.name,
    }
    facts |= {"batch": f"{args.prompts} x {args.samples}", "warmup": str(args.warmup)}
    missing = []
    for name in args.systems.split(","):
        further = [item.split(":", 1)[1] for item in args.set if item.split(":", 1)[0] == name]
        system, env = SYSTEMS[name](cell, further), system_env(name, paths)
        env |= system.environment
        with turn(name) if system.alone else nullcontext():
            row = measure(system, first.get(name, "fast"), args.warmup, env, work, args.timeout)
        row |= {"device": device(), "versions": ask(VERSIONS, system.packages, env)}
        save(args.out, facts, row)
        if "step_s" not in row:
            missing.append(name)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
