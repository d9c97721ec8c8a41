"""The actor around one engine: a process of its own, because an engine's host loop bounds decoding.

Whoever holds its handle imports this module: it loads no engine, and no torch, before an actor is made.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from rlpost import heartbeat
from rlpost.host import exported, settle
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.base import ENGINES, Completion
from rlpost.workers.rollout.liveness import Processes
from rlpost.workers.rollout.router import Answered, Request

if TYPE_CHECKING:
    from rlpost.workers.model import ModelInfo

PHASES = {
    "start": "start",
    "begin_update": "publish",
    "load_bucket": "publish",
    "finish_update": "publish",
    "sleep": "memory",
    "wake": "memory",
}
MOMENT_S = 0.005  # answers that come within it travel together


class RolloutWorker:
    """One engine replica in a process of its own; `seed` is the engine's, for requests without one."""

    def __init__(self, cfg: RolloutConfig, model: "ModelInfo", max_model_len: int, seed: int = 0):
        heartbeat.start(exported().get(heartbeat.VARIABLE), heartbeat.numberless("engine"))
        self._timeout_s = cfg.request_timeout_s
        self._halt = ExitStack()  # the phase from `pause` to `resume`, in which that of requests goes on
        self._engine = ENGINES.get(cfg.name, "rollout.name")(cfg, model, max_model_len, seed)

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Answered]]:
        """The completions of each request as they come, those of a moment together: a long answer holds up no other.

        Raises:
            TimeoutError: a request that took longer than `rollout.request_timeout_s`.
        """
        finished: asyncio.Queue[asyncio.Task[list[Completion]]] = asyncio.Queue()
        positions = {asyncio.ensure_future(self._one(request)): i for i, request in enumerate(requests)}
        for task in positions:
            task.add_done_callback(finished.put_nowait)
        num_left = len(positions)
        try:
            while num_left:
                moment = [await finished.get()]
                await asyncio.sleep(MOMENT_S)
                moment += [finished.get_nowait() for _ in range(finished.qsize())]
                num_left -= len(moment)
                yield [(positions[task], task.result()) for task in moment]
        finally:
            for task in positions:
                task.cancel()

    async def call(self, method: str, *args: Any) -> Any:
        """Any other method of the engine."""
        if method == "pause":
            self._halt.close()
            self._halt.enter_context(heartbeat.phase("pause", "until resume"))
        with nullcontext() if method == "pause" else heartbeat.phase(PHASES.get(method, ""), method):
            result = await getattr(self._engine, method)(*args)
        if method == "start":
            settle()
        if method == "resume":
            self._halt.close()
        return result

    async def processes(self) -> Processes:
        """This process and the engine's."""
        return Processes.of_this()

    async def _one(self, request: Request) -> list[Completion]:
        try:
            async with asyncio.timeout(self._timeout_s):
                with heartbeat.phase("generate", f"request {request.request_id}"):
                    return await self._engine.generate(
                        request.token_ids.tolist(), request.spec, request.seed, request.request_id, request.n
                    )
        except TimeoutError:
            raise TimeoutError(
                f"request {request.request_id} took longer than rollout.request_timeout_s={self._timeout_s}"
            ) from None
