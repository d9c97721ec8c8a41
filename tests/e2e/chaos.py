"""`kill -9` at random moments, drawn from a seed: what a run trains in the end must not tell of it.

A run that a kill ends is started again in the same folder, as a user would; one that survives goes on. See
`benchmarks/chaos.py` for the long version.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from rlpost.trainer.history import LEDGER, History, Record, holding, read_log
from tests.e2e.runs import Run, small

BATCH = 4
LONGEST_DELAY_S = 1.0  # after a step; one takes about as long, since its scores do
LONGEST_START_S = 15.0
LONGEST_END_S = 120.0  # Ray's agents look for its server for a minute once a driver was killed
TOLERANCE = 1e-6  # of losses, in float32
# readings of the clock and of memory, and how often engines were started
UNSTEADY = ("timing_s/", "time_s", "throughput/", "weight_sync/", "perf/", "rollout/restarts")


class Target(StrEnum):
    """A kind of process of a run."""

    DRIVER = "driver"
    TRAINER = "trainer"
    ENGINE = "engine"
    WORKFLOW = "workflow"
    REWARD = "reward"

    @property
    def ends_run(self) -> bool:
        """Whether the command ends with it."""
        return self in (Target.DRIVER, Target.TRAINER)


COMMANDS = {  # by what is in their command lines
    Target.TRAINER: ("ray::ModelWorker",),
    Target.ENGINE: ("ray::RolloutWorker", "VLLM::EngineCore"),
    Target.WORKFLOW: ("ray::WorkflowWorker",),
    Target.REWARD: ("rlpost.rewards.child",),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Kill:
    """One that is planned: `delay_s` after `step` was trained. Without a step, after the command was started.

    A command that was started again after `step` is at work before it is struck.
    """

    target: Target
    step: int | None
    delay_s: float
    which: float  # of the processes of this kind, in [0, 1)


@dataclass(slots=True, kw_only=True)
class Blow:
    """One that was carried out: after which record of the ledger, and whether the run ended and was resumed."""

    target: Target
    at: str
    ended: bool = False


def plan(num_kills: int, seed: int, targets: Sequence[Target] = tuple(Target), early: float = 0.0) -> list[Kill]:
    """Kills in the order of their steps; every target comes up equally often.

    Args:
        early: share of those after a restart that strike while the run is starting.
    """
    rng = random.Random(seed)
    kills: list[Kill] = []
    deck: list[Target] = []
    step = 0
    for _ in range(num_kills):
        deck = deck or rng.sample(list(targets), len(targets))
        target = deck.pop()
        starting = bool(kills) and kills[-1].target.ends_run and rng.random() < early
        step += 0 if starting else rng.randint(1, 3)
        delay_s = rng.uniform(0.0, LONGEST_START_S if starting else LONGEST_DELAY_S)
        kills.append(Kill(target=target, step=None if starting else step, delay_s=delay_s, which=rng.random()))
    return kills


def num_steps(kills: Sequence[Kill]) -> int:
    """Of a run that lasts beyond the last kill, though the machine be quick."""
    return max(kill.step or 0 for kill in kills) + 4


def overrides(checkpoint: Path, engine: str, trainer: str, steps: int, restarts: int) -> list[str]:
    """A small run with a checkpoint a step, whose rewards take their time in processes of their own."""
    return small(
        checkpoint,
        f"rollout={engine}",
        f"trainer={trainer}",
        "data.val_files=null",
        "reward.terms.accuracy.fn=tests.e2e.rewards.parity_apart",
        "+reward.terms.accuracy.kwargs.pause_s=0.2",
        "reward.num_processes=2",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=2",
        "rollout.health_interval_s=0.5",
        f"rollout.max_restarts={restarts}",
    )


class Chaos:
    """Kills processes of `run` as planned, and keeps it going to its end.

    Attributes:
        blows: what was done.
        problems: what should not have happened.
    """

    def __init__(self, run: Run):
        self.run = run
        self.blows: list[Blow] = []
        self.problems: list[str] = []
        self._before: tuple[int, Record] | None = None  # the ledger's end when the command was started

    def to_the_end(self, kills: Sequence[Kill], limit_s: float = 240.0) -> None:
        """Carry out `kills`, then wait for the run to finish. `limit_s` is for each step on the way."""
        try:
            self._carry_out(kills, limit_s)
        finally:
            if self.run.process.poll() is None:
                self.run.kill()

    def _carry_out(self, kills: Sequence[Kill], limit_s: float) -> None:
        for kill in kills:
            if not self._until(lambda kill=kill: kill.step is None or self._at_work_after(kill.step), limit_s):
                break
            time.sleep(kill.delay_s)
            if not self._until(lambda kill=kill: bool(self.victims(kill.target)), limit_s):
                break
            self._strike(kill)
        self._until(lambda: False, limit_s)

    def _at_work_after(self, step: int) -> bool:
        return self.step >= step and self._last_record() != "start"

    def check_processes(self) -> None:
        """That the run, which is over, has left none."""
        if left := self.run.left_behind(LONGEST_END_S):
            self.problems.append(f"left behind: {left}")

    @property
    def step(self) -> int:
        """The last that was trained, and is not undone."""
        return max((record["step"] for record in holding(self._records()) if record["at"] == "trained"), default=0)

    def victims(self, target: Target) -> list[psutil.Process]:
        """The processes of a kind, in the order of their ids."""
        try:
            driver = psutil.Process(self.run.process.pid)
            if target is Target.DRIVER:
                return [driver]
            return [p for p in driver.children(recursive=True) if any(c in _command(p) for c in COMMANDS[target])]
        except psutil.NoSuchProcess:
            return []

    def _strike(self, kill: Kill) -> None:
        victims = self.victims(kill.target)
        if not victims:
            self.problems.append(f"no {kill.target} was left to kill")
            return
        self.blows.append(Blow(target=kill.target, at=self._last_record()))
        victims[int(kill.which * len(victims))].kill()
        if kill.target.ends_run and self.run.wait() == 0:
            self.problems.append(f"the run went on without its {kill.target}")

    def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for `condition`, starting the run again whenever it has failed; False: it has finished before."""
        deadline = time.monotonic() + limit_s
        step = self.step
        while True:
            status = self.run.process.poll()
            if status == 0:
                return False
            if status is not None:
                self._restart(status)
            elif condition():
                return True
            if self.step != step or status is not None:
                deadline, step = time.monotonic() + limit_s, self.step
            if time.monotonic() > deadline:
                self.run.kill()
                raise AssertionError(f"nothing happened for {limit_s} s after {self.blows[-1:]}: {self.run.stderr}")
            time.sleep(0.05)

    def _restart(self, status: int) -> None:
        blow = self.blows[-1] if self.blows else None
        if blow is None or blow.ended or not (blow.target.ends_run or blow.at == "start"):
            self.problems.append(f"ended with status {status} after {blow}: {self.run.stderr[-1500:]}")
        if blow is None or blow.ended:
            raise AssertionError(self.problems[-1])  # it would only do so again
        blow.ended = True
        records = self._records()
        self._before = (len(records), records[-1]) if records else None
        self.run.start()

    def _records(self) -> list[Record]:
        return read_log(self.run.folder / LEDGER).records

    def _last_record(self) -> str:
        """The kind of the ledger's last; "start": nothing of a group was recorded since the command was started."""
        records = self._records()
        if not records or (len(records), records[-1]) == self._before:
            return "start"
        at = records[-1]["at"]
        return {"begun": "start", "repaired": "start", "resumed": "start", "generated": "scored"}.get(at, at)


@dataclass(slots=True, frozen=True, kw_only=True)
class Comparison:
    """A run beside an undisturbed one."""

    lost: int  # groups that only the undisturbed one trained
    repeated: int  # groups that were trained more than once
    deviation: float | None  # largest of a metric, relative; infinite where others were logged; None: not compared
    problems: list[str]


def compare(run: Run, undisturbed: Run, *, ledger: bool, metrics: bool) -> Comparison:
    """Both trained the same groups, once; with `ledger` in the same steps, with `metrics` to the same effect."""
    ours, theirs = (History.read(each.folder) for each in (run, undisturbed))
    problems = [*ours.problems(), *theirs.problems()]
    if list(ours.steps) != list(theirs.steps) or any(len(ids) != BATCH for ids in ours.steps.values()):
        problems.append(f"groups by step: { {step: len(ids) for step, ids in ours.steps.items()} }")
    if ledger and (ours.steps != theirs.steps or ours.groups != theirs.groups):
        problems.append("not the ledger of the undisturbed run")
    if ours.trained != theirs.trained:
        problems.append(f"trained: {ours.trained - theirs.trained} more, {theirs.trained - ours.trained} less")
    deviation = _deviation(run, undisturbed) if metrics else None
    if deviation is not None and deviation > TOLERANCE:
        problems.append(f"metrics differ by {deviation:.1e}")
    return Comparison(
        lost=(theirs.trained - ours.trained).total(),
        repeated=(ours.trained - Counter(set(ours.trained))).total(),
        deviation=deviation,
        problems=problems,
    )


def _deviation(run: Run, undisturbed: Run) -> float:
    ours, theirs = run.steps(), undisturbed.steps()
    if ours.keys() != theirs.keys():
        return math.inf
    largest = 0.0
    for step, metrics in theirs.items():
        mine, yours = _steady(ours[step]), _steady(metrics)
        if mine.keys() != yours.keys():
            return math.inf
        largest = max(largest, *(abs(mine[key] - yours[key]) / max(1e-3, abs(yours[key])) for key in yours))
    return largest


def _steady(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith(UNSTEADY) and value is not None}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
