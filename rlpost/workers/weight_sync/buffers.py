"""What the trainer writes a bucket's bytes into, one class for each way that they take to the readers."""

import mmap
import os
import pickle
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor

from rlpost.platform import platform
from rlpost.workers.weight_sync.collective import Broadcaster


class Buffer(Protocol):
    """`data`, uint8 `[n]`, and how readers come by it."""

    data: torch.Tensor

    def where(self) -> dict[str, Any]:
        """What a bucket says about the place of its bytes."""

    def send(self, num_bytes: int) -> None:
        """Start moving the first `num_bytes` to the readers."""

    def wait(self) -> None:
        """Return when nothing is moving any more."""


class _Mapped:
    """The readers map it, so nothing has to move."""

    def send(self, num_bytes: int) -> None:
        """See `Buffer.send`."""

    def wait(self) -> None:
        """See `Buffer.wait`."""


class HostBuffer(_Mapped):
    """Anonymous shared memory: no name to leak, and no limit but the host's memory."""

    def __init__(self, nbytes: int):
        self._fd = os.memfd_create("rlpost-weights")
        os.ftruncate(self._fd, nbytes)
        self.data = torch.frombuffer(mmap.mmap(self._fd, nbytes), dtype=torch.uint8)

    def where(self) -> dict[str, Any]:
        """The path under which other processes of this user open it."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "nbytes": self.data.numel()}

    def __del__(self) -> None:
        os.close(self._fd)


class DeviceBuffer(_Mapped):
    """Memory of this process's device, exported to each of its readers as soon as one is told of it.

    torch pairs an export with one release: what is released never, or by two readers of one export, is not freed.
    """

    def __init__(self, nbytes: int, num_readers: int):
        # not empty: the digest counts what lies between tensors too, and every rank's must be the same
        self.data = torch.zeros(nbytes, dtype=torch.uint8, device=platform().device())
        self._num_readers = num_readers
        self._exports: list[str] = []

    def where(self) -> dict[str, Any]:
        """A handle for each reader, keyed by the uuid of the device they are good on."""
        if not self._exports:
            self._exports = [pickle.dumps(reduce_tensor(self.data)[1]).hex() for _ in range(self._num_readers)]
        return {"handles": {platform().device_uuid(): self._exports}}


class BroadcastBuffer:
    """Memory of this process alone, of which every reader gets a copy."""

    def __init__(self, nbytes: int, broadcaster: Broadcaster):
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=broadcaster.device)
        self._broadcaster = broadcaster
        self._sending: Future[None] | None = None
        self._num_sent = 0

    def where(self) -> dict[str, Any]:
        """The group in which it is sent, and how many bytes."""
        return {"group": asdict(self._broadcaster.spec), "nbytes": self._num_sent}

    def send(self, num_bytes: int) -> None:
        """See `Buffer.send`."""
        self._num_sent = num_bytes
        self._sending = self._broadcaster.send(self.data[:num_bytes])

    def wait(self) -> None:
        """See `Buffer.wait`. Also returns when the broadcast failed, see `Broadcaster.failure`."""
        if self._sending is not None:
            self._broadcaster.wait(self._sending)


def make_buffer(transport: str, nbytes: int, num_readers: int, broadcaster: Broadcaster | None) -> Buffer:
    """A buffer for `transport`; "gloo" and "nccl" need the broadcaster, "ipc" the number of readers on this device."""
    if broadcaster is not None:
        return BroadcastBuffer(nbytes, broadcaster)
    return HostBuffer(nbytes) if transport == "shm" else DeviceBuffer(nbytes, num_readers)
