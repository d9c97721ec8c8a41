"""From workflows to engines: requests of one moment travel together, to the replica that holds the fewest samples."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from ray.actor import ActorHandle

from rlpost.workers.remote import unwrap
from rlpost.workers.rollout.base import Completion, EngineLost, SamplingSpec
from rlpost.workers.rollout.liveness import LOST

MAX_RESENDS = 2  # of a request whose replica was lost: it may be what kills them

Answered = tuple[int, list[Completion]]  # position of a request in its call, and its completions


@dataclass(slots=True, frozen=True, kw_only=True)
class Request:
    """One call of `RolloutEngine.generate`."""

    token_ids: np.ndarray
    spec: SamplingSpec
    seed: int | None
    request_id: str
    n: int


@dataclass(slots=True, kw_only=True)
class _Waiting:
    request: Request
    future: "asyncio.Future[list[Completion]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_resends: int = 0


Left = dict[int, _Waiting]  # position of a request in its call -> who waits for it


class Router:
    """Spreads requests over engine replicas by the samples they hold, and sends those of one moment in one call.

    What a lost replica was working on is begun anew by the others, or where there is none, by the next one admitted.

    Attributes:
        lost: engines that were found lost here, and why.
    """

    def __init__(self, engines: Sequence[ActorHandle]):
        self.lost: list[tuple[ActorHandle, str]] = []
        self._engines = list(engines)
        self._load = dict.fromkeys(range(len(self._engines)), 0)  # samples, of replicas that get work
        self._pending: list[_Waiting] = []
        self._calls: dict[asyncio.Task[None], tuple[int, Left]] = {}  # under way: to which replica, and what is left

    async def generate(self, request: Request) -> list[Completion]:
        """The completions of `request`.

        Raises:
            Exception: the engine's own error, as it was raised there.
        """
        waiting = _Waiting(request=request)
        self._put(waiting)
        return await waiting.future

    def exclude(self, replica: int) -> None:
        """Send no more to this replica, and wait no longer for it."""
        self._load.pop(replica, None)
        for call, (of, left) in self._calls.items():
            if of == replica and call is not asyncio.current_task():
                call.cancel()
                self._begin_anew(left, EngineLost(f"rollout replica {replica} was lost"))

    def admit(self, replica: int, engine: ActorHandle) -> None:
        """Send to `engine` as replica `replica`, beginning with what waits."""
        self._engines[replica], self._load[replica] = engine, 0
        self._flush()

    def _put(self, waiting: _Waiting) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(waiting)

    def _flush(self) -> None:
        if not self._load:
            return
        shares: dict[int, list[_Waiting]] = {}
        for waiting in self._pending:
            replica = min(self._load, key=self._load.__getitem__)
            self._load[replica] += waiting.request.n
            shares.setdefault(replica, []).append(waiting)
        self._pending = []
        for replica, share in shares.items():
            left = dict(enumerate(share))
            call = asyncio.ensure_future(self._send(replica, left))
            self._calls[call] = replica, left
            call.add_done_callback(self._calls.pop)

    async def _send(self, replica: int, left: Left) -> None:
        try:
            generate = self._engines[replica].generate.options(num_returns="streaming")
            async for reference in generate.remote([waiting.request for waiting in left.values()]):
                for position, result in await reference:
                    waiting = left.pop(position)
                    self._unload(replica, [waiting])
                    if not waiting.future.done():  # a workflow may have given up waiting
                        waiting.future.set_result(result)
        except Exception as remote:  # whatever it was, whoever waits must hear of it
            self._fail(replica, left, unwrap(remote))
        finally:
            self._unload(replica, left.values())

    def _unload(self, replica: int, done: Iterable[_Waiting]) -> None:
        if replica in self._load:
            self._load[replica] -= sum(waiting.request.n for waiting in done)

    def _fail(self, replica: int, left: Left, error: BaseException) -> None:
        if isinstance(error, LOST):
            self.lost.append((self._engines[replica], str(error)))
            self.exclude(replica)
            self._begin_anew(left, error)
            return
        for waiting in left.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)

    def _begin_anew(self, left: Left, error: BaseException) -> None:
        """Send what is left of a call elsewhere; `error` is of whom it was sent to."""
        for waiting in left.values():
            if waiting.future.done():
                continue
            if waiting.num_resends < MAX_RESENDS:
                waiting.num_resends += 1
                self._put(waiting)
            else:
                waiting.future.set_exception(error)
        left.clear()
