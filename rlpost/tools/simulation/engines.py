"""Simulated engines and weight sync: what `RolloutPool` and `WeightSync` do, in virtual time.

All sequences of a replica get a token in each decode step, and a step takes as long as the batch is large. So nothing
happens between two changes of the batch, and one timer a replica, for the sequence that ends next, is enough.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from rlpost.metrics import Metrics
from rlpost.tools.simulation.lengths import Lengths
from rlpost.tools.simulation.scenario import Scenario
from rlpost.trainer.idle import IdleMeter
from rlpost.trajectory import Group, Prompt, Provenance, Status, Trajectory

EPSILON = 1e-6  # decode steps: rounding of the virtual clock


@dataclass(slots=True, eq=False)
class Answers:
    """The answers to one prompt, while they are made."""

    prompt: Prompt
    missing: int
    done: asyncio.Future[None]
    tokens: Counter[int] = field(default_factory=Counter)  # sampled under each version


@dataclass(slots=True, eq=False)
class Sequence_:
    """One answer on a replica, which ends when the replica has made `end` decode steps."""

    answers: Answers
    length: int
    end: float = 0.0
    counted: int = 0  # tokens that are in `answers.tokens` already


class Replica:
    """One engine: decodes up to `slots` sequences at once, the others wait in order.

    Args:
        scenario: what things take.
        speed: 1 as the scenario says; less on fewer devices.
        version: what the weights' version is now.
    """

    def __init__(self, scenario: Scenario, speed: float, version: Callable[[], int]):
        self._costs, self._speed, self._version = scenario, speed, version
        self._loop = asyncio.get_running_loop()
        self._running: list[tuple[float, int, Sequence_]] = []  # heap by end
        self._waiting: deque[Sequence_] = deque()
        self._steps = 0.0  # decode steps since the beginning
        self._prefill_s = 0.0  # of reading prompts, which comes before the next decode step
        self._since = self._loop.time()
        self._issued = 0
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self.load = 0  # sequences that run or wait

    def add(self, answers: Answers, lengths: np.ndarray) -> None:
        """Start the sequences of a group, or let them wait."""
        self._advance()
        self._waiting.extend(Sequence_(answers, int(length)) for length in lengths)
        self.load += len(lengths)
        self._admit()

    def remove(self, prompt_id: str) -> None:
        """Cut off the sequences of one prompt."""
        self._advance()
        self._running = [entry for entry in self._running if entry[2].answers.prompt.id != prompt_id]
        heapq.heapify(self._running)
        self._waiting = deque(s for s in self._waiting if s.answers.prompt.id != prompt_id)
        self.load = len(self._running) + len(self._waiting)
        self._admit()

    def pause(self) -> None:
        """Stop, and note which tokens the present weights sampled."""
        self._advance()
        self._paused = True
        for _, _, sequence in self._running:
            self._count(sequence, sequence.length - sequence.end + self._steps)
        self._arm()

    def resume(self) -> None:
        """Go on, after prompts and answers so far have been read again."""
        self._since = self._loop.time()
        self._paused = False
        generated = sum(s.length - s.end + self._steps for _, _, s in self._running)
        prompts = len(self._running) * self._costs.prompt_tokens
        self._prefill_s += (prompts + generated) * self._costs.prefill_token_s / self._speed
        self._admit()

    def _advance(self) -> None:
        """Make the decode steps of the time since the last call."""
        now = self._loop.time()
        passed, self._since = now - self._since, now
        if self._paused or not self._running:
            return
        prefill = min(passed, self._prefill_s)
        self._prefill_s -= prefill
        self._steps += (passed - prefill) / self._step_s()

    def _step_s(self) -> float:
        costs, sequences = self._costs, len(self._running)
        host = costs.decode_step_s + costs.decode_sequence_s * sequences
        return max(host, costs.device_step_s + costs.device_sequence_s * sequences) / self._speed

    def _admit(self) -> None:
        while not self._paused and self._waiting and len(self._running) < self._costs.slots:
            sequence = self._waiting.popleft()
            sequence.end = self._steps + sequence.length
            self._issued += 1
            heapq.heappush(self._running, (sequence.end, self._issued, sequence))
            self._prefill_s += self._costs.prompt_tokens * self._costs.prefill_token_s / self._speed
        self._arm()

    def _arm(self) -> None:
        """Set the timer to the end of the sequence that ends next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused:
            steps = max(0.0, self._running[0][0] - self._steps)
            self._timer = self._loop.call_later(self._prefill_s + steps * self._step_s(), self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        while self._running and self._running[0][0] <= self._steps + EPSILON:
            _, _, sequence = heapq.heappop(self._running)
            self.load -= 1
            self._count(sequence, sequence.length)
            sequence.answers.missing -= 1
            if not sequence.answers.missing and not sequence.answers.done.done():
                sequence.answers.done.set_result(None)
        self._admit()

    def _count(self, sequence: Sequence_, generated: float) -> None:
        """Tokens up to now that are not counted yet were sampled under the present version."""
        new = int(generated + EPSILON) - sequence.counted
        if new > 0:
            sequence.answers.tokens[self._version()] += new
            sequence.counted += new


class SimulatedPool:
    """What the sources ask of `RolloutPool`. Groups go to the replica with the least load, all answers to one.

    Args:
        scenario: what things take.
        devices: of the engines.
        lengths: of answers.
    """

    def __init__(self, scenario: Scenario, devices: float, lengths: Lengths):
        self.version = 0
        self._scenario, self._lengths = scenario, lengths
        count, speed = scenario.replicas(devices)
        self.replicas = [Replica(scenario, speed, lambda: self.version) for _ in range(count)]
        self.room = max(1, count * scenario.slots // scenario.n)  # groups at once
        self.meter = IdleMeter(asyncio.get_running_loop().time)
        self._running = 0

    async def submit(self, prompt: Prompt, n: int, spec: object) -> Group:
        """See `RolloutPool.submit`."""
        loop = asyncio.get_running_loop()
        answers = Answers(prompt, self._scenario.n, loop.create_future())
        replica = min(self.replicas, key=attrgetter("load"))
        replica.add(answers, self._lengths(prompt.index, self._scenario.n))
        self._change(1)
        try:
            await answers.done
        finally:
            self._change(-1)
        return stand_in(prompt, answers.tokens, self._keeps(prompt.index))

    async def run(self, prompts: Sequence[Prompt], n: int, spec: object) -> list[Group]:
        """See `RolloutPool.run`."""
        return await asyncio.gather(*(self.submit(prompt, n, spec) for prompt in prompts))

    async def abort(self, prompt_id: str) -> None:
        """See `RolloutPool.abort`."""
        for replica in self.replicas:
            replica.remove(prompt_id)

    async def pause(self, keep: bool) -> None:
        """See `RolloutPool.pause`."""
        assert keep
        for replica in self.replicas:
            replica.pause()

    async def resume(self) -> None:
        """See `RolloutPool.resume`."""
        for replica in self.replicas:
            replica.resume()

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutPool.sleep`; `SimulatedTrainers` has the time that moving memory takes."""

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """See `sleep`."""

    def _keeps(self, index: int) -> bool:
        """Whether dynamic sampling will keep the group: always the same for the prompt number `index`."""
        rate = self._scenario.keep_rate
        return rate == 1 or np.random.default_rng([self._scenario.seed, 1, index]).random() < rate

    def _change(self, by: int) -> None:
        self._running += by
        self.meter.set(self._running, self.room, None)


class SimulatedTrainers:
    """What `ColocatedSource` asks of the trainer ranks: to take memory back, and to leave it."""

    def __init__(self, move_s: float):
        self._move_s = move_s

    async def call_async(self, method: str, *args: object) -> None:
        """Half of the moving when it comes back, half when it is gone altogether."""
        if method == "reload" or (method == "offload" and args == (True, True)):
            await asyncio.sleep(self._move_s / 2)


class SimulatedSync:
    """What the sources ask of `WeightSync`."""

    def __init__(self, pool: SimulatedPool, seconds: float):
        self._pool, self._seconds = pool, seconds

    async def push(self, version: int) -> Metrics:
        """See `WeightSync.push`."""
        await asyncio.sleep(self._seconds)
        self._pool.version = version
        return {}


def stand_in(prompt: Prompt, tokens: Counter[int], kept: bool) -> Group:
    """A finished group as the sources see it: two answers of one token, the oldest, and the counts in `extras`.

    Arrays as long as real answers would be most of the simulation's work. Dynamic sampling keeps the group where the
    two differ in accuracy.
    """
    trajectories = [
        Trajectory(
            token_ids=np.zeros(1, np.int64),
            provenance=np.full(1, Provenance.MODEL, np.uint8),
            rollout_logprobs=np.zeros(1, np.float32),
            versions=np.full(1, min(tokens), np.int32),
            rewards=np.zeros(1, np.float32),
            status=Status.STOP,
            sample_id=i,
            reward_parts={"accuracy": accuracy},
            extras={"tokens": tokens},
        )
        for i, accuracy in enumerate((1.0, 0.0 if kept else 1.0))
    ]
    return Group(
        id=prompt.id, index=prompt.index, data_source=prompt.data_source, prompt=prompt, trajectories=trajectories
    )
