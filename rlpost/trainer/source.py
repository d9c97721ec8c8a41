"""Where groups come from: `RolloutSource`, the one thing in which colocated and asynchronous training differ."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlpost.batch import Group, Prompt, Status
from rlpost.metrics import Metrics
from rlpost.workers.rollout.base import SamplingSpec


class BudgetExhausted(RuntimeError):
    """Dynamic sampling spent its budget of prompts before enough groups were kept."""


class RewardFailure(RuntimeError):
    """Too many scores failed (`reward.max_error_rate`)."""


def check_rewards(groups: Sequence[Group], max_error_rate: float) -> None:
    """Stop the run when scoring is broken; to be asked of all groups of a step, before any is dropped.

    Raises:
        RewardFailure: a larger share of the answers than `max_error_rate` could not be scored; shows one of the errors.
    """
    failed = [t.error for g in groups for t in g.trajectories if t.status is Status.REWARD_ERROR]
    total = sum(len(g.trajectories) for g in groups)
    if len(failed) > max_error_rate * total:
        raise RewardFailure(
            f"{len(failed)} of {total} answers could not be scored, above reward.max_error_rate={max_error_rate}; "
            f"for example: {failed[0]}"
        )


class RolloutSource(ABC):
    """Delivers scored groups in the order of issue and takes new weights."""

    @abstractmethod
    async def take(self, n: int) -> list[Group]:
        """The next `n` groups that the algorithm keeps (dynamic sampling happens inside).

        Raises:
            BudgetExhausted: see `algo.filter_groups`.
            RewardFailure: see `check_rewards`.
        """

    @abstractmethod
    async def publish(self, version: int) -> Metrics:
        """Give the actor's present weights to the engines as `version`; the number of publishes so far."""

    @abstractmethod
    async def evaluate(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """Score `n` samples of each prompt under the published weights; touches no training state."""

    @abstractmethod
    async def probe(self, num_sequences: int) -> list[Group]:
        """Groups of the next prompts, without advancing the stream; for the parity gate. The trainer may infer next."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """What happened since the last call: kept and dropped groups by reason, surplus, epochs."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on with the same groups (the data cursor, ...)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
