"""Trainer's weights into the engines: `WeightSync`, run by the driver, which moves descriptions and never the bytes."""

import asyncio
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.metrics import Metric, Metrics, Reduce
from rlpost.platform import platform
from rlpost.workers.group import WorkerGroup
from rlpost.workers.rollout.base import EngineLost, WeightManifest
from rlpost.workers.rollout.pool import OnLoss, RolloutPool
from rlpost.workers.weight_sync.bucket import Bucket, Tensors, num_bytes
from rlpost.workers.weight_sync.collective import GroupSpec, cancel
from rlpost.workers.weight_sync.reader import MISSED
from rlpost.workers.weight_sync.sender import BROADCAST
from rlpost.workers.weight_sync.topology import choose_transport, number_readers

logger = logging.getLogger(__name__)

PATIENCE = 1.5  # times `rollout.weight_sync_timeout_s`: a replica that does not even report a failure by then is lost


def make_weight_sync(trainers: WorkerGroup, pool: RolloutPool, disjoint: bool = False) -> "WeightSync":
    """How this run's trainers reach its engines; `disjoint` where they are meant to share nothing."""
    return BucketSync(trainers, pool, disjoint)


class WeightSync(ABC):
    """Gives every engine the trainer's present weights."""

    @abstractmethod
    async def connect(self) -> None:
        """Find a way between trainer and engines; `push` does it when nobody did, or the engines have changed.

        Raises:
            ValueError: `rollout.weight_sync` cannot work here; says why.
        """

    @abstractmethod
    async def push(self, version: int) -> Metrics:
        """Send all weights as `version`; returns when every live engine has them. Those that joined the pool get work.

        A replica that dies or hangs on the way is excluded from the pool, and the others get the weights anew.

        Raises:
            ValueError: trainer and engine do not hold the same parameters; names the difference.
            RuntimeError: an engine received other bytes than were sent.
            EngineLost: no replica is left, but others will take their places.
            Exception: the error of the last replica that was lost.
        """


class BucketSync(WeightSync):
    """Bounded buckets, which engines map where they share memory with the trainer, or else receive by a broadcast.

    The trainers fill one buffer while the engines read the other.
    """

    def __init__(self, trainers: WorkerGroup, pool: RolloutPool, disjoint: bool = False):
        self._trainers, self._pool, self._disjoint = trainers, pool, disjoint
        self._transport: str | None = None
        self._connected: Mapping[int, Any] = {}  # replicas to which there is a way
        self._readers: Mapping[int, Mapping[str, int]] = {}  # see `number_readers`

    async def connect(self) -> None:
        """See `WeightSync.connect`."""
        cfg, replicas = self._pool.cfg, self._pool.live
        trainers, engines = await self._trainers.call_async("place"), await self._ask("place")
        transport = choose_transport(cfg.weight_sync, trainers, engines, self._disjoint)
        if transport != self._transport:
            logger.info("weights travel by %s (replicas: %d)", transport, len(engines))
        self._transport, self._connected, self._readers = transport, replicas, number_readers(engines)
        await self._trainers.call_async(
            "open_sender",
            transport,
            str(platform().dtype(cfg.dtype)).removeprefix("torch."),
            cfg.update_weights_bucket_megabytes << 20,
            dict(Counter(uuid for place in engines.values() for uuid in place.devices)),
            cfg.weight_sync_timeout_s,
        )

    async def push(self, version: int) -> Metrics:
        """See `WeightSync.push`."""
        start = time.perf_counter()
        tensors: Tensors = {}
        num_buckets = None
        while num_buckets is None:  # each time with fewer replicas
            if self._pool.live != self._connected:
                await self.connect()
            tensors = (await self._trainers.call_async("weight_manifest"))[0]
            try:
                num_buckets = await self._send(WeightManifest(version=version, tensors=tensors))
            except BaseException:
                self._connected = {}  # the sender stopped halfway: another push begins with a new one
                raise
        await self._pool.admit()
        seconds = time.perf_counter() - start
        total = sum(num_bytes(shape, dtype) for shape, dtype in tensors.values())
        return {
            "weight_sync/seconds_s": Metric(seconds, reduce=Reduce.SUM),
            "weight_sync/bytes": Metric(total, reduce=Reduce.SUM),
            "weight_sync/gigabytes_per_s": Metric(total / 1e9 / seconds),
            "weight_sync/buckets": Metric(num_buckets, reduce=Reduce.SUM),
            "weight_sync/replicas_lost": Metric(self._pool.num_lost, reduce=Reduce.MAX),
            "weight_sync/replicas_live": Metric(len(self._pool.live), reduce=Reduce.MIN),
            "rollout/restarts": Metric(self._pool.num_restarts, reduce=Reduce.MAX),
        }

    async def _send(self, manifest: WeightManifest) -> int | None:
        """One update; the number of buckets, or None where a lost replica has spoilt it for the others."""
        await self._ask("begin_update", manifest)
        loading: asyncio.Task[Any] | None = None
        num_buckets = 0
        try:
            while bucket := merge_ranks(await self._trainers.call_async("next_bucket")):
                if loading is not None:
                    await loading  # the trainers now fill the buffer that this load has read
                if self._is_spoilt():
                    return None
                loading = asyncio.create_task(self._load(bucket))
                num_buckets += 1
            if loading is not None:
                await loading
            if self._is_spoilt():
                return None
        finally:
            if loading is not None:
                loading.cancel()
        received = await self._ask("finish_update", manifest.version)
        check_digests(await self._trainers.call_async("close_sender"), received, manifest.version)
        return num_buckets

    async def _load(self, bucket: Bucket) -> None:
        each = {replica: bucket | {"reader": numbers} for replica, numbers in self._readers.items()}
        await self._ask("load_bucket", each=each, on_loss=functools.partial(self._cancel, bucket))

    async def _ask(
        self, method: str, *args: Any, each: Mapping[int, Any] | None = None, on_loss: OnLoss | None = None
    ) -> dict[int, Any]:
        limit_s = PATIENCE * self._pool.cfg.weight_sync_timeout_s
        answers = await self._pool.call_each(method, *args, each=each, limit_s=limit_s, on_loss=on_loss)
        if not answers:
            raise EngineLost("no rollout replica is left to take the weights")
        return answers

    async def _cancel(self, bucket: Bucket) -> None:
        """Tell those who wait for a lost replica in a broadcast."""
        if "group" in bucket:
            try:
                await asyncio.to_thread(cancel, GroupSpec(**bucket["group"]), "a replica was lost")
            except RuntimeError as error:
                logger.warning("the other replicas wait until their time is up, since they cannot be told: %s", error)

    def _is_spoilt(self) -> bool:
        return self._transport in BROADCAST and self._pool.live != self._connected


def merge_ranks(buckets: list[Bucket | None]) -> Bucket | None:
    """One bucket out of what the trainer ranks say: the same tensors, and every place where their bytes are."""
    present = [bucket for bucket in buckets if bucket is not None]
    if not present:
        return None
    assert len(present) == len(buckets), "trainer ranks disagree on the number of buckets"
    assert all(bucket["names"] == present[0]["names"] for bucket in present), "trainer ranks disagree on a bucket"
    handles = {uuid: handle for bucket in present for uuid, handle in bucket.get("handles", {}).items()}
    return present[0] | ({"handles": handles} if handles else {})


def check_digests(sent: Sequence[int | None], received: Mapping[int, int | None], version: int) -> None:
    """Every engine that counts what it received must have received what rank 0 sent.

    Raises:
        RuntimeError: names the version, the replicas and the digests.
    """
    if missed := [replica for replica, digest in received.items() if digest == MISSED]:
        raise RuntimeError(
            f"weight update {version}: a bucket did not reach replicas {missed}; their logs say why. The engines hold "
            "half-written weights"
        )
    expected = next(digest for digest in sent if digest is not None)
    wrong = {replica: digest for replica, digest in received.items() if digest not in (None, expected)}
    if wrong:
        raise RuntimeError(
            f"weight update {version}: sent digest {expected}, but replicas received {wrong}; "
            "the engines hold half-written weights"
        )
