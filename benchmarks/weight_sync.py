"""Weights from a trainer's GPU into another process: seconds and GB/s, beside a plain copy of the same bytes.

    python -m benchmarks.weight_sync --shape 0.6b 1.7b 8b --transport ipc nccl [--bucket-mb 256] [--out FILE]

"ipc": the reader sits on the sender's GPU and maps its buffers; "nccl": it sits on the next GPU. The reader copies
every tensor to a place of its own, as an engine does. No engine runs; `timing/publish` of a run says what one adds.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks import shapes
from rlpost.tools.checks.peer import Peer
from rlpost.workers.weight_sync.base import check_digests
from rlpost.workers.weight_sync.reader import BucketReader
from rlpost.workers.weight_sync.sender import Sender

REPEATS = 5


class Weights:
    """Plays the train engine: bfloat16 tensors of a Qwen3 shape on GPU 0."""

    def __init__(self, shape: str):
        with torch.device("meta"):
            model = Qwen3ForCausalLM(shapes.config(shape))
        self.tensors = {
            name: torch.randn(p.shape, device="cuda:0", dtype=torch.bfloat16) for name, p in model.named_parameters()
        }
        self.num_bytes = sum(t.numel() * 2 for t in self.tensors.values())

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in turn."""
        yield from self.tensors.items()


def serve(requests: Any, answers: Any, device: str) -> None:
    """The reader's process: answers each bucket once its tensors are copied, and None with the digest; ends on ""."""
    torch.cuda.set_device(device)
    reader, own = BucketReader(device), {}
    answers.put("ready")
    while True:
        bucket = requests.get()
        if bucket == "":
            return
        if bucket is None:
            answers.put(reader.close())
            continue
        for name, tensor in reader.read(bucket):
            if name not in own:
                own[name] = torch.empty_like(tensor, device=device)
            own[name].copy_(tensor)
        answers.put(len(own))


def update(sender: Sender, peer: Peer) -> float:
    """Seconds of one update; the sender fills one buffer while the reader is at the other, as in a run."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    waiting = False
    while bucket := sender.next_bucket():
        if waiting:
            peer.answer()
        peer.post(bucket)
        waiting = True
    peer.answer()
    digest = peer.ask(None)
    check_digests([sender.close()], {0: digest}, 1)
    return time.perf_counter() - start


def plain_copy(weights: Weights, device: str) -> float:
    """Seconds to copy the same bytes from GPU 0 to `device`, tensor after tensor, in this process."""
    targets = [torch.empty_like(t, device=device) for t in weights.tensors.values()]
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize("cuda:0")
        start = time.perf_counter()
        for target, tensor in zip(targets, weights.tensors.values(), strict=True):
            target.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]


def measure(shape: str, transport: str, bucket_mb: int) -> dict[str, Any]:
    """Median of `REPEATS` updates after one to warm up."""
    weights = Weights(shape)
    device = "cuda:0" if transport == "ipc" else "cuda:1"
    copy_s = plain_copy(weights, device)
    torch.cuda.empty_cache()
    with Peer(serve, device) as peer:
        peer.answer()
        sender = Sender(transport, weights, torch.bfloat16, bucket_mb << 20, 1, 120.0)  # type: ignore[arg-type]
        sender.manifest()
        first_s = update(sender, peer)  # maps buffers, or joins the group
        times = sorted(update(sender, peer) for _ in range(REPEATS))
        sender.abandon()
        peer.post("")
    seconds, gigabytes = times[REPEATS // 2], weights.num_bytes / 1e9
    return {
        "shape": shape,
        "transport": transport,
        "bucket_mb": bucket_mb,
        "gigabytes": round(gigabytes, 3),
        "seconds": round(seconds, 4),
        "slowest_s": round(times[-1], 4),
        "first_s": round(first_s, 4),
        "gb_per_s": round(gigabytes / seconds, 1),
        "plain_copy_s": round(copy_s, 4),
        "plain_copy_gb_per_s": round(gigabytes / copy_s, 1),
    }


def main() -> None:
    """Measure every shape by every transport; a line of JSON each, and all of them to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=shapes.QWEN3, default=["0.6b", "1.7b"])
    parser.add_argument("--transport", nargs="+", choices=["ipc", "nccl"], default=["ipc"])
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[256])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in args.shape:
        for transport in args.transport:
            for bucket_mb in args.bucket_mb:
                rows.append(measure(shape, transport, bucket_mb))
                print(json.dumps(rows[-1]), flush=True)
                torch.cuda.empty_cache()
                if args.out:  # each time: what was measured outlives a time limit
                    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
                    args.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
