"""The actors of rollout: one around an engine, one that runs workflows and scores their answers, and a reward model's.

Plain classes: `pool.py` makes Ray actors of them. The first two are processes of their own because an engine's host
loop bounds decoding and must not wait for rewards.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ray.actor import ActorHandle

from rlpost import heartbeat
from rlpost.batch import Prompt, Provenance, Status, Trajectory
from rlpost.platform import exported
from rlpost.rewards.base import Answer, RewardError
from rlpost.rewards.config import OnError, RewardConfig, RewardModelConfig
from rlpost.rewards.limits import ErrorKind
from rlpost.rewards.model import Messages, RewardModel
from rlpost.rewards.scorer import RewardScorer
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.remote import settle, unwrap
from rlpost.workers.rollout.base import ENGINES, Completion, EngineLost, SamplingSpec, request_seed
from rlpost.workers.rollout.liveness import LOST, Processes
from rlpost.workers.rollout.workflow import get_workflow

PHASES = {
    "start": "start",
    "begin_update": "publish",
    "load_bucket": "publish",
    "finish_update": "publish",
    "pause": "pause",
    "sleep": "memory",
    "wake": "memory",
}
MOMENT_S = 0.005  # answers that come within it travel together
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


class RolloutWorker:
    """One engine replica in a process of its own; `seed` is the engine's, for requests without one."""

    def __init__(self, cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0):
        heartbeat.start(exported().get(heartbeat.VARIABLE), heartbeat.numberless("engine"))
        self._timeout_s = cfg.request_timeout_s
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
        with heartbeat.phase(PHASES.get(method, ""), method):
            result = await getattr(self._engine, method)(*args)
        if method == "start":
            settle()
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


class WorkflowWorker:
    """Runs workflows over the engines and scores what they return.

    Args:
        cfg: the `rollout` section.
        model: for the tokenizer, with which rewards see answers.
        reward: the `reward` section.
        engines: handles of all `RolloutWorker`s.
        seed: of the run, from which every request gets its own; None: requests have none.
        max_response_length: limit of sampled tokens.
        reward_model: handle of the `RewardModelWorker`, if a term asks it.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        model: ModelInfo,
        reward: RewardConfig,
        engines: Sequence[ActorHandle],
        seed: int | None,
        max_response_length: int,
        reward_model: ActorHandle | None = None,
    ):
        heartbeat.start(exported().get(heartbeat.VARIABLE), heartbeat.numberless("workflow"))
        self._cfg, self._model, self._reward = cfg, model, reward
        self._max_response_length, self._reward_model = max_response_length, reward_model
        self._router = Router(engines)
        self._seed = seed
        self._num_runs = 0
        self._started = asyncio.Event()

    async def start(self) -> None:
        """Load workflow, tokenizer and rewards.

        Raises:
            ValueError: a workflow or a reward term that the config names cannot be had.
        """
        from transformers import AutoTokenizer

        self._workflow = get_workflow(self._cfg.workflow)
        self._tokenizer = AutoTokenizer.from_pretrained(
            self._model.tokenizer_path, trust_remote_code=self._model.trust_remote_code
        )
        served = self._reward_model
        score = None if served is None else (lambda texts: served.score.remote(texts))
        self._scorer = RewardScorer(self._reward, self._max_response_length, score)
        settle()
        self._started.set()

    async def run(self, prompts: list[Prompt], n: int, spec: SamplingSpec) -> list[list[Trajectory]]:
        """`n` scored trajectories of each prompt."""
        await self._started.wait()
        return await asyncio.gather(*(self._run_one(prompt, n, spec) for prompt in prompts))

    async def exclude(self, replica: int) -> None:
        """Give a replica no more work."""
        self._router.exclude(replica)

    async def admit(self, replica: int, engine: ActorHandle) -> None:
        """Give work to `engine` as replica `replica`."""
        self._router.admit(replica, engine)

    async def ping(self) -> list[tuple[ActorHandle, str]]:
        """Engines that were found lost so far, and why."""
        return self._router.lost

    async def processes(self) -> Processes:
        """This process and those of its rewards."""
        return Processes.of_this()

    async def close(self) -> None:
        """End the reward processes."""
        self._scorer.close()

    async def _run_one(self, prompt: Prompt, n: int, spec: SamplingSpec) -> list[Trajectory]:
        self._num_runs += 1
        run, spec = self._num_runs, spec.for_group(prompt.id)

        async def generate(
            token_ids: Sequence[int] | np.ndarray, n: int = 1, key: str = "", max_tokens: int | None = None
        ) -> list[Completion]:
            return await self._router.generate(
                Request(
                    token_ids=np.asarray(token_ids, np.int64),
                    spec=spec if max_tokens is None else replace(spec, max_tokens=max_tokens),
                    seed=None if self._seed is None else request_seed(self._seed, prompt.id, key),
                    request_id=f"{prompt.id}/{run}/{key}/{id(self)}",
                    n=n,
                )
            )

        with heartbeat.phase("generate", f"workflow of prompt {prompt.id}"):
            trajectories = await self._workflow(prompt, n, generate)
        if len(trajectories) != n:
            raise ValueError(
                f"the workflow returned {len(trajectories)} trajectories of prompt '{prompt.id}', expected {n}"
            )
        with heartbeat.phase("generate", f"rewards of prompt {prompt.id}"):
            await self._score(prompt, trajectories)
        return trajectories

    async def _score(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        """Put rewards on the last sampled tokens. Aborted trajectories are partial and get none."""
        finished = [t for t in trajectories if t.status in (Status.STOP, Status.LENGTH)]
        sampled = [np.flatnonzero(t.provenance == Provenance.MODEL) for t in finished]
        complete = [(t, places) for t, places in zip(finished, sampled, strict=True) if len(places)]
        if not complete:
            return
        ids = [t.token_ids[places] for t, places in complete]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)  # of lists it would look at every id
        answers = [
            Answer(text=text, token_ids=tokens.tolist(), truncated=t.status is Status.LENGTH)
            for (t, _), text, tokens in zip(complete, texts, ids, strict=True)
        ]
        all_scored = await self._scorer.score(prompt, answers)
        if self._reward.on_error == OnError.DROP_GROUP and any(isinstance(s, RewardError) for s in all_scored):
            left_out = RewardError("left out with its group (reward.on_error=drop_group)", ErrorKind.GROUP)
            all_scored = [s if isinstance(s, RewardError) else left_out for s in all_scored]
        for (t, places), scored in zip(complete, all_scored, strict=True):
            if isinstance(scored, RewardError):
                t.status, t.error, t.error_kind = Status.REWARD_ERROR, str(scored), str(scored.kind)
                continue
            t.rewards[places[-1]] = scored.value
            t.reward_parts = scored.parts


class RewardModelWorker(RewardModel):
    """`RewardModel` in a process of its own."""

    def __init__(self, path: str, cfg: RewardModelConfig, device: str):
        heartbeat.start(exported().get(heartbeat.VARIABLE), heartbeat.numberless("reward model"))
        super().__init__(path, cfg, device)

    @heartbeat.during("reward")
    def score(self, texts: Sequence[str | Messages]) -> list[float]:
        """See `RewardModel.score`."""
        return super().score(texts)


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
