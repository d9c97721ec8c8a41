"""What sleep gives back and what waking costs: memory, seconds by part, and the first decoding beside a warm one.

    python -m benchmarks.sleep --model FOLDER [--engine vllm] [--level 1 2] [--variant engine+eager]
        [--prompts 64 --max-tokens 32] [--max-num-seqs 1024] [--gpu-memory-utilization 0.6] [--out FOLDER]

rlpost's own `RolloutEngine`, in a round: a warm call, sleep, waking its weights and then its KV cache, the first call
afterwards, and greedy answers that are compared with those before the first sleep. Calls have prompts of their own, so
that the prefix cache, which sleep empties, answers for neither. Medians of `--repeats` rounds after one to warm up.

Columns: GiB of the first device that the engine holds (awake, asleep), and that waking each part takes (vLLM counts its
sampler's tables, 4 bytes for each sequence and id of the vocabulary, among the weights); GB/s are what
was given back over the seconds of sleep, and taken over those of waking. After a level 2, which drops the weights, an
update brings them from host memory before the KV cache wakes, as a run's publish does; its time is not counted
(`benchmarks.weight_sync` measures that). The first call after waking is as fast as a warm one where graphs survive.
On CPU no engine has memory to give back: sleep and waking are calls that do nothing, and only the tokens say anything.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.common import write
from benchmarks.rollout import add_arguments, prepare
from benchmarks.rollout_paths import answer, started
from benchmarks.rollout_variants import Workload, parse
from rlpost.platform import platform
from rlpost.workers.rollout.base import RolloutEngine, SamplingSpec, WeightManifest
from rlpost.workers.weight_sync.base import check_digests
from rlpost.workers.weight_sync.sender import Sender

DROPS_WEIGHTS = 2  # the level of sleep
NUM_COMPARED = 4  # prompts, each answered alone: what is batched together changes a sum's last bits
BUCKET_BYTES = 256 << 20
GIB, GB = 2**30, 1e9


@dataclass(slots=True, frozen=True, kw_only=True)
class Round:
    """One sleep. Bytes are what the engine holds of the device at that moment."""

    awake: int
    asleep: int
    with_weights: int
    woken: int
    sleep_s: float
    weights_s: float
    kv_cache_s: float
    warm_s: float
    first_s: float
    same_tokens: bool


def summary(level: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """The table's row: medians, and whether the tokens were the same in every round. No memory, no columns of it."""
    row: dict[str, Any] = {"level": level}
    if any(r.awake for r in rounds):
        row |= {
            "awake_gib": _median(r.awake / GIB for r in rounds),
            "asleep_gib": _median(r.asleep / GIB for r in rounds),
            "weights_gib": _median((r.with_weights - r.asleep) / GIB for r in rounds),
            "kv_cache_gib": _median((r.woken - r.with_weights) / GIB for r in rounds),
            "sleep_gb_per_s": _median((r.awake - r.asleep) / GB / r.sleep_s for r in rounds),
            "wake_gb_per_s": _median((r.woken - r.asleep) / GB / (r.weights_s + r.kv_cache_s) for r in rounds),
        }
    return row | {
        "sleep_s": _median(r.sleep_s for r in rounds),
        "wake_weights_s": _median(r.weights_s for r in rounds),
        "wake_kv_cache_s": _median(r.kv_cache_s for r in rounds),
        "first_s": _median(r.first_s for r in rounds),
        "warm_s": _median(r.warm_s for r in rounds),
        "same_tokens": all(r.same_tokens for r in rounds),
    }


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 4)


class Checkpoint:
    """Plays the train engine: brings the weights that the engine started with, from host memory."""

    def __init__(self, folder: str):
        self._folder, self._dtype, self._version = Path(folder), platform().dtype("auto"), 0
        self._sender = Sender("shm", self, self._dtype, BUCKET_BYTES)  # type: ignore[arg-type]

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the files in turn."""
        for path in sorted(self._folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name).to(dtype)

    async def load(self, engine: RolloutEngine) -> None:
        """Update the weights of `engine`, as a publish does."""
        self._version += 1
        await engine.begin_update(WeightManifest(version=self._version, tensors=self._sender.manifest()))
        while bucket := self._sender.next_bucket():
            await engine.load_bucket(bucket)
        digest = await engine.finish_update(self._version)
        check_digests([self._sender.close()], {0: digest}, self._version)


@dataclass(slots=True, frozen=True, kw_only=True)
class Measurement:
    """What a round is made of.

    Attributes:
        decode: answers a call of prompts that no other has; returns its seconds.
        tokens: greedy answers, the same requests every time.
        reload: brings weights that were dropped.
        held_bytes: of the device, by the engine.
    """

    engine: RolloutEngine
    decode: Callable[[], Awaitable[float]]
    tokens: Callable[[], Awaitable[list[list[int]]]]
    reload: Callable[[], Awaitable[None]]
    held_bytes: Callable[[], int]

    async def round(self, level: int, expected: list[list[int]]) -> Round:
        """One sleep and all that follows; `expected` are the tokens from before any sleep."""
        warm_s, awake = await self.decode(), self.held_bytes()
        sleep_s = await seconds(self.engine.sleep(level))
        asleep = self.held_bytes()
        weights_s = await seconds(self.engine.wake(["weights"]))
        with_weights = self.held_bytes()
        if level == DROPS_WEIGHTS:
            await self.reload()
        before_cache = self.held_bytes()
        kv_cache_s = await seconds(self.engine.wake(["kv_cache"]))
        cache = self.held_bytes() - before_cache  # without what an update may have left
        return Round(
            awake=awake,
            asleep=asleep,
            with_weights=with_weights,
            woken=with_weights + cache,
            sleep_s=sleep_s,
            weights_s=weights_s,
            kv_cache_s=kv_cache_s,
            warm_s=warm_s,
            first_s=await self.decode(),
            same_tokens=await self.tokens() == expected,
        )

    async def rounds(self, level: int, expected: list[list[int]], repeats: int) -> list[Round]:
        """`repeats` of them, after one that does not count."""
        return [await self.round(level, expected) for _ in range(repeats + 1)][1:]


async def seconds(work: Awaitable[None]) -> float:
    """How long `work` takes."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each level, of one start of the engine."""
    variant, here = parse(f"{args.variant}+sleep"), platform()
    workload, calls = Workload.of(args, variant), itertools.count()
    free = here.free_memory_bytes()
    with started(variant, args) as (engine, info, runner):
        greedy = SamplingSpec(temperature=0.0, max_tokens=args.max_tokens, vocab_size=info.vocab_size, logprobs_every=0)
        compared = workload.prompts(next(calls), info.vocab_size)[:NUM_COMPARED]
        checkpoint = Checkpoint(info.path)

        async def tokens() -> list[list[int]]:
            answers = [await engine.generate(ids, greedy, None, f"greedy/{i}") for i, ids in enumerate(compared)]
            return [completion.token_ids.tolist() for (completion,) in answers]

        measurement = Measurement(
            engine=engine,
            decode=lambda: answer(engine, info, workload, variant, next(calls)),
            tokens=tokens,
            reload=lambda: checkpoint.load(engine),
            held_bytes=lambda: free - here.free_memory_bytes(),
        )
        expected = runner.run(tokens())
        for level in sorted(set(args.level)):
            rounds = runner.run(measurement.rounds(level, expected, args.repeats))
            yield {"variant": args.variant} | summary(level, rounds)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["vllm", "sglang", "hf"])
    parser.set_defaults(prompts=64, n=1, max_tokens=32, repeats=5, replicas=1, num_workers=1)
    parser.add_argument("--level", type=int, nargs="+", choices=[1, 2], default=[1], help="1 keeps weights, 2 does not")
    parser.add_argument("--variant", default="engine", help="as of benchmarks.rollout, such as engine+eager")
    parser.add_argument("--out", type=Path, help="a folder for sleep-ENGINE-MODEL[+CHANGES].json and .md")
    args = parser.parse_args()
    if parse(args.variant).path != "engine":
        parser.error(f"--variant {args.variant}: the path is engine here, which changes may follow")
    return args


def main() -> None:
    """Measure every level; a line each, then the table of those that were measured."""
    args = parse_args()
    model, rows = prepare(args), []
    try:
        for row in measure(args):
            rows.append(row)
            print("ROW " + json.dumps(row), flush=True)
    finally:
        notes = (
            f"{args.engine}, {args.model} {args.shape or ''}: calls of {args.prompts} prompts of {args.prompt_tokens} "
            f"tokens x {args.n}, {args.lengths} lengths up to {args.max_tokens}; max_num_seqs {args.max_num_seqs}, "
            f"gpu_memory_utilization {args.gpu_memory_utilization}; medians of {args.repeats} rounds"
        )
        if platform().kind == "cpu":
            notes += ". On CPU sleep frees nothing"
        write(args.out, f"sleep-{args.engine}-{model}{args.variant.removeprefix('engine')}", rows, notes)


if __name__ == "__main__":
    main()
