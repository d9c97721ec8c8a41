"""The trainer's side of a weight update: named tensors packed into two buffers that take turns.

The sender fills one buffer while the readers are at the other.
"""

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist

from rlpost.platform import platform
from rlpost.workers.engine.base import TrainEngine
from rlpost.workers.weight_sync.bucket import (
    DIGEST_MASK,
    Bucket,
    Tensors,
    digest_of,
    empty_bucket,
    num_bytes,
    padded,
)
from rlpost.workers.weight_sync.buffers import Buffer, make_buffer
from rlpost.workers.weight_sync.collective import Broadcaster

BROADCAST = ("gloo", "nccl")  # transports in which readers get copies; the others map the sender's memory


class Sender:
    """One in each trainer rank. Every method is collective: all ranks call it alike.

    With "ipc" every rank writes to its device; else rank 0 writes and the others only take part in gathering.

    Args:
        transport: "shm", "ipc", "gloo" or "nccl".
        engine: gives the weights.
        dtype: what the inference engine computes in.
        bucket_bytes: size of one buffer; a larger tensor makes it larger.
        num_readers: processes that receive: of "gloo" and "nccl" all, of "ipc" those on this rank's device.
        timeout_s: for the readers to join, and for each bucket to reach them all; of "gloo" and "nccl".
    """

    def __init__(
        self,
        transport: str,
        engine: TrainEngine,
        dtype: torch.dtype,
        bucket_bytes: int,
        num_readers: int = 1,
        timeout_s: float = 300.0,
    ):
        self._transport, self._engine, self._dtype, self._bucket_bytes = transport, engine, dtype, bucket_bytes
        self._num_readers = num_readers
        self._writes = transport == "ipc" or not dist.is_initialized() or dist.get_rank() == 0
        self._broadcaster: Broadcaster | None = None
        if self._writes and transport in BROADCAST:
            self._broadcaster = Broadcaster(transport, num_readers, timeout_s)
        self._tensors: Tensors = {}
        self._buckets: Iterator[Bucket] | None = None
        self._buffers: list[Buffer] = []  # kept to `close`: the reader may still be at the last bucket
        self._digest = torch.zeros((), dtype=torch.int64)

    def manifest(self) -> Tensors:
        """Name -> (shape, dtype name) of everything an update brings. Gathers once and remembers."""
        if not self._tensors:
            for name, tensor in self._engine.named_weights(self._dtype):
                assert name not in self._tensors, f"named_weights gives '{name}' twice"
                self._tensors[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return self._tensors

    def next_bucket(self) -> Bucket | None:
        """Fill the buffer that is not being read and describe it; None when all weights have been sent.

        A broadcast that fails raises in `close`, not here: the other ranks would be left behind in a collective.
        """
        if self._buckets is None:
            self._digest = torch.zeros((), dtype=torch.int64)
            self._buckets = self._fill()
        return next(self._buckets, None)

    def close(self) -> int | None:
        """End the update. Returns the digest of what was written, None on ranks that did not.

        The buffers go to torch's cache: who hands memory over empties it.

        Raises:
            BroadcastError: a bucket did not reach every reader.
        """
        for buffer in self._buffers:
            buffer.wait()
        self._buckets, self._buffers = None, []
        if self._broadcaster is not None and self._broadcaster.failure is not None:
            raise self._broadcaster.failure
        return int(self._digest) & DIGEST_MASK if self._writes else None

    def abandon(self) -> None:
        """End everything, also in the middle of an update; the sender is of no more use."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._buckets, self._buffers = None, []

    def _capacity(self) -> int:
        sizes = [padded(num_bytes(shape, dtype)) for shape, dtype in self.manifest().values()]
        return min(sum(sizes), max(self._bucket_bytes, *sizes))

    def _fill(self) -> Iterator[Bucket]:
        capacity = self._capacity()
        if self._writes:
            make = functools.partial(make_buffer, self._transport, capacity, self._num_readers, self._broadcaster)
            self._buffers = [make(), make()]
        bucket, used = empty_bucket(), 0
        for name, tensor in self._engine.named_weights(self._dtype):
            nbytes = tensor.numel() * tensor.element_size()
            if used and used + padded(nbytes) > capacity:
                yield self._seal(bucket, used)
                self._buffers.reverse()
                if self._writes:
                    self._buffers[0].wait()
                bucket, used = empty_bucket(), 0
            if self._writes:
                place = self._buffers[0].data[used : used + nbytes]
                place.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
            entry = (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), used)
            for column, value in zip(bucket.values(), entry, strict=True):
                column.append(value)
            used += padded(nbytes)
        if used:
            yield self._seal(bucket, used)

    def _seal(self, bucket: Bucket, used: int) -> Bucket:
        if self._writes:
            self._digest = self._digest + digest_of(bucket["names"], self._buffers[0].data[:used])
        platform().synchronize()  # the reader must not see a copy that is still queued
        if not self._writes:
            return bucket
        self._buffers[0].send(used)
        return bucket | {"used": used} | self._buffers[0].where()
