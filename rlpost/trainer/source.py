"""Where groups come from: `RolloutSource`, the one thing in which colocated and asynchronous training differ."""

import logging
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from rlpost.metrics import Metric, Metrics, Reduce, mean
from rlpost.rewards.config import OnError, RewardConfig
from rlpost.rewards.limits import ErrorKind
from rlpost.trajectory import Group, Prompt, Status, Trajectory
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.base import SamplingSpec

logger = logging.getLogger(__name__)


class BudgetExhausted(RuntimeError):
    """Dynamic sampling spent its budget of prompts before enough groups were kept."""


class PromptsExhausted(RuntimeError):
    """The prompt source ended before a step had its groups."""


class RewardFailure(RuntimeError):
    """Too many scores failed (`reward.stop_error_rate`, `reward.on_error`)."""


def check_rewards(groups: Sequence[Group], cfg: RewardConfig) -> None:
    """Stop the run when scoring is broken; to be asked of all groups of a step, before any is dropped.

    Raises:
        RewardFailure: a larger share of the answers than `stop_error_rate` could not be scored, or any with
            `on_error=stop`; shows one of the errors.
    """
    failed, total = _failed(groups), sum(len(g.trajectories) for g in groups)
    if failed and cfg.on_error == OnError.STOP:
        raise RewardFailure(f"reward.on_error=stop: {_describe(failed, total)}")
    if len(failed) > cfg.stop_error_rate * total:
        raise RewardFailure(f"{_describe(failed, total, f', above reward.stop_error_rate={cfg.stop_error_rate}')}")


def warn_of_errors(groups: Sequence[Group], max_error_rate: float) -> None:
    """Warn when a larger share of a step's answers than `max_error_rate` could not be scored."""
    failed, total = _failed(groups), sum(len(g.trajectories) for g in groups)
    if len(failed) > max_error_rate * total:
        logger.warning(_describe(failed, total, f", above reward.max_error_rate={max_error_rate}"))


def _is_failed(trajectory: Trajectory) -> bool:
    """Whether its score failed; not whether it was left out with one that did."""
    return trajectory.status is Status.REWARD_ERROR and trajectory.error_kind != ErrorKind.GROUP


def _failed(groups: Sequence[Group]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories if _is_failed(t)]


def _describe(failed: Sequence[Trajectory], total: int, limit: str = "") -> str:
    kinds = Counter(t.error_kind for t in failed).most_common()
    counts = ", ".join(f"{kind}: {count}" for kind, count in kinds)
    return f"{len(failed)} of {total} answers could not be scored{limit} ({counts}); for example: {failed[0].error}"


def exhausted(kept: int, wanted: int, seen: int, counts: Mapping[str, int]) -> BudgetExhausted:
    """What a step says that kept `kept` of the `wanted` groups out of `seen` prompts, for the reasons in `counts`."""
    reasons = ", ".join(f"{k}: {v}" for k, v in sorted(counts.items()) if v)
    return BudgetExhausted(
        f"dynamic sampling kept {kept} of the {wanted} groups it needs from {seen} prompts ({reasons}). "
        "The task is too easy or too hard for this model: change the data, raise "
        "algo.filter_groups.max_num_gen_batches, or set algo.filter_groups.on_exhausted=train to go on with what there "
        "is, if there is any"
    )


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """Rewards and their parts, lengths, and how answers ended, over all finished answers of `groups`.

    To be asked of every group that was generated. Those that dynamic sampling keeps have right and wrong answers by
    definition, so their mean says little about the policy. Failed scores count in `reward/error_rate`, in lengths, and
    by their kinds in `reward/errors/<kind>`.
    """
    answers = [t for g in groups for t in g.trajectories if t.status is not Status.ABORT]
    scored = [t for t in answers if t.status is not Status.REWARD_ERROR]
    lengths = [len(t.response_ids) for t in answers]
    kinds = Counter(t.error_kind for t in answers if t.status is Status.REWARD_ERROR)
    parts: dict[str, list[float]] = defaultdict(list)
    for t in scored:
        for name, value in t.reward_parts.items():
            parts[f"reward/{name}"].append(value)
    return {
        "reward/mean": mean([t.reward for t in scored]),
        "reward/error_rate": mean([_is_failed(t) for t in answers]),
        "response_length/mean": mean(lengths),
        "response_length/max": Metric(max(lengths, default=0), reduce=Reduce.MAX),
        "response_length/truncated": mean([t.status is Status.LENGTH for t in answers]),
        "prompt_length/mean": mean([len(g.prompt.token_ids) for g in groups]),
        **{name: mean(values) for name, values in parts.items()},
        **{f"reward/errors/{kind}": Metric(count, reduce=Reduce.SUM) for kind, count in kinds.items()},
    }


class RolloutSource(ABC):
    """Delivers scored groups in the order of issue and takes new weights.

    It tells a `Ledger` of every group that it begins, gets back or drops.
    """

    @abstractmethod
    async def take(self, n: int) -> list[Group]:
        """The next `n` groups that the algorithm keeps (dynamic sampling happens inside).

        Raises:
            BudgetExhausted: see `algo.filter_groups`.
            RewardFailure: see `check_rewards`.
        """

    @abstractmethod
    def rewind(self) -> None:
        """Undo the last `take`: its groups are thrown away, and their prompts come next."""

    @abstractmethod
    async def publish(self, version: int) -> Metrics:
        """Give the actor's present weights to the engines as `version`; the number of publishes so far."""

    def without_push(self) -> AbstractAsyncContextManager[None]:
        """Inside no weights travel: what occupies the trainer ranks for long would hold the engines in a push."""
        return nullcontext()

    @abstractmethod
    async def evaluate(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """Score `n` samples of each prompt under the published weights; touches no training state."""

    @abstractmethod
    async def probe(self, num_sequences: int, max_tokens: int | None = None) -> list[Group]:
        """Groups of the next prompts, without advancing the stream; for the parity gate. The trainer may infer next.

        Their answers are cut at `max_tokens`.
        """

    @abstractmethod
    async def restart_engines(self, cfg: RolloutConfig) -> None:
        """Start the engines anew with `cfg`, between steps; they hold the checkpoint's weights until `publish`."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """What happened since the last call: kept and dropped groups by reason, and `rollout_metrics` of them all."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on with the same groups (the data cursor, ...)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`.

        Raises:
            ValueError: it is that of another kind of source.
        """
