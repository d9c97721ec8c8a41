"""Weights from a trainer's device into another process: seconds and GB/s, beside plain copies of the same bytes.

    python -m benchmarks.weight_sync --shape 0.6b 1.7b 8b --transport ipc nccl [--bucket-mb 256] [--out FILE]
    python -m benchmarks.weight_sync --shape tiny --transport shm gloo --bucket-mb 1  # on a CPU

The reader sits on the sender's device, with "nccl" on the next one. It copies every tensor to a place of its own, as an
engine does, and both sides count the digest. No engine runs; `timing_s/publish` of a run says what one adds.

`tensor_copy`: one process copies the same tensors, one after the other, to the reader's device; small ones wait for the
host. `flat_copy`: the same bytes as one tensor, which is what the hardware can do.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks import shapes
from rlpost.platform import platform
from rlpost.tools.checks.peer import Peer
from rlpost.workers.weight_sync.base import check_digests
from rlpost.workers.weight_sync.reader import BucketReader
from rlpost.workers.weight_sync.sender import Sender

REPEATS = 5
TIMEOUT_S = 120.0  # for the reader to join, and for each bucket
CLOSE, FORGET, END = "close", "forget", "end"  # what a reader is asked besides buckets


class Weights:
    """Plays the train engine: bfloat16 tensors of a Qwen3 shape on the first device."""

    def __init__(self, shape: str):
        with torch.device("meta"):
            model = Qwen3ForCausalLM(shapes.config(shape))
        self.tensors = {
            name: torch.randn(p.shape, device=platform().device(), dtype=torch.bfloat16)
            for name, p in model.named_parameters()
        }
        self.num_bytes = sum(t.numel() * 2 for t in self.tensors.values())

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in turn."""
        yield from self.tensors.items()


def device_of(transport: str) -> str:
    """Where the reader sits."""
    return str(platform().device(1 if transport == "nccl" else 0))


def serve(requests: Any, answers: Any, device: str) -> None:
    """The reader's process: answers a bucket once its tensors are copied, and `CLOSE` with the digest."""
    platform().set_device(torch.device(device).index or 0)
    reader = BucketReader(device)
    own: dict[str, torch.Tensor] = {}
    answers.put("ready")
    while (request := requests.get()) != END:
        if request == CLOSE:
            answers.put(reader.close())
        elif request == FORGET:
            reader.leave()
            own.clear()
            platform().empty_cache()
            answers.put("forgotten")
        else:
            for name, tensor in reader.read(request):
                if name not in own:
                    own[name] = torch.empty_like(tensor, device=device)
                own[name].copy_(tensor)
            answers.put(len(own))


def update(sender: Sender, peer: Peer) -> float:
    """Seconds of one update; the sender fills one buffer while the reader is at the other, as in a run."""
    platform().synchronize()
    start = time.perf_counter()
    waiting = False
    while bucket := sender.next_bucket():
        if waiting:
            peer.answer()
        peer.post(bucket)
        waiting = True
    peer.answer()
    digest = peer.ask(CLOSE)
    check_digests([sender.close()], {0: digest}, 1)
    return time.perf_counter() - start


def copy_s(tensors: Sequence[torch.Tensor], device: str) -> float:
    """Seconds to copy `tensors` to `device` in this process, one after the other; the median."""
    targets = [torch.empty_like(t, device=device) for t in tensors]
    times = []
    for _ in range(REPEATS):
        platform().synchronize()
        start = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        platform().synchronize()  # copies are queued where they come from
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]


def copies(weights: Weights, transport: str) -> dict[str, float]:
    """What it is held against, in seconds and GB/s."""
    device, gigabytes = device_of(transport), weights.num_bytes / 1e9
    flat = torch.empty(weights.num_bytes, dtype=torch.uint8, device=platform().device())
    found: dict[str, float] = {}
    for name, tensors in (("tensor_copy", list(weights.tensors.values())), ("flat_copy", [flat])):
        seconds = copy_s(tensors, device)
        platform().empty_cache()
        found |= {f"{name}_s": round(seconds, 4), f"{name}_gb_per_s": round(gigabytes / seconds, 1)}
    return found


def measure(weights: Weights, transport: str, bucket_mb: int, peer: Peer) -> dict[str, float]:
    """Median of `REPEATS` updates after one to warm up."""
    sender = Sender(transport, weights, torch.bfloat16, bucket_mb << 20, 1, TIMEOUT_S)  # type: ignore[arg-type]
    sender.manifest()
    first_s = update(sender, peer)  # maps buffers, or joins the group
    times = sorted(update(sender, peer) for _ in range(REPEATS))
    sender.abandon()
    peer.ask(FORGET)
    platform().empty_cache()
    seconds, gigabytes = times[REPEATS // 2], weights.num_bytes / 1e9
    return {
        "bucket_mb": bucket_mb,
        "gigabytes": round(gigabytes, 3),
        "seconds": round(seconds, 4),
        "slowest_s": round(times[-1], 4),
        "first_s": round(first_s, 4),
        "gb_per_s": round(gigabytes / seconds, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every shape by every transport; a line of JSON each, and all of them to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=shapes.QWEN3, default=["0.6b", "1.7b"])
    parser.add_argument("--transport", nargs="+", choices=["ipc", "nccl", "shm", "gloo"], default=["ipc"])
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[256])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(serve, device_of(name))) for name in args.transport}
        for peer in peers.values():
            peer.answer()
        for shape in args.shape:
            weights = Weights(shape)
            for transport, peer in peers.items():
                plain = copies(weights, transport)
                for bucket_mb in args.bucket_mb:
                    row = {"shape": shape, "transport": transport, **measure(weights, transport, bucket_mb, peer)}
                    rows.append(row | plain)
                    print(json.dumps(rows[-1]), flush=True)
                    if args.out:  # each time: what was measured outlives a time limit
                        facts = {"device": platform().device_name(), "torch": torch.__version__, "rows": rows}
                        args.out.write_text(json.dumps(facts, indent=1))
            del weights
        for peer in peers.values():
            peer.post(END)


if __name__ == "__main__":
    main()
