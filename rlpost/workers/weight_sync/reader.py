"""The engine's side of a weight update, in every process that holds a part of its weights."""

import logging
import mmap
import os
import pickle
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlpost.platform import platform
from rlpost.workers.weight_sync.bucket import DIGEST_MASK, Bucket, digest_of, num_bytes
from rlpost.workers.weight_sync.collective import BroadcastError, BroadcastGroup, GroupSpec

logger = logging.getLogger(__name__)

MISSED = -1  # in place of a digest: a bucket did not arrive


class BucketReader:
    """Gives the tensors of buckets, and counts the digest of what it read.

    Buffers that buckets speak of are mapped, or received from a group, which the first of its buckets makes it join.
    A bucket that does not arrive gives no tensors: an error in the middle of an update would leave engines in a state
    that they do not know how to leave. `close` tells.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self._mapped: dict[str, torch.Tensor] = {}
        self._group: BroadcastGroup | None = None
        self._received = torch.empty(0, dtype=torch.uint8)
        self._digest = torch.zeros((), dtype=torch.int64)
        self._missed = False

    def read(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of a bucket. The tensors are views: copy what must outlive the bucket.

        At the end it waits for the copies that were queued: the sender may fill the bucket anew.
        """
        data = self._fetch(bucket)
        if data is None:
            return
        self._digest = self._digest + digest_of(bucket["names"], data[: bucket["used"]])
        for name, shape, dtype, offset in zip(
            bucket["names"], bucket["shapes"], bucket["dtypes"], bucket["offsets"], strict=True
        ):
            place = data[offset : offset + num_bytes(shape, dtype)]
            yield name, place.view(getattr(torch, dtype)).view(shape)
        platform().synchronize()

    def close(self) -> int:
        """End an update, free its memory. Returns the digest of all that was read in it, `MISSED` if not all came."""
        digest = MISSED if self._missed else int(self._digest) & DIGEST_MASK
        self._digest, self._missed = torch.zeros((), dtype=torch.int64), False
        self._mapped.clear()
        self._received = torch.empty(0, dtype=torch.uint8)
        return digest

    def leave(self) -> None:
        """Leave the group; `close` stays in it for the next update."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _fetch(self, bucket: Bucket) -> torch.Tensor | None:
        if "path" in bucket:
            return self._map_host(bucket)
        if "handles" in bucket:
            return self._map_device(bucket)
        return self._receive(bucket)

    def _map_host(self, bucket: Bucket) -> torch.Tensor:
        key = bucket["path"]
        if key not in self._mapped:
            fd = os.open(key, os.O_RDWR)
            self._mapped[key] = torch.frombuffer(mmap.mmap(fd, bucket["nbytes"]), dtype=torch.uint8)
            os.close(fd)
        return self._mapped[key]

    def _map_device(self, bucket: Bucket) -> torch.Tensor:
        uuid = platform().device_uuid(self._device.index or 0)
        if uuid not in bucket["handles"]:
            raise ValueError(f"no trainer rank sits on device {uuid} (they sit on {sorted(bucket['handles'])})")
        key = bucket["handles"][uuid][bucket.get("reader", {}).get(uuid, 0)]
        if key not in self._mapped:  # once for each export, as `DeviceBuffer` says
            arguments = list(pickle.loads(bytes.fromhex(key)))
            arguments[6] = self._device.index or 0  # the sender's number of the device may differ from ours
            self._mapped[key] = rebuild_cuda_tensor(*arguments)
        return self._mapped[key]

    def _receive(self, bucket: Bucket) -> torch.Tensor | None:
        """The bucket's bytes in memory of our own, None when they do not come."""
        spec = GroupSpec(**bucket["group"])
        if self._missed:
            return None
        try:
            group = self._join(spec)
            if self._received.numel() < bucket["nbytes"]:
                device = self._device if spec.backend == "nccl" else "cpu"
                self._received = torch.empty(bucket["nbytes"], dtype=torch.uint8, device=device)
            data = self._received[: bucket["nbytes"]]
            group.broadcast(data)
            return data
        except BroadcastError as error:
            logger.warning("weights did not arrive: %s", error)
            self._missed = True
            return None

    def _join(self, spec: GroupSpec) -> BroadcastGroup:
        if self._group is None or self._group.spec != spec:
            self.leave()
            self._group = BroadcastGroup(spec, self._device)
        return self._group
