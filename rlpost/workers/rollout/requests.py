"""Requests inside an engine that can be paused: which run, who waits, and who goes on afterwards."""

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Sequence

from rlpost.trajectory import Status
from rlpost.workers.rollout.base import Completion, SamplingSpec, join, request_seed

PAUSE_POLL_S = 0.005

Submit = Callable[[list[int], SamplingSpec, int | None, str, int], Awaitable[list[Completion]]]


class Requests:
    """Admits requests to an engine, and holds them back while it is paused or being updated.

    A request that a pause interrupts goes on as a new one, prompt and answer so far recomputed under the weights of
    then; so every token has the version that sampled it, whatever the engine does with its cache. Those that wait are
    let in by the order in which they first came: an engine that cannot run all of them at once goes on with those it
    was at, rather than begin what is needed last.

    Args:
        submit: `(token_ids, spec, seed, request_id, n)`: run one request in the engine. What an abort cuts off comes
            back with status ABORT.
        abort: `(request_ids)`: ask the engine to end these, at once or not at all; it is asked again.
        max_model_len: tokens that prompt and answer may have together.
    """

    def __init__(self, submit: Submit, abort: Callable[[list[str]], Awaitable[None]], max_model_len: int):
        self._submit, self._abort, self._max_model_len = submit, abort, max_model_len
        self._numbers = itertools.count()  # of requests, as they come
        self._running: dict[str, None] = {}  # ids of requests inside the engine, in the order they were let in
        self._interrupted: set[str] = set()  # of those, which `pause(keep=True)` cut off
        self._paused = self._updating = False  # while either, requests wait
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # by the number of their request

    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: prompt and `spec.max_tokens` exceed the engine's `max_model_len`.
        """
        if len(token_ids) + spec.max_tokens > self._max_model_len:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and an answer of up to {spec.max_tokens} exceed "
                f"rollout.max_model_len={self._max_model_len}"
            )
        prompt, number = list(token_ids), next(self._numbers)
        completions, interrupted = await self._run(number, prompt, spec, seed, request_id, n)
        if not interrupted:
            return completions
        rest = (
            self._go_on(number, prompt, spec, None if seed is None else seed + i, f"{request_id}/{i}", completion)
            for i, completion in enumerate(completions)
        )
        return list(await asyncio.gather(*rest))

    async def abort(self, request_id: str | None = None) -> None:
        """See `RolloutEngine.abort`."""
        ids = [r for r in self._running if request_id is None or r == request_id or r.startswith(f"{request_id}/")]
        if ids:
            await self._abort(ids)

    async def pause(self, keep: bool) -> None:
        """See `RolloutEngine.pause`. A kept request waits here, not in the engine, so nothing depends on its queue."""
        self._paused = True
        while self._running:  # again and again: an engine may forget an abort that overtakes its request
            if keep:
                self._interrupted.update(self._running)
            await self.abort()
            await asyncio.sleep(PAUSE_POLL_S)

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._paused = False
        self._let_in()

    def begin_update(self, version: int) -> None:
        """Hold requests back until `end_update`.

        Raises:
            RuntimeError: some are running.
        """
        if self._running:
            raise RuntimeError(f"weight update {version}: {len(self._running)} requests are running; pause first")
        self._updating = True

    def end_update(self) -> None:
        """Let requests in again, unless the engine is paused."""
        self._updating = False
        self._let_in()

    def _let_in(self) -> None:
        if self._closed:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
        for _, entry in waiting:
            if not entry.done():  # nobody may wait any more
                entry.set_result(None)

    @property
    def _closed(self) -> bool:
        return self._paused or self._updating

    async def _run(
        self, number: int, token_ids: list[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int
    ) -> tuple[list[Completion], bool]:
        """One request inside the engine, a part of `number`: its completions, and whether a pause cut it off."""
        while self._closed:  # once more where a pause overtakes those that were let in
            entry = asyncio.get_running_loop().create_future()
            self._waiting.append((number, entry))
            await entry
        self._running[request_id] = None
        try:
            completions = await self._submit(token_ids, spec, seed, request_id, n)
        finally:
            self._running.pop(request_id, None)
            interrupted = request_id in self._interrupted
            self._interrupted.discard(request_id)
        return completions, interrupted

    async def _go_on(
        self, number: int, prompt: list[int], spec: SamplingSpec, seed: int | None, request_id: str, done: Completion
    ) -> Completion:
        """Continue an interrupted sample until it ends by itself or is aborted."""
        interrupted = True
        while interrupted and done.status is Status.ABORT:
            length = len(done.token_ids)
            rest = dataclasses.replace(spec, max_tokens=spec.max_tokens - length)
            # another seed for another position: the same one would repeat the draws of the first tokens
            (more,), interrupted = await self._run(
                number,
                prompt + done.token_ids.tolist(),
                rest,
                None if seed is None else request_seed(seed, length),
                request_id,
                1,
            )
            done = join(done, more)
        return done
