"""The rollout phase against the bare engine that is given the same requests: tokens/s and ms a decoding step.

    python -m benchmarks.rollout --model FOLDER [--engine vllm] [--prompts 256 --n 8 --max-tokens 512]
        [--lengths fixed|long] [--variants bare,bare+logprobs,engine,pool] [--out FOLDER] [--profile FOLDER]

A variant is a path and what it changes, joined by `+`. Paths: `bare` is the engine's offline API (`vllm.LLM.generate`,
`sglang.Engine.generate`), `engine` rlpost's `RolloutEngine` in one process, `pool` all that a training step does: Ray,
workflow workers, a reward that scores a constant, and the batch. See `benchmarks.rollout_variants` for the changes.
`--engine instant` answers at once: what it takes is what everything but an engine costs.

Each group of variants that one start of an engine can serve runs in a process of its own, so that memory is free again
and one that fails costs the others nothing. The first call warms up; every call has prompts of its own, or the prefix
cache would answer for them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks import instant_engine, shapes
from benchmarks.common import write
from benchmarks.rollout_paths import PATHS
from benchmarks.rollout_variants import DEFAULT, Variant, Workload, parse
from rlpost.workers.config import ModelConfig
from rlpost.workers.model import inspect


def write_shape(shape: str, tokens: PreTrainedTokenizerBase, folder: Path) -> None:
    """A randomly initialised Qwen3 of `shape` with someone's tokenizer, unless `folder` holds it already."""
    if (folder / "tokenizer_config.json").is_file():
        return
    own = {"vocab_size": len(tokens)} if shape == "tiny" else {}  # larger ones are padded, as Qwen3's are
    shapes.write(shapes.config(shape, eos_token_id=tokens.eos_token_id, bos_token_id=None, **own), folder)
    tokens.save_pretrained(folder)


def measure(path: str, variants: list[Variant], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One engine start: every variant warm; the fastest of `--repeats` calls."""
    rows = []
    with PATHS[path](variants[0], args) as run:
        for variant in variants:
            workload = Workload.of(args, variant)
            times = []
            for call in range(args.repeats + 1):
                profiled = args.profile is not None and call == args.repeats
                times.append(run(workload, variant, call, profiled))
            best = min(times[1:])
            steps = workload.num_steps(variant.slots(args))
            rows.append(
                {
                    "variant": variant.name,
                    "tokens": workload.num_tokens,
                    "steps": steps,
                    "seconds": round(best, 3),
                    "first_s": round(times[0], 3),
                    "times_s": [round(t, 3) for t in times[1:]],
                    "tokens_per_s": round(workload.num_tokens / best, 1),
                    "ms_per_step": round(1e3 * best / steps, 3),
                }
            )
            print("ROW " + json.dumps(rows[-1]), flush=True)
    return rows


def measure_apart(names: list[str], arguments: list[str]) -> list[dict[str, Any]]:
    """`measure` in a process of its own; what it wrote before it failed counts."""
    command = [sys.executable, "-m", "benchmarks.rollout", *arguments, "--here", "--variants", ",".join(names)]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith("ROW "):
                rows.append(json.loads(line.removeprefix("ROW ")))
    if child.returncode:
        print(f"FAILED {','.join(names)}: exit status {child.returncode}", flush=True)
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Add each row's speed as a share of the fastest bare variant's."""
    bare = [row["tokens_per_s"] for row in rows if row["variant"].split("+")[0] == "bare"]
    for row in rows:
        row["of_best_bare"] = round(row["tokens_per_s"] / max(bare), 3) if bare else None


def notes(args: argparse.Namespace) -> str:
    """Under which circumstances it was measured."""
    return (
        f"{args.engine}, {args.model} {args.shape or ''}: {args.prompts} prompts of {args.prompt_tokens} tokens x "
        f"{args.n}, {args.lengths} lengths up to {args.max_tokens}, max_num_seqs {args.max_num_seqs}, seed {args.seed}"
    )


def add_arguments(parser: argparse.ArgumentParser, engines: Sequence[str]) -> None:
    """Which engine, which model, and the requests of a call."""
    parser.add_argument("--engine", default="vllm", choices=engines)
    parser.add_argument("--model", default="maker:rlpost.tasks.quickstart.make_quickstart", help="as model.path")
    parser.add_argument("--shape", choices=shapes.QWEN3, help="a random Qwen3, with the tokenizer of --model")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/rlpost-benchmarks"), help="for models that are made")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--lengths", choices=["fixed", "long"], default="fixed", help="long: log-normal, cut off")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)


def prepare(args: argparse.Namespace) -> str:
    """Write the model of `--shape`, where it is asked for; a short name of what is loaded."""
    if not args.shape:
        return Path(args.model).name.split(".")[-1]
    _, tokenizer = inspect(ModelConfig(path=args.model), args.cache, seed=1)
    write_shape(args.shape, tokenizer, args.cache / f"qwen3-{args.shape}")
    return args.shape


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["vllm", "sglang", "hf", "instant"])
    parser.add_argument("--num-workers", type=int, default=1, help="workflow workers of the pool")
    parser.add_argument("--replicas", type=int, default=1, help="engines of the pool, all on one GPU")
    parser.add_argument("--variants", default="", help="default: " + " ".join(DEFAULT))
    parser.add_argument("--profile", type=Path, help="a folder for vLLM's torch profiler; costs time, so apart")
    parser.add_argument("--out", type=Path, help="a folder for rollout-ENGINE.json and .md")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # measure in this process
    return parser.parse_args()


def main() -> None:
    """Measure all variants; a line each, then the table."""
    args = parse_args()
    variants = [parse(name) for name in (args.variants.split(",") if args.variants else DEFAULT)]
    if args.here:
        if args.engine == instant_engine.NAME:
            instant_engine.register()
        measure(variants[0].path, variants, args)
        return
    for variant in variants:
        variant.check(args.engine)
    model = prepare(args)
    rows: list[dict[str, Any]] = []
    ordered = sorted(variants, key=lambda v: v.start)
    for _, group in groupby(ordered, key=lambda v: v.start):
        rows += measure_apart([variant.name for variant in group], sys.argv[1:])
    compare(rows)
    write(args.out, f"rollout-{args.engine}-{model}-{args.lengths}", rows, notes(args))


if __name__ == "__main__":
    main()
