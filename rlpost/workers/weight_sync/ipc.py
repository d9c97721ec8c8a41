"""Weights from trainer to engine on one host: named tensors packed into two alternating buffers that both sides map.

A *bucket* is a small dict that says what lies where in a buffer; the bytes themselves never pass through a message. The
buffer is anonymous shared memory (transport "shm") or memory of a device (transport "ipc", one handle a device). The
sender fills one buffer while the engine reads the other.
"""

import mmap
import os
import pickle
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rlpost.platform import platform
from rlpost.workers.engine.base import TrainEngine

ALIGNMENT_BYTES = 64
_DIGEST_MASK = 2**63 - 1

Bucket = dict[str, Any]  # names, shapes, dtypes, offsets; and where the bytes are: `path` and `nbytes`, or `handles`
Tensors = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype name), as in WeightManifest.tensors


def digest_of(name: str, data: torch.Tensor) -> int:
    """Checksum of one tensor's bytes (uint8 `[n]`); sums of these over tensors do not depend on their order."""
    whole = data.numel() // 8 * 8
    total = int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
    return total * (zlib.crc32(name.encode()) | 1) & _DIGEST_MASK


def padded(nbytes: int) -> int:
    """`nbytes` rounded up, so that the next tensor is aligned for any dtype."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def num_bytes(shape: tuple[int, ...] | list[int], dtype: str) -> int:
    """Size of a tensor of this shape and dtype name."""
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


class Buffer(Protocol):
    """Bytes that another process can map: `data` uint8 `[n]`, and `where` it finds them."""

    data: torch.Tensor

    def where(self) -> dict[str, Any]:
        """What a bucket says about the place of its bytes."""


class HostBuffer:
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


class DeviceBuffer:
    """Memory of this process's device, exported once for as long as it lives."""

    def __init__(self, nbytes: int):
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=platform().device())
        _, arguments = reduce_tensor(self.data)
        self._handle = {platform().device_uuid(): pickle.dumps(arguments).hex()}

    def where(self) -> dict[str, Any]:
        """One handle, keyed by the uuid of the device it is good on."""
        return {"handles": self._handle}


BUFFERS: dict[str, type[HostBuffer] | type[DeviceBuffer]] = {"shm": HostBuffer, "ipc": DeviceBuffer}


class Sender:
    """Trainer's side, one in each rank. Every method is collective: all ranks call it alike.

    With "shm" rank 0 writes and the others only take part in gathering; with "ipc" every rank writes to its device.

    Args:
        transport: "shm" or "ipc".
        engine: gives the weights.
        dtype: what the inference engine computes in.
        bucket_bytes: size of one buffer; a larger tensor makes it larger.
    """

    def __init__(self, transport: str, engine: TrainEngine, dtype: torch.dtype, bucket_bytes: int):
        self._engine, self._dtype, self._bucket_bytes = engine, dtype, bucket_bytes
        self._buffer_type = BUFFERS[transport]
        self._writes = transport == "ipc" or not dist.is_initialized() or dist.get_rank() == 0
        self._tensors: Tensors = {}
        self._buckets: Iterator[Bucket] | None = None
        self._buffers: list[Buffer] = []  # kept to `close`: the reader may still be at the last bucket
        self._digest = 0

    def manifest(self) -> Tensors:
        """Name -> (shape, dtype name) of everything an update brings. Gathers once and remembers."""
        if not self._tensors:
            for name, tensor in self._engine.named_weights(self._dtype):
                assert name not in self._tensors, f"named_weights gives '{name}' twice"
                self._tensors[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return self._tensors

    def next_bucket(self) -> Bucket | None:
        """Fill the buffer that is not being read and describe it; None when all weights have been sent."""
        if self._buckets is None:
            self._digest = 0
            self._buckets = self._fill()
        return next(self._buckets, None)

    def close(self) -> int | None:
        """End the update and free the buffers. Returns the digest of what was written, None on ranks that did not."""
        self._buckets, self._buffers = None, []
        platform().empty_cache()
        return self._digest if self._writes else None

    def _capacity(self) -> int:
        sizes = [padded(num_bytes(shape, dtype)) for shape, dtype in self.manifest().values()]
        return min(sum(sizes), max(self._bucket_bytes, *sizes))

    def _fill(self) -> Iterator[Bucket]:
        capacity = self._capacity()
        self._buffers = [self._buffer_type(capacity) for _ in range(2)] if self._writes else []
        bucket, used = _empty_bucket(), 0
        for name, tensor in self._engine.named_weights(self._dtype):
            nbytes = tensor.numel() * tensor.element_size()
            if used and used + padded(nbytes) > capacity:
                yield self._seal(bucket)
                self._buffers.reverse()
                bucket, used = _empty_bucket(), 0
            if self._writes:
                place = self._buffers[0].data[used : used + nbytes]
                place.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
                self._digest = self._digest + digest_of(name, place) & _DIGEST_MASK
            entry = (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), used)
            for column, value in zip(bucket.values(), entry, strict=True):
                column.append(value)
            used += padded(nbytes)
        if used:
            yield self._seal(bucket)

    def _seal(self, bucket: Bucket) -> Bucket:
        platform().synchronize()  # the reader must not see a copy that is still queued
        return bucket | (self._buffers[0].where() if self._writes else {})


class BucketReader:
    """Engine's side: maps the buffers that buckets speak of and counts the digest of what it read."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self._mapped: dict[str, torch.Tensor] = {}
        self._digest = 0

    def read(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of a bucket. The tensors are views: copy what must outlive the bucket."""
        data = self._map(bucket)
        for name, shape, dtype, offset in zip(
            bucket["names"], bucket["shapes"], bucket["dtypes"], bucket["offsets"], strict=True
        ):
            place = data[offset : offset + num_bytes(shape, dtype)]
            self._digest = self._digest + digest_of(name, place) & _DIGEST_MASK
            yield name, place.view(getattr(torch, dtype)).view(shape)

    def close(self) -> int:
        """Unmap everything; returns the digest of all that was read since the last close."""
        self._mapped.clear()
        digest, self._digest = self._digest, 0
        return digest

    def _map(self, bucket: Bucket) -> torch.Tensor:
        if "path" in bucket:
            key = bucket["path"]
            if key not in self._mapped:
                fd = os.open(key, os.O_RDWR)
                self._mapped[key] = torch.frombuffer(mmap.mmap(fd, bucket["nbytes"]), dtype=torch.uint8)
                os.close(fd)
            return self._mapped[key]
        uuid = platform().device_uuid(self._device.index or 0)
        if uuid not in bucket["handles"]:
            raise ValueError(f"no trainer rank sits on device {uuid} (they sit on {sorted(bucket['handles'])})")
        key = bucket["handles"][uuid]
        if key not in self._mapped:  # once for each export: torch pairs one export with one release
            arguments = list(pickle.loads(bytes.fromhex(key)))
            arguments[6] = self._device.index or 0  # the sender's number of the device may differ from ours
            self._mapped[key] = rebuild_cuda_tensor(*arguments)
        return self._mapped[key]


def _empty_bucket() -> Bucket:
    return {"names": [], "shapes": [], "dtypes": [], "offsets": []}
