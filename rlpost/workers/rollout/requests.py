"""Requests inside an engine that can be paused: which run, who waits, and who goes on afterwards."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from rlpost.trajectory import Status
from rlpost.workers.rollout.base import Completion, SamplingSpec, join, request_seed

PAUSE_POLL_S = 0.005

Submit = Callable[[list[int], SamplingSpec, int | None, str, int], Awaitable[list[Completion]]]


class Requests:
    """Admits requests to an engine, and holds them back while it is paused or being updated.

    A request that a pause interrupts goes on as a new one, prompt and answer so far recomputed under the weights of
    then; so every token has the version that sampled it, whatever the engine does with its cache.

    Args:
        submit: `(token_ids, spec, seed, request_id, n)`: run one request in the engine. What an abort cuts off comes
            back with status ABORT.
        abort: `(request_ids)`: ask the engine to end these, at once or not at all; it is asked again.
        max_model_len: tokens that prompt and answer may have together.
    """

    def __init__(self, submit: Submit, abort: Callable[[list[str]], Awaitable[None]], max_model_len: int):
        self._submit, self._abort, self._max_model_len = submit, abort, max_model_len
        self._running: set[str] = set()  # ids of requests inside the engine
        self._interrupted: set[str] = set()  # of those, which `pause(keep=True)` cut off
        self._paused = self._updating = False
        self._open = asyncio.Event()  # clear while paused or being updated: requests wait
        self._open.set()

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
        prompt = list(token_ids)
        completions, interrupted = await self._run(prompt, spec, seed, request_id, n)
        if not interrupted:
            return completions
        rest = (
            self._go_on(prompt, spec, None if seed is None else seed + i, f"{request_id}/{i}", completion)
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
        self._open.clear()
        while self._running:  # again and again: an engine may forget an abort that overtakes its request
            if keep:
                self._interrupted |= self._running
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
        self._open.clear()

    def end_update(self) -> None:
        """Let requests in again, unless the engine is paused."""
        self._updating = False
        self._let_in()

    def _let_in(self) -> None:
        if not (self._paused or self._updating):
            self._open.set()

    async def _run(
        self, token_ids: list[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int
    ) -> tuple[list[Completion], bool]:
        """One request inside the engine: its completions, and whether a pause cut it off."""
        await self._open.wait()
        self._running.add(request_id)
        try:
            completions = await self._submit(token_ids, spec, seed, request_id, n)
        finally:
            self._running.discard(request_id)
            interrupted = request_id in self._interrupted
            self._interrupted.discard(request_id)
        return completions, interrupted

    async def _go_on(
        self, prompt: list[int], spec: SamplingSpec, seed: int | None, request_id: str, done: Completion
    ) -> Completion:
        """Continue an interrupted sample until it ends by itself or is aborted."""
        interrupted = True
        while interrupted and done.status is Status.ABORT:
            length = len(done.token_ids)
            rest = dataclasses.replace(spec, max_tokens=spec.max_tokens - length)
            # another seed for another position: the same one would repeat the draws of the first tokens
            (more,), interrupted = await self._run(
                prompt + done.token_ids.tolist(),
                rest,
                None if seed is None else request_seed(seed, length),
                request_id,
                1,
            )
            done = join(done, more)
        return done
