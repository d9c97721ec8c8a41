"""Actors as processes: whether one answers in time, and that it is gone before another takes its place."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlpost.workers.remote import own
from rlpost.workers.rollout.base import EngineLost
from rlpost.workers.rollout.processes import end

logger = logging.getLogger(__name__)

LOST = (RayActorError, EngineLost)  # errors that mean: this replica will not come back
SLICES = 4  # of a time limit, see `within`
PATIENCE = 1.5  # times a limit that an actor keeps itself, before it is given up
LEAVE_S = 3.0  # for an actor to end itself; one that is stopped or hangs in a kernel does not
END_S = 60.0  # to reach the node of a process that is to be ended
T = TypeVar("T")


class NoAnswer(EngineLost):
    """A process has not answered in time."""


@dataclass(slots=True, frozen=True)
class Processes:
    """An actor's process and all that it has started: on which node, and (id, time of start in s) of each."""

    node: str
    members: tuple[tuple[int, float], ...]

    @staticmethod
    def of_this() -> "Processes":
        """Those of the actor that calls this."""
        this = psutil.Process()
        members = []
        for process in [this, *this.children(recursive=True)]:
            try:
                members.append((process.pid, process.create_time()))
            except psutil.NoSuchProcess:  # it has ended meanwhile
                continue
        return Processes(ray.get_runtime_context().get_node_id(), tuple(members))

    def end(self) -> None:
        """Kill them, to be called on their node; also what they have started since. Returns when they are gone.

        The actor itself has `LEAVE_S` to do as Ray tells it, or Ray would report a crash.
        """
        found: set[psutil.Process] = set()
        for pid, started in self.members:
            try:
                process = psutil.Process(pid)
                if process.create_time() == started:  # else the number has been given to another
                    found |= {process, *process.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([process for process in found if process.pid == self.members[0][0]], timeout=LEAVE_S)
        end(found)

    async def end_there(self) -> None:
        """As `end`, from any node."""
        if self.node == ray.get_runtime_context().get_node_id():
            await asyncio.to_thread(self.end)
            return
        where = NodeAffinitySchedulingStrategy(self.node, soft=False)
        ended = ray.remote(Processes.end).options(num_cpus=0, scheduling_strategy=where).remote(self)
        try:
            await within(END_S, own(ended), f"node {self.node}", "a call to end processes")
        except Exception as error:  # the node may be what is lost
            logger.warning("processes of a lost actor could not be ended: %s", error)


async def within(limit_s: float, answer: Awaitable[T], who: str, what: str) -> T:
    """Wait for an answer, but not beyond `limit_s`.

    The time runs in slices, so that a driver which was itself stopped for long (Ctrl-Z) still takes what has come
    meanwhile.

    Raises:
        NoAnswer: names `who` was asked, and `what`.
    """
    task = asyncio.ensure_future(answer)
    try:
        for _ in range(SLICES):
            if (await asyncio.wait({task}, timeout=limit_s / SLICES))[0]:
                return task.result()
    finally:
        task.cancel()
    raise NoAnswer(f"{who} did not answer {what} within {limit_s:g} s")


class Actors:
    """The actors of a pool: started within a limit, watched, ended for sure; some of them in place of lost ones.

    Args:
        max_restarts: how many may be started in place of lost ones.

    Attributes:
        restarts_left: of those.
    """

    def __init__(self, max_restarts: int):
        self.restarts_left = max_restarts
        self._processes: dict[ActorHandle, Processes] = {}
        self._watching: set[asyncio.Task[None]] = set()

    async def start(self, name: str, actor: ActorHandle, start: Callable[[], Awaitable[Any]], limit_s: float) -> None:
        """Start what is in `actor`. Its processes are noted before, in case that it hangs, and after.

        Raises:
            NoAnswer: it took longer than `PATIENCE` times `limit_s`, and did not end by itself.
            Exception: what was raised there.
        """

        async def steps() -> None:
            self._processes[actor] = await own(actor.processes.remote())
            await own(start())
            self._processes[actor] = await own(actor.processes.remote())

        await within(PATIENCE * limit_s, steps(), name, "its start")

    async def end(self, actor: ActorHandle) -> None:
        """End an actor and its processes, whatever state they are in.

        Ray asks an actor to end itself, which one that is stopped or hangs in a kernel does not do.
        """
        ray.kill(actor)
        processes = self._processes.pop(actor, None)
        if processes is not None:
            await processes.end_there()

    def watch(self, watching: Coroutine[Any, Any, None]) -> None:
        """Run `watching` until `close`."""
        task = asyncio.create_task(watching)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def close(self) -> None:
        """Watch no more."""
        for watching in self._watching:
            watching.cancel()
