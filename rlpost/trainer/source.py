"""Where groups come from: `RolloutSource`, the one thing in which colocated and asynchronous training differ."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlpost.batch import Group, Prompt
from rlpost.metrics import Metrics
from rlpost.workers.rollout.base import SamplingSpec


class BudgetExhausted(RuntimeError):
    """Dynamic sampling spent its budget of prompts before enough groups were kept."""


class RolloutSource(ABC):
    """Delivers scored groups in the order of issue and takes new weights."""

    @abstractmethod
    async def take(self, n: int) -> list[Group]:
        """The next `n` groups that the algorithm keeps (dynamic sampling happens inside).

        Raises:
            BudgetExhausted: see `algo.filter_groups`.
        """

    @abstractmethod
    async def publish(self, version: int) -> Metrics:
        """Give the actor's present weights to the engines as `version`; the number of publishes so far."""

    @abstractmethod
    async def evaluate(self, prompts: Sequence[Prompt], n: int, spec: SamplingSpec) -> list[Group]:
        """Score `n` samples of each prompt under the published weights; touches no training state."""

    @abstractmethod
    async def probe(self, num_sequences: int) -> list[Group]:
        """Groups of the next prompts, without advancing the stream; for the parity gate."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """What happened since the last call: kept and dropped groups by reason, surplus, epochs."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on with the same groups (the data cursor, ...)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""

    @abstractmethod
    async def close(self) -> None:
        """End engines and workers."""
