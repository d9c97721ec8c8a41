"""Trainer's weights into the engines: `WeightSync`, run by the driver, which moves descriptions and never the bytes."""

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from rlpost.metrics import Metric, Metrics, Reduce
from rlpost.platform import platform
from rlpost.workers.engine.base import TrainEngine
from rlpost.workers.group import WorkerGroup
from rlpost.workers.rollout.base import WeightManifest
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.ipc import Bucket, Sender, num_bytes


def make_sender(transport: str, engine: TrainEngine, dtype: torch.dtype, bucket_bytes: int) -> Sender:
    """The trainer rank's side of `transport`."""
    return Sender(transport, engine, dtype, bucket_bytes)


def make_weight_sync(trainers: WorkerGroup, pool: RolloutPool) -> "WeightSync":
    """How this run's trainers reach its engines."""
    return BucketSync(trainers, pool)


class WeightSync(ABC):
    """Gives every engine the trainer's present weights."""

    @abstractmethod
    async def connect(self) -> None:
        """Find a way between trainer and engines; `push` does it when nobody did."""

    @abstractmethod
    async def push(self, version: int) -> Metrics:
        """Send all weights as `version`; returns when every engine has them.

        Raises:
            ValueError: trainer and engine do not hold the same parameters; names the difference.
            RuntimeError: an engine received other bytes than were sent.
        """


class BucketSync(WeightSync):
    """Bounded buckets through one host's memory: the device's where trainer and engine share it, else the host's.

    The trainers fill one buffer while the engines read the other.
    """

    def __init__(self, trainers: WorkerGroup, pool: RolloutPool):
        self._trainers, self._pool = trainers, pool
        self._transport: str | None = None

    async def connect(self) -> None:
        """See `WeightSync.connect`."""
        trainer_devices = set(await self._trainers.call_async("device_uuid"))
        engine_devices = {uuid for uuids in await self._pool.call("device_uuids") for uuid in uuids}
        self._transport = choose_transport(trainer_devices, engine_devices)
        cfg = self._pool.cfg
        dtype = str(platform().dtype(cfg.dtype)).removeprefix("torch.")
        await self._trainers.call_async(
            "open_sender", self._transport, dtype, cfg.update_weights_bucket_megabytes << 20
        )

    async def push(self, version: int) -> Metrics:
        """See `WeightSync.push`."""
        if self._transport is None:
            await self.connect()
        start = time.perf_counter()
        tensors = (await self._trainers.call_async("weight_manifest"))[0]
        await self._pool.call("begin_update", WeightManifest(version=version, tensors=tensors))
        loading: asyncio.Task[list[Any]] | None = None
        num_buckets = 0
        while bucket := merge_ranks(await self._trainers.call_async("next_bucket")):
            if loading is not None:
                await loading  # the trainers now fill the buffer that this load has read
            loading = asyncio.create_task(self._pool.call("load_bucket", bucket))
            num_buckets += 1
        if loading is not None:
            await loading
        received = await self._pool.call("finish_update", version)
        check_digests(await self._trainers.call_async("close_sender"), received, version)
        seconds = time.perf_counter() - start
        total = sum(num_bytes(shape, dtype) for shape, dtype in tensors.values())
        return {
            "weight_sync/seconds_s": Metric(seconds, reduce=Reduce.SUM),
            "weight_sync/bytes": Metric(total, reduce=Reduce.SUM),
            "weight_sync/gigabytes_per_s": Metric(total / 1e9 / seconds),
            "weight_sync/buckets": Metric(num_buckets, reduce=Reduce.SUM),
        }


def choose_transport(trainer_devices: set[str], engine_devices: set[str]) -> str:
    """ "ipc" when every engine device also holds a trainer rank, else "shm" (also on CPU)."""
    return "ipc" if "cpu" not in engine_devices and engine_devices <= trainer_devices else "shm"


def merge_ranks(buckets: list[Bucket | None]) -> Bucket | None:
    """One bucket out of what the trainer ranks say: the same tensors, and every place where their bytes are."""
    present = [bucket for bucket in buckets if bucket is not None]
    if not present:
        return None
    assert len(present) == len(buckets), "trainer ranks disagree on the number of buckets"
    assert all(bucket["names"] == present[0]["names"] for bucket in present), "trainer ranks disagree on a bucket"
    handles = {uuid: handle for bucket in present for uuid, handle in bucket.get("handles", {}).items()}
    return present[0] | ({"handles": handles} if handles else {})


def check_digests(sent: list[int | None], received: list[int | None], version: int) -> None:
    """Every engine that counts what it received must have received what rank 0 sent.

    Raises:
        RuntimeError: names the version and both digests.
    """
    expected = next(digest for digest in sent if digest is not None)
    wrong = {replica: digest for replica, digest in enumerate(received) if digest not in (None, expected)}
    if wrong:
        raise RuntimeError(
            f"weight update {version}: sent digest {expected}, but replicas received {wrong}; "
            "the engines hold half-written weights"
        )
