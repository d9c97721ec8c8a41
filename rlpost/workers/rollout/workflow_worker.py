"""The actor that runs workflows over the engines and scores their answers. It needs no torch, so many are cheap."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from ray.actor import ActorHandle

from rlpost import heartbeat
from rlpost.host import exported, settle
from rlpost.rewards.base import Answer, RewardError
from rlpost.rewards.config import OnError, RewardConfig
from rlpost.rewards.limits import ErrorKind
from rlpost.rewards.scorer import RewardScorer
from rlpost.trajectory import Prompt, Provenance, Status, Trajectory
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.base import Completion, SamplingSpec, request_seed
from rlpost.workers.rollout.liveness import Processes
from rlpost.workers.rollout.router import Request, Router
from rlpost.workers.rollout.workflow import get_workflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class WorkflowWorker:
    """Runs workflows over the engines and scores what they return.

    Args:
        cfg: the `rollout` section.
        tokenizer: with which rewards see answers.
        reward: the `reward` section.
        engines: handles of all `RolloutWorker`s.
        seed: of the run, from which every request gets its own; None: requests have none.
        max_response_length: limit of sampled tokens.
        reward_model: handle of the `RewardModelWorker`, if a term asks it.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        tokenizer: "PreTrainedTokenizerBase",
        reward: RewardConfig,
        engines: Sequence[ActorHandle],
        seed: int | None,
        max_response_length: int,
        reward_model: ActorHandle | None = None,
    ):
        heartbeat.start(exported().get(heartbeat.VARIABLE), heartbeat.numberless("workflow"))
        self._cfg, self._tokenizer, self._reward = cfg, tokenizer, reward
        self._max_response_length, self._reward_model = max_response_length, reward_model
        self._router = Router(engines)
        self._seed = seed
        self._num_runs = 0
        self._started = asyncio.Event()

    async def start(self) -> None:
        """Load workflow and rewards.

        Raises:
            ValueError: a workflow or a reward term that the config names cannot be had.
        """
        self._workflow = get_workflow(self._cfg.workflow)
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
        for t in (t for t, places in zip(finished, sampled, strict=True) if not len(places)):
            t.status, t.error = Status.REWARD_ERROR, "it has ended without a sampled token, on which a reward could lie"
            t.error_kind = str(ErrorKind.EMPTY)
        if not complete:
            return
        ids = [t.token_ids[places] for t, places in complete]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)  # of lists it would look at every id
        answers = [
            Answer(text=text, token_ids=tokens.tolist(), truncated=t.status is Status.LENGTH)
            for (t, _), text, tokens in zip(complete, texts, ids, strict=True)
        ]
        all_scored = await self._scorer.score(prompt, answers)
        failed = len(complete) < len(finished) or any(isinstance(s, RewardError) for s in all_scored)
        if self._reward.on_error == OnError.DROP_GROUP and failed:
            left_out = RewardError("left out with its group (reward.on_error=drop_group)", ErrorKind.GROUP)
            all_scored = [s if isinstance(s, RewardError) else left_out for s in all_scored]
        for (t, places), scored in zip(complete, all_scored, strict=True):
            if isinstance(scored, RewardError):
                t.status, t.error, t.error_kind = Status.REWARD_ERROR, str(scored), str(scored.kind)
                continue
            t.rewards[places[-1]] = scored.value
            t.reward_parts = scored.parts
