"""A broadcast from trainer rank 0 to every process that holds an engine's weights, in a process group of their own.

The group is a bare backend of torch: it has no part in anyone's default group. Nobody waits for ever: a member stops
when the time is up, or as soon as it hears, through the store where the members met, that another one has failed.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlpost.host import exported_while, host_address
from rlpost.platform import platform

logger = logging.getLogger(__name__)

POLL_S = 0.001
LOOK_S = 0.2  # between two looks whether another member has failed
CANCEL_S = 10.0  # for the driver to reach the store
_READERS, _FAILED = "readers", "failed"


class BroadcastError(RuntimeError):
    """A member of the group failed, or the time was up; the group is of no more use."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GroupSpec:
    """What a process must know to join.

    Attributes:
        name: unlike that of any other group.
        backend: "gloo", through host memory; or "nccl", between devices (RCCL on ROCm).
        host, port: of the store, which is rank 0's.
        size: number of members, the sender included.
        timeout_s: for all to join, and for each broadcast.
    """

    name: str
    backend: str
    host: str
    port: int
    size: int
    timeout_s: float


class BroadcastGroup:
    """One member. Rank 0 brings the store; readers are numbered as they come.

    Args:
        spec: of the group.
        device: of this member's buffers.
        store: of rank 0.

    Raises:
        BroadcastError: not all members came, or one failed.
    """

    def __init__(self, spec: GroupSpec, device: torch.device, store: dist.TCPStore | None = None):
        self.spec = spec
        limit = timedelta(seconds=spec.timeout_s)
        self._backend: Any = None
        try:
            meeting = store or dist.TCPStore(spec.host, spec.port, is_master=False, timeout=limit)
            self._store = dist.PrefixStore(spec.name, meeting)
            rank = 0 if store is not None else self._store.add(_READERS, 1)
            self._until(lambda: self._store.add(_READERS, 0) == spec.size - 1, "for all members to join")
            platform().set_device(device.index or 0)
            self._backend = _backend(spec.backend, self._store, rank, spec.size, limit)
        except RuntimeError as error:
            raise self._failed(error) from error

    def broadcast(self, data: torch.Tensor) -> None:
        """Rank 0's `data` (uint8 `[n]`) into everyone's; returns when it is there.

        Raises:
            BroadcastError: see there.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._backend.broadcast([data], options)
            self._until(work.is_completed, "in a broadcast")
            work.wait()  # raises what went wrong
        except RuntimeError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Leave; what still runs is ended, by NCCL at once and by gloo when its time is up."""
        if self._backend is not None:
            backend, self._backend = [self._backend], None
            threading.Thread(target=_end, args=(backend,), daemon=True).start()

    def _until(self, done: Callable[[], bool], waiting: str) -> None:
        start = looked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - start > self.spec.timeout_s:
                raise BroadcastError(f"waited {self.spec.timeout_s:g} s {waiting} (rollout.weight_sync_timeout_s)")
            if now - looked > LOOK_S:
                looked = now
                if self._store.check([_FAILED]):
                    raise BroadcastError(self._store.get(_FAILED).decode())
            time.sleep(POLL_S)

    def _failed(self, error: RuntimeError) -> BroadcastError:
        self.close()
        return error if isinstance(error, BroadcastError) else BroadcastError(str(error))


class Broadcaster:
    """Rank 0: hosts the store, and sends one buffer after another in a thread of its own.

    After a failure it sends nothing more, and says so to the members that wait; the caller goes on, since the other
    trainer ranks gather weights in step with it.

    Args:
        backend: "gloo" or "nccl".
        num_readers: how many processes will join, each when it sees its first bucket.
        timeout_s: see `GroupSpec`.
    """

    def __init__(self, backend: str, num_readers: int, timeout_s: float):
        self.device = platform().device() if backend == "nccl" else torch.device("cpu")
        self._store = dist.TCPStore(host_address(), 0, is_master=True, wait_for_workers=False)
        self.spec = GroupSpec(
            name=uuid.uuid4().hex,
            backend=backend,
            host=host_address(),
            port=self._store.port,
            size=num_readers + 1,
            timeout_s=timeout_s,
        )
        self.failure: BroadcastError | None = None
        self._thread = ThreadPoolExecutor(1, "weight-broadcast")
        self._group: BroadcastGroup | None = None

    def send(self, data: torch.Tensor) -> Future[None]:
        """Start sending `data`, which must stay as it is until the future is done."""
        return self._thread.submit(self._send, data)

    def wait(self, sending: Future[None]) -> None:
        """Return when it has been sent, or cannot be."""
        done, _ = futures.wait([sending], 2 * self.spec.timeout_s)  # joining and sending
        if not done:  # inside the backend's own calls, which know no limit
            self._fail(BroadcastError(f"{self.spec.backend} does not come back from a broadcast"))

    def close(self) -> None:
        """Leave the group; what still runs is ended."""
        self._fail(BroadcastError("the sender has left"))
        self._thread.submit(self._leave)  # after what it is at
        self._thread.shutdown(wait=False)

    def _send(self, data: torch.Tensor) -> None:
        if self.failure is not None:
            return
        try:
            if self._group is None:
                self._group = BroadcastGroup(self.spec, self.device, self._store)
            self._group.broadcast(data)
        except BroadcastError as error:
            logger.warning("weights could not be sent: %s", error)
            self._fail(error)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()

    def _fail(self, error: BroadcastError) -> None:
        self.failure = self.failure or error
        _announce(self._store, self.spec, str(error))


def cancel(spec: GroupSpec, reason: str) -> None:
    """End the wait of every member, from outside the group.

    Raises:
        RuntimeError: rank 0's host does not answer; the members' time will be up.
    """
    limit = timedelta(seconds=CANCEL_S)
    _announce(dist.TCPStore(spec.host, spec.port, is_master=False, timeout=limit), spec, reason)


def _announce(store: dist.TCPStore, spec: GroupSpec, reason: str) -> None:
    dist.PrefixStore(spec.name, store).set(_FAILED, reason)


def _end(backend: list[Any]) -> None:
    """End the backend that is taken out of `backend`. In a thread: gloo's waits until nothing runs in it any more."""
    backend.pop().abort()


def _backend(name: str, store: dist.Store, rank: int, size: int, limit: timedelta) -> Any:
    """A bare backend. NCCL's watchdog must not end this process because another one is gone, as it does by default."""
    if name == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 3 * limit  # ours comes first
    with exported_while(TORCH_NCCL_ASYNC_ERROR_HANDLING="2"):  # clean up only
        return dist.ProcessGroupNCCL(store, rank, size, options)
