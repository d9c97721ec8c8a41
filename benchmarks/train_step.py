"""The training step and the logprob pass alone: tokens/s, MFU and memory, and where the time goes.

    python -m benchmarks.train_step --model 0.6b 1.7b --packed 4096 16384 32768 --lengths long [--out FOLDER]
    torchrun --nproc-per-node 2 -m benchmarks.train_step --model 1.7b --packed 16384
    python -m benchmarks.train_step --model FOLDER --packed 32768 --micro-batches 3 --trace FOLDER/trace.json.gz
    python -m benchmarks.train_step --model tiny --packed 256 --lengths 64 --trace /tmp/trace.json  # on a CPU

Shapes are those of Qwen3 with random weights, written once to `--cache`. An update is `--micro-batches` packs of
`--packed` tokens on each rank, through `FSDPEngine.train_step` with PPO's clipped loss.

MFU counts what the mathematics needs: 2 P FLOPs a token forward and twice that backward for the P parameters of the
layers, the same for the output embedding at the tokens that are trained, and causal attention, 2 L H D n^2 forward for
a sequence of n tokens. Neither the embedding's look-up nor anything computed twice counts.
"""

import argparse
import gc
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig

from benchmarks import shapes, trace
from benchmarks.common import write
from rlpost.algos.aggregate import loss_weights
from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig
from rlpost.batch import Batch
from rlpost.host import free_port
from rlpost.platform import platform
from rlpost.trajectory import NOT_ASKED, Provenance
from rlpost.workers.config import ActorConfig, ModelConfig, OptimConfig
from rlpost.workers.dispatch import Step, TrainWork
from rlpost.workers.engine.fsdp import FSDPEngine

REPEATS, WARM_UP = 3, 2
MEAN_LONG, MAX_LONG = 1024, 4096


@dataclass(slots=True, frozen=True)
class Load:
    """What one rank works on in an update."""

    work: TrainWork
    num_tokens: int
    num_trained: int
    squares: int  # sum of the squared lengths


def checkpoint(model: str, cache: Path) -> Path:
    """The folder of a checkpoint; a named shape is written there once, with random weights."""
    if model not in shapes.QWEN3:
        return Path(model)
    folder = cache / f"qwen3-{model}"
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        shapes.write(shapes.config(model, **({"vocab_size": 512} if model == "tiny" else {})), folder)
    dist.barrier()
    return folder


def make_load(lengths: str, packed: int, micro_batches: int, vocab_size: int, prompt: int, seed: int) -> Load:
    """Packs of sequences of a fixed length, or of seeded log-normal lengths ("long"); the last of each is cut to fit.

    Random tokens; all but the first `prompt` of a sequence (at most half of it) are trained.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> int:
        if lengths != "long":
            return int(lengths)
        spread = float(torch.randn((), generator=generator)) - 0.5  # mean 1 after exp
        return int(min(MAX_LONG, max(16.0, MEAN_LONG * torch.tensor(spread).exp())))

    packs: list[list[int]] = []
    for _ in range(micro_batches):
        packs.append([])
        while (room := packed - sum(packs[-1])) > 0:
            packs[-1].append(min(draw(), room))
    flat = [n for pack in packs for n in pack]
    cu_seqlens, total = torch.tensor([0, *flat]).cumsum(0), sum(flat)
    mask = torch.cat([torch.arange(n) >= min(prompt, n // 2) for n in flat])
    columns = {
        "token_ids": torch.randint(0, vocab_size, (total,), generator=generator),
        "provenance": torch.where(mask, int(Provenance.MODEL), int(Provenance.TEMPLATE)),
        "response_mask": mask,
        "advantages": torch.randn(total, generator=generator),
        "rollout_logprobs": torch.full((total,), -10.0),
        "old_logprobs": torch.full((total,), NOT_ASKED),
    }
    starts = [sum(len(pack) for pack in packs[:i]) for i in range(len(packs))]
    rows = [list(range(start, start + len(pack))) for start, pack in zip(starts, packs, strict=True)]
    shares = loss_weights(mask, cu_seqlens, "token-mean") / dist.get_world_size()
    work = TrainWork(Batch(cu_seqlens, columns), [Step(rows, shares)])
    return Load(work, total, int(mask.sum()), sum(n * n for n in flat))


def forward_flops(config: PretrainedConfig, layer_parameters: int, load: Load) -> float:
    """See the top of the file; a backward pass needs twice as many. Mixtures of experts are not known here."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 2.0 * config.num_hidden_layers * heads * head_dim * load.squares
    head = 2.0 * config.vocab_size * config.hidden_size * load.num_trained
    return 2.0 * layer_parameters * load.num_tokens + head + attention


def seconds(step: Callable[[], Any], repeats: int, warm_up: int) -> float:
    """Median over `repeats` of the time that the slowest rank takes."""
    times = []
    for i in range(warm_up + repeats):
        platform().synchronize()
        dist.barrier()
        start = time.perf_counter()
        step()
        platform().synchronize()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.append(float(took) if i >= warm_up else 0.0)
    return sorted(times[warm_up:])[repeats // 2]


def measure(
    args: argparse.Namespace, model: str, packed: int, lengths: str, checkpointing: bool, compile: str
) -> list[dict]:
    """A row for the training step and one for the logprob pass."""
    torch._dynamo.reset()  # else what an earlier combination compiled makes this one's shapes dynamic
    path = checkpoint(model, args.cache)
    config = AutoConfig.from_pretrained(path)
    load = make_load(lengths, packed, args.micro_batches, config.vocab_size, args.prompt_tokens, 1 + dist.get_rank())
    actor = ActorConfig(
        dtype=args.dtype,
        ppo_max_token_len_per_gpu=packed,
        optim=OptimConfig(lr=1e-6),
        ulysses_sequence_parallel_size=1,
    )
    engine = FSDPEngine(
        str(path),
        ModelConfig(path=str(path), enable_gradient_checkpointing=checkpointing, compile=compile),
        actor,
        vocab_size=config.vocab_size,
        temperature=1.0,
        tokenizer_path=str(path),
    )
    algorithm = Algorithm(AlgoConfig(), max_response_length=packed)
    work, (step,) = load.work, load.work.steps

    def train() -> None:
        engine.train_step(work.micro_batches(step), algorithm.policy_loss)

    def infer() -> None:
        engine.forward(work.micro_batches(step))

    embedding = engine.model.model.get_input_embeddings().weight
    head = engine.model.model.get_output_embeddings().weight
    outside = embedding.numel() + (0 if head is embedding else head.numel())
    layers = sum(p.numel() for p in engine.model.parameters()) - outside
    flops = forward_flops(config, layers, load)
    facts = {
        "model": Path(model).name,
        "gpus": dist.get_world_size(),
        "packed": packed,
        "lengths": lengths,
        "micro_batches": args.micro_batches,
        "checkpointing": checkpointing,
        "compile": compile,
    }
    rows = []
    for name, run, passes in (("train", train, 3), ("logprob", infer, 1)):
        if name not in args.only:
            continue
        _reset_memory()
        took = seconds(run, args.repeats, args.warm_up)
        rows.append({**facts, "pass": name, **_speed(took, load, passes * flops, args.peak_tflops), **_memory()})
        if args.trace is not None and dist.get_rank() == 0:
            print(f"\n## Trace of: {rows[-1]}", flush=True)
        if args.trace is not None:  # all ranks: the step is collective
            file = args.trace.with_name(
                f"{name}-{facts['model']}-{packed}-{compile}-rank{dist.get_rank()}-{args.trace.name}"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            trace.record(run, file)
            if dist.get_rank() == 0:
                print(trace.summarize(file), flush=True)
    return rows


def _speed(took: float, load: Load, flops: float, peak_tflops: float) -> dict[str, float | None]:
    tflops = flops / took / 1e12  # of each rank: all have equally many tokens
    return {
        "seconds": round(took, 4),
        "tokens_per_s": round(load.num_tokens * dist.get_world_size() / took),
        "tflops": round(tflops, 2),
        "mfu": None if platform().kind == "cpu" else round(tflops / peak_tflops, 3),
    }


def _reset_memory() -> None:
    gc.collect()  # earlier engines have cycles
    platform().empty_cache()
    platform().reset_peak_memory()


def _memory() -> dict[str, float]:
    allocated = 0 if platform().kind == "cpu" else torch.cuda.max_memory_allocated()
    return {
        "allocated_gib": round(allocated / 2**30, 2),
        "reserved_gib": round(platform().peak_memory_bytes() / 2**30, 2),
    }


def _connect() -> None:
    """The process group: torchrun's, or this process alone."""
    platform().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = (
        {} if "RANK" in os.environ else {"init_method": f"tcp://127.0.0.1:{free_port()}", "rank": 0, "world_size": 1}
    )
    dist.init_process_group(platform().collective_backend, **({} if "RANK" in os.environ else alone))


def main() -> None:
    """Measure every combination; what does not fit in memory is a row as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["0.6b"], help=f"{', '.join(shapes.QWEN3)}, or a folder")
    parser.add_argument("--packed", nargs="+", type=int, default=[16384], help="tokens of a micro-batch")
    parser.add_argument("--lengths", nargs="+", default=["long"], help="'long' or a number of tokens")
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "on"], default=["off"])
    parser.add_argument("--compile", nargs="+", choices=["auto", "on", "off"], default=["auto"])
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="not trained, at the start of a sequence")
    parser.add_argument("--only", nargs="+", choices=["train", "logprob"], default=["train", "logprob"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="of one GPU, dense bfloat16")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/rlpost-benchmark-models"))
    parser.add_argument("--trace", type=Path, help="write a trace of one more step and print what it says")
    parser.add_argument("--out", type=Path, help="a folder for the tables")
    args = parser.parse_args()
    _connect()
    rows: list[dict[str, Any]] = []
    notes = f"Medians of {args.repeats} after {args.warm_up}; seed 1 + rank; MFU of {args.peak_tflops:g} TFLOP/s."
    choices = (args.model, args.packed, args.lengths, args.checkpointing, args.compile)
    for model, packed, lengths, checkpointing, compile in itertools.product(*choices):
        try:
            rows += measure(args, model, packed, lengths, checkpointing == "on", compile)
        except torch.OutOfMemoryError:
            rows.append({"model": Path(model).name, "packed": packed, "lengths": lengths, "pass": "out of memory"})
        _reset_memory()
        if dist.get_rank() == 0:  # each time: what was measured outlives a time limit
            print(rows[-2:], flush=True)
            write(args.out, "train_step", rows, notes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
