"""What processes exchange: weights through memory that two of them map, and sums through a process group."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlpost.host import free_port, host_address
from rlpost.platform import platform
from rlpost.tools.checks.base import Finding, Options, Status, passed
from rlpost.tools.checks.peer import SPAWN_S, Peer


class Weights:
    """Plays the trainer's engine: a few tensors of odd sizes to send."""

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for i, shape in enumerate([(333, 77), (5,), (64, 1024)]):
            yield f"w{i}", torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(platform().device(), dtype)


def ipc(options: Options) -> Finding:
    """Weights from one process to another through memory that both map, found by the uuid of the device."""
    from rlpost.workers.weight_sync.sender import Sender  # here, since the other check starts faster without it

    here = platform()
    transport = "shm" if here.kind == "cpu" else "ipc"
    sender = Sender(transport, Weights(), torch.float32, 100_000)  # type: ignore[arg-type]  # all that it asks for
    sender.manifest()
    count = 0
    with Peer(read_buckets) as peer:
        while bucket := sender.next_bucket():
            peer.ask(bucket)
            count += 1
        received = peer.ask(None)
    if received != sender.close():
        fix = "the mapping holds other bytes: look at the driver and, on ROCm, at HSA_ENABLE_IPC_MODE_LEGACY"
        return Finding(Status.FAIL, f"{transport}: the reader received other bytes than were sent", fix)
    return passed(f"{transport}: {count} buckets arrived, digests agree, device {here.device_uuid()}")


def read_buckets(requests: Any, answers: Any) -> None:
    """The engine's side of `ipc`: every bucket is read; None asks for the digest."""
    from rlpost.workers.weight_sync.reader import BucketReader

    reader = BucketReader(platform().device())
    while (bucket := requests.get()) is not None:
        answers.put(len(list(reader.read(bucket))))
    answers.put(reader.close())


def collective(options: Options) -> Finding:
    """A sum over the trainer's process group: two ranks, or one where there is a single GPU."""
    here = platform()
    size = 2 if here.kind == "cpu" else min(2, here.device_count())
    port, address = free_port(), host_address()
    peers = [Peer(take_part, rank, size, f"tcp://{address}:{port}") for rank in range(size)]
    try:
        for peer in peers:
            peer.start()
        sums = [peer.answer() for peer in peers]
    finally:
        for peer in peers:
            peer.stop()
    expected = {device: sum(range(1, size + 1)) for device in sums[0]}
    if any(s != expected for s in sums):
        fix = "the backend adds wrongly: update NCCL or RCCL and the driver"
        return Finding(Status.FAIL, f"all_reduce over {size} ranks gave {sums}, expected {expected} on each", fix)
    return passed(
        f"{here.collective_backend}: {size} rank{'s' * (size > 1)} at {address} agree on {', '.join(expected)}"
    )


def take_part(requests: Any, answers: Any, rank: int, size: int, address: str) -> None:
    """One rank of `collective`: the sum of rank + 1 over all ranks, for each kind of device."""
    here = platform()
    here.set_device(rank)
    dist.init_process_group(
        here.collective_backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=SPAWN_S)
    )
    sums = {}
    for device in {torch.device("cpu"), here.device(rank)}:
        ones = torch.full((1 << 20,), rank + 1.0, device=device)
        dist.all_reduce(ones)
        sums[device.type] = int(ones.mean().item())
    dist.destroy_process_group()
    answers.put(sums)
