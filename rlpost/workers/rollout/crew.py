"""The workflow workers of a pool: groups out of prompts, whatever happens to a worker."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.actor import ActorHandle

from rlpost.trajectory import Prompt, Trajectory
from rlpost.workers.config import RolloutConfig
from rlpost.workers.remote import is_death, own, unwrap
from rlpost.workers.rollout.base import SamplingSpec
from rlpost.workers.rollout.liveness import LOST, Actors, within

logger = logging.getLogger(__name__)

Lost = list[tuple[ActorHandle, str]]  # engines, and what was wrong with them


class Crew:
    """Workers by number. One that dies, or does not answer, is replaced and its prompts are sent again.

    Args:
        cfg: the `rollout` section.
        actors: of the pool.
        make: a new worker, which sends to the engines that get work now.
        report: told which engines a worker could not reach.
        abort: cuts off the samples of a prompt that nobody waits for any more.

    Attributes:
        over: why no more groups will be made, if so.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        actors: Actors,
        make: Callable[[], ActorHandle],
        report: Callable[[Lost], Awaitable[None]],
        abort: Callable[[str], Awaitable[None]],
    ):
        self._cfg, self._actors, self._make, self._report, self._abort = cfg, actors, make, report, abort
        self.workers = [make() for _ in range(cfg.num_workers)]
        self.load = [0] * len(self.workers)  # prompts
        self.over: BaseException | None = None
        self._runs: set[asyncio.Future[Any]] = set()
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        """Load workflows and rewards.

        Raises:
            Exception: as `WorkflowWorker.start`.
        """
        await asyncio.gather(*(self._start(*item) for item in enumerate(self.workers)))

    async def run(self, chunk: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[list[Trajectory]]:
        """`n` trajectories of each prompt, made by the worker that has the fewest prompts.

        Raises:
            Exception: the error of the engine, workflow or reward worker, as it was raised there; or `over`.
        """
        which = self.load.index(min(self.load))
        self.load[which] += len(chunk)
        try:
            while self.over is None:
                worker = self.workers[which]
                run = asyncio.ensure_future(worker.run.remote(list(chunk), n, spec))
                self._runs.add(run)
                try:
                    return await run
                except asyncio.CancelledError:
                    if self.over is None:
                        raise
                except Exception as error:
                    if not is_death(error):
                        raise unwrap(error) from None
                    await self._replace(which, worker, error)
                    for prompt in chunk:  # nobody waits for what was begun
                        await self._abort(prompt.id)
                finally:
                    self._runs.discard(run)
            raise self.over
        finally:
            self.load[which] -= len(chunk)

    async def tell(self, method: str, *args: Any) -> None:
        """Call a method of every worker. One that is lost will be replaced, and knows then."""
        limit_s = self._cfg.answer_timeout_s
        calls = (
            within(limit_s, own(getattr(worker, method).remote(*args)), f"workflow worker {which}", f"'{method}'")
            for which, worker in enumerate(self.workers)
        )
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, LOST):
                raise result

    def give_up(self, error: BaseException) -> None:
        """End the wait of whoever waits for groups."""
        self.over = self.over or error
        for run in self._runs:
            run.cancel()

    async def _start(self, which: int, worker: ActorHandle) -> None:
        limit_s = self._cfg.startup_timeout_s
        await self._actors.start(f"workflow worker {which}", worker, worker.start.remote, limit_s)
        self._actors.watch(self._watch(which, worker))

    async def _watch(self, which: int, worker: ActorHandle) -> None:
        """Ask a worker from time to time whether it is there, and which engines it could not reach."""
        while self.workers[which] == worker:
            await asyncio.sleep(self._cfg.health_interval_s)
            ping = own(worker.ping.remote())
            try:
                lost = await within(self._cfg.answer_timeout_s, ping, f"workflow worker {which}", "a ping")
            except Exception as error:  # of Ray, or it does not answer
                await self._replace(which, worker, error)
            else:
                await self._report(lost)

    async def _replace(self, which: int, worker: ActorHandle, error: BaseException) -> None:
        """Start another worker, unless that was done already; give up where no restarts are left."""
        async with self._replacing:
            if self.workers[which] != worker:
                return
            while self._actors.restarts_left:
                self._actors.restarts_left -= 1
                left = self._actors.restarts_left
                logger.warning("workflow worker %d is lost, another starts (restarts left: %d): %s", which, left, error)
                await self._actors.end(worker)
                worker = self.workers[which] = self._make()
                try:
                    await self._start(which, worker)
                    return
                except Exception as again:  # of a worker that does not start: a process edge
                    error = again
            self.give_up(error)
