"""Rollout and training at the same time, on devices of their own, within a bound on how old samples may be."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import FilterGroupsConfig
from rlpost.metrics import Metric, Metrics, Reduce, merge
from rlpost.rewards.config import RewardConfig
from rlpost.trainer.buffer import Blocked, GroupBuffer, Slot
from rlpost.trainer.idle import IdleMeter
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.limits import Limits
from rlpost.trainer.prompts import PromptQueue
from rlpost.trainer.source import (
    PromptsExhausted,
    RolloutSource,
    check_rewards,
    exhausted,
    rollout_metrics,
    warn_of_errors,
)
from rlpost.trainer.waiting import either, end_tasks
from rlpost.trajectory import Group, Prompt
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.base import EngineLost, SamplingSpec
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.base import WeightSync

logger = logging.getLogger(__name__)

Hook = Callable[[PromptQueue], Coroutine[Any, Any, None]]
# idle shares of a step and the present limits -> limits from now on, and what to report as `async/<name>`
Pilot = Callable[[Mapping[str, float], Limits], tuple[Limits, dict[str, float]]]

MAX_LAG = 8  # versions behind that get a metric of their own; the last one holds all beyond
MAX_FAILURES = 64  # groups that may fail one after the other before a run ends that was told to go on


class AsyncSource(RolloutSource):
    """Keeps as many groups in flight as `buffer` allows, and syncs weights while they run.

    Groups are started whenever something changes that may allow it (one finished, was taken, or weights were synced);
    there is no loop that could miss it. The first `take` starts rollout.

    Engines that were lost are started anew beside all this, and get work with the next push. `take` and whatever else
    waits for the engines pushes at once, since the trainer has nothing else to do: there may be no engine left.

    Args:
        buffer: order, capacity and staleness.
        prompts: what is issued.
        partial_rollout: keep running requests over a sync; else a sync waits for them to end.
        stop_on_error: a workflow's error ends the run; else its group is dropped and counted, up to `MAX_FAILURES`.
        room: groups that the engines can run at once, for the idle share of rollout.
        hook: the user's own coroutine, run with `prompts` beside the training; its error ends the run.
        autopilot: asked after each step; see `rlpost.trainer.autopilot`.
        clock: seconds; a simulator has its own.
        ledger: None: nothing is recorded.
    """

    def __init__(
        self,
        *,
        buffer: GroupBuffer,
        prompts: PromptQueue,
        algorithm: Algorithm,
        pool: RolloutPool,
        sync: WeightSync,
        spec: SamplingSpec,
        n: int,
        filter_groups: FilterGroupsConfig,
        reward: RewardConfig,
        partial_rollout: bool,
        stop_on_error: bool,
        room: int,
        hook: Hook | None = None,
        autopilot: Pilot | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ledger: Ledger | None = None,
    ):
        self.buffer, self.prompts = buffer, prompts
        self._algorithm, self._pool, self._sync, self._spec, self._n = algorithm, pool, sync, spec, n
        self._filter, self._reward = filter_groups, reward
        self._partial_rollout, self._stop_on_error, self._room = partial_rollout, stop_on_error, room
        self._hook, self._autopilot = hook, autopilot
        self._ledger = ledger or Ledger(None)
        self._hook_task: asyncio.Task[None] | None = None
        self._started = self._held = False  # held: nothing new is started
        self._offered: int | None = None  # version of the trainer's weights
        self._pushed: int | None = None  # version of the engines' weights; None: the checkpoint's
        self._push: asyncio.Task[None] | None = None  # the last one; it may have ended
        self._pushing = asyncio.Lock()  # from the engines' halt until they go on
        self._rebuilding: asyncio.Task[None] | None = None  # the same
        self._newcomers = False  # engines that were started anew wait for weights
        self._stranded = asyncio.Event()  # no engine is there
        pool.on_loss = self._note_loss
        self._running: dict[asyncio.Task[None], Slot] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._failures = 0  # one after the other
        self._idle = IdleMeter(clock)
        self._reports: list[Metrics] = []
        self._counts: Counter[str] = Counter()
        self._last: list[Prompt] = []  # of the last `take`

    async def take(self, n: int) -> list[Group]:
        """See `RolloutSource.take`. Groups arrive in the order of issue, none older than the buffer's bound.

        Raises:
            PromptsExhausted: the prompts ended before `n` groups were kept.
        """
        self._start()
        await self._catch_up(self.buffer.limits.sync_every - 1)  # which may have changed since `publish`
        budget = n * self._filter.max_num_gen_batches
        seen: list[Group] = []
        kept: list[Group] = []
        counts: Counter[str] = Counter()
        self._idle.waiting(True)
        while len(kept) < n and (len(seen) < budget or not self._filter.enable):
            group = await self._next(n - len(kept))
            seen.append(group)
            verdict = self._algorithm.keep(group)
            counts["kept" if verdict.keep else f"dropped_{verdict.reason}"] += 1
            if verdict.keep:
                kept.append(group)
            else:
                self.buffer.put_back()
                self._ledger.dropped([group], verdict.reason)
            if len(seen) % n == 0:  # also while none is kept
                check_rewards(seen, self._reward)
        self._idle.waiting(False)
        check_rewards(seen, self._reward)
        warn_of_errors(seen, self._reward.max_error_rate)
        if len(kept) < n and (self._filter.on_exhausted == "error" or not kept):
            raise exhausted(len(kept), n, len(seen), counts)
        self._counts += counts
        self._reports += [rollout_metrics(seen), staleness_metrics(kept, self.buffer.step - 1)]
        self._last = [group.prompt for group in kept]
        self.buffer.end_step()
        self._start_groups()
        return kept

    def rewind(self) -> None:
        """See `RolloutSource.rewind`."""
        self.buffer.rewind(self._last)
        self.metrics()  # of what is thrown away

    async def publish(self, version: int) -> Metrics:
        """See `RolloutSource.publish`. Between syncs the engines keep the weights they have.

        Returns when the push has begun; `take` and whatever else needs the engines waits for its end, so that it is
        hidden where the trainer would wait for groups anyway.
        """
        await self._synced()
        again, self._offered = version == self._offered, version
        if again or self._behind() >= self.buffer.limits.sync_every:
            self._push = asyncio.create_task(self._push_weights(version))
        return {}

    @asynccontextmanager
    async def without_push(self) -> AsyncIterator[None]:
        """See `RolloutSource.without_push`. A push that has begun ends first; one that waits for groups waits on."""
        await asyncio.sleep(0)  # for one that `publish` has made this moment
        async with self._pushing:
            yield

    async def evaluate(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """See `RolloutSource.evaluate`. Training's own groups go on beside it; a sync that was not due comes first."""
        await self._catch_up()
        return await self._generate(prompts, n, spec)

    async def probe(self, num_sequences: int, max_tokens: int | None = None) -> list[Group]:
        """See `RolloutSource.probe`. A sync that was not due comes first."""
        await self._catch_up()
        prompts = self.prompts.peek(-(-num_sequences // self._n))
        return await self._generate(prompts, self._n, self._spec.for_probe(max_tokens))

    async def restart_engines(self, cfg: RolloutConfig) -> None:
        """See `RolloutSource.restart_engines`. What runs is cut off, to be run again."""
        await self._synced()
        await end_tasks([self._rebuilding])
        self._newcomers = False
        self._held = True  # until weights are pushed again
        await end_tasks(self._running)
        self.buffer.rerun()
        await self._pool.restart(cfg)
        self._pushed = None

    def metrics(self) -> Metrics:
        """See `RolloutSource.metrics`."""
        shares = self._idle.pop()
        if self._autopilot is not None:
            self.buffer.limits, advice = self._autopilot(shares, self.buffer.limits)
            shares = shares | advice
        counts = self._counts + self.buffer.counts
        self._counts.clear()
        self.buffer.counts.clear()
        reports, self._reports = self._reports, []
        return (
            merge(reports)
            | {f"groups/{name}": Metric(count, reduce=Reduce.SUM) for name, count in counts.items()}
            | {f"async/{name}": Metric(share) for name, share in shares.items()}
            | {"async/in_flight": Metric(self.buffer.in_flight), "async/running": Metric(self.buffer.num_running)}
        )

    def state_dict(self) -> dict[str, Any]:
        """Prompts, finished groups and those in flight, which a resumed run makes anew."""
        return {"prompts": self.prompts.state_dict(), "buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `RolloutSource.load_state_dict`. What runs now is cut off."""
        for task in self._running:
            task.cancel()
        self.prompts.load_state_dict(state["prompts"])
        self.buffer.load_state_dict(state["buffer"])
        if self._pushed is not None:
            self.buffer.publish(self._pushed)

    async def close(self) -> None:
        """End what runs."""
        await end_tasks([*self._running, self._push, self._hook_task, self._rebuilding])

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self._idle.pop()  # what was before is no part of a step
        if self._hook is not None:
            self._hook_task = asyncio.create_task(self._run_hook(self._hook))

    async def _run_hook(self, hook: Hook) -> None:
        try:
            await hook(self.prompts)
        except Exception as error:  # the user's code: a process edge
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """End the run: whoever waits for groups hears of the first error."""
        self._error = self._error or error
        self._changed.set()

    async def _next(self, missing: int) -> Group:
        """The next group, when it is there."""
        while True:
            self._changed.clear()
            group = self.buffer.take()
            self._start_groups()  # `take` may have dropped some
            if self._error is not None:
                raise self._error
            if group is not None:
                return group
            if self._newcomers:
                await self._catch_up()
                continue
            if not self.buffer.slots and self.buffer.blocked() is None:
                raise PromptsExhausted(
                    f"the prompts ended: step {self.buffer.step} needs {missing} more groups. Lower "
                    "trainer.total_training_steps, or give it more prompts"
                )
            await self._changed.wait()

    def _start_groups(self) -> None:
        """Start whatever may be started now."""
        while self._started and not self._held and self._error is None:
            if (slot := self.buffer.waiting()) is not None:
                self.buffer.restart(slot)
            elif self.buffer.blocked() is None and (prompt := self._next_prompt()) is not None:
                slot = self.buffer.issue(prompt)
            else:
                break
            self._ledger.issued([slot.prompt])
            task = asyncio.create_task(self._produce(slot))
            self._running[task] = slot
            task.add_done_callback(self._running.pop)  # also called for one that is cancelled before it begins
        self._note_state()

    def _next_prompt(self) -> Prompt | None:
        try:
            return self.buffer.reissued() or self.prompts.pop()
        except Exception as error:  # the user's sampler: a process edge
            self._stop(error)
            return None

    def _note_state(self) -> None:
        """Tell the idle meter what runs, and why no more does."""
        running, reason = self.buffer.num_running, self.buffer.blocked() if self._started else None
        if self._held:
            self._idle.set(0 if self._partial_rollout else running, self._room, "sync")
        else:
            self._idle.set(running, self._room, None if reason is Blocked.CONCURRENCY else reason)

    async def _produce(self, slot: Slot) -> None:
        """Run one slot's group to its end and tell whoever waits."""
        try:
            group = await self._pool.submit(slot.prompt, self._n, self._spec)
        except Exception as error:  # of a workflow, an engine or Ray: a process edge
            self._fail(slot, error)
        else:
            self._failures = 0
            if not slot.gone:
                self._ledger.arrived([group])
            self.buffer.put(slot, group)
        self._start_groups()
        self._changed.set()

    def _fail(self, slot: Slot, error: Exception) -> None:
        self._failures += 1
        stop = self._stop_on_error or self._failures >= MAX_FAILURES
        self.buffer.fail(slot, drop=not stop)  # a resumed run makes it again
        if stop:
            self._stop(error)
        else:
            self._ledger.dropped([slot.prompt], "failed")
            logger.warning("group '%s' is dropped: its workflow failed", slot.prompt.id, exc_info=error)

    async def _push_weights(self, version: int) -> None:
        """Hold or drain rollout, push, and go on."""
        self._held = True
        self._note_state()
        if not self._partial_rollout and version != self._pushed:
            await either(asyncio.gather(*self._running, return_exceptions=True), self._stranded.wait())
        async with self._pushing:
            await self._pool.pause(keep=True)  # also what was cut off and may still run somewhere
            self._reports.append(await self._push_to_engines(version))
            await self._pool.resume()
        self._pushed = version
        cut_off = self.buffer.publish(version)
        for task, slot in list(self._running.items()):
            if slot in cut_off:
                task.cancel()
                await self._pool.abort(slot.prompt.id)
        self._held = False  # not before: an abort would also meet its prompt's new group
        self._start_groups()

    async def _push_to_engines(self, version: int) -> Metrics:
        """Push to all that are there, once there are any."""
        while True:
            if self._newcomers:
                self._newcomers = False
                self._pool.join()
                self._stranded.clear()
            try:
                return await self._sync.push(version)
            except EngineLost:
                if not self._stranded.is_set() or self._rebuilding is None:
                    raise
            await asyncio.wait({self._rebuilding})
            if self._error is not None:
                raise self._error

    def _note_loss(self) -> None:
        if not self._pool.live:
            self._stranded.set()
        if self._rebuilding is None or self._rebuilding.done():
            self._rebuilding = asyncio.create_task(self._rebuild())

    async def _rebuild(self) -> None:
        try:
            self._newcomers |= await self._pool.rebuild()
        except Exception as error:  # of the last engine: a process edge
            self._stop(error)
        self._changed.set()

    async def _generate(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """Groups of `prompts`, now."""
        groups = asyncio.create_task(self._pool.run(prompts, n, spec))
        groups.add_done_callback(lambda _: self._changed.set())
        try:
            while not groups.done():
                self._changed.clear()
                await (self._catch_up() if self._newcomers else self._changed.wait())
            return groups.result()
        finally:
            await end_tasks([groups])

    async def _synced(self) -> None:
        """Wait for the end of a push that is under way. One that failed raises again, whoever asks."""
        if self._push is not None:
            await self._push

    async def _catch_up(self, lag: int = 0) -> None:
        """See that the engines are at most `lag` versions behind the trainer."""
        await self._synced()
        if self._offered is not None and (self._newcomers or self._behind() > lag):
            self._push = asyncio.create_task(self._push_weights(self._offered))
            await self._synced()

    def _behind(self) -> float:
        """Versions that the engines are behind the trainer."""
        return math.inf if self._offered is None or self._pushed is None else self._offered - self._pushed


def staleness_metrics(groups: Sequence[Group], version: int) -> Metrics:
    """How far behind `version`, which they train, groups and tokens were sampled.

    `async/staleness/{mean,max}` over groups, by their oldest token; `async/groups_lag_<k>` and `async/tokens_lag_<k>`
    as shares of all groups and sampled tokens, the last k for all beyond it.
    """
    lags = [np.concatenate([version - t.versions[t.versions >= 0] for t in g.trajectories]) for g in groups]
    lags = [lag for lag in lags if len(lag)]
    if not lags:
        return {}
    oldest, tokens = np.array([lag.max() for lag in lags]), np.concatenate(lags)
    metrics = {
        "async/staleness/mean": Metric(float(oldest.mean()), len(oldest)),
        "async/staleness/max": Metric(float(oldest.max()), reduce=Reduce.MAX),
    }
    for name, values in (("groups", oldest), ("tokens", tokens)):
        shares = np.bincount(values.clip(0, MAX_LAG)) / len(values)
        metrics |= {f"async/{name}_lag_{k}": Metric(float(share), len(values)) for k, share in enumerate(shares)}
    return metrics
