"""What rollout makes of prompts: `Prompt`, `Trajectory` and `Group`, in numpy alone.

Workflows, rewards and their processes live on these; `batch.py` makes tensors of them for training.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np

NOT_ASKED = float("inf")  # a logprob that engine or trainer was not asked for; none that was is above 0


class Provenance(IntEnum):
    """Where a token came from; the only source of loss masks. Only MODEL tokens are trained."""

    TEMPLATE = 0  # prompt, chat template, anything the user or the format wrote
    MODEL = 1  # sampled by the policy
    TOOL = 2  # returned by a tool or environment
    PAD = 3


class Status(StrEnum):
    """How a trajectory ended."""

    STOP = "stop"  # the model emitted a stop token (which is part of the trajectory)
    LENGTH = "length"  # cut off at the token limit
    ABORT = "abort"  # cut off by us; partial
    REWARD_ERROR = "reward_error"  # scoring failed: never a 0, masked from training


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence, prompt included. All arrays are `[T]` and aligned with `token_ids`.

    Attributes:
        token_ids: int64.
        provenance: uint8, `Provenance` of each token.
        rollout_logprobs: float32, logprob under the policy that sampled it (behaviour), or `NOT_ASKED`; 0 where not
            MODEL.
        versions: int32, weight version that sampled it; -1 where not MODEL.
        rewards: float32, per token; an outcome reward sits on the last MODEL token.
        status: how it ended.
        sample_id: index within its group, 0..n-1.
        reward_parts: named scalar parts of the reward, unweighted, for the log (`accuracy`, `format`, ...).
        error: why scoring failed, when `status` is REWARD_ERROR.
        error_kind: a `rewards.limits.ErrorKind`, for the count of that kind.
        extras: bulk that travels with the sequence (images, routed experts) as object references.
    """

    token_ids: np.ndarray
    provenance: np.ndarray
    rollout_logprobs: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    status: Status
    sample_id: int = 0
    reward_parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    error_kind: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {
            len(getattr(self, name)) for name in ("token_ids", "provenance", "rollout_logprobs", "versions", "rewards")
        }
        assert len(lengths) == 1, f"trajectory columns differ in length: {sorted(lengths)}"

    @property
    def response_ids(self) -> np.ndarray:
        """The tokens the policy sampled, `[number of MODEL tokens]`."""
        return self.token_ids[self.provenance == Provenance.MODEL]

    @property
    def reward(self) -> float:
        """Sum of the token rewards."""
        return float(self.rewards.sum())


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One problem, tokenized.

    Attributes:
        id: unique within the run: source, epoch and row.
        index: position in the order of issue over the whole run (0, 1, 2, ...).
        token_ids: int64 `[P]`, what the engine is given.
        text: the prompt as text, for tables and rewards.
        data_source: name of the data set, key of validation metrics.
        ground_truth: what the reward compares with; anything picklable.
        extra_info: further columns of the row.
    """

    id: str
    index: int
    token_ids: np.ndarray
    text: str
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Group:
    """The n trajectories of one prompt. Grouping is by `id`, never by position."""

    id: str
    index: int
    data_source: str
    prompt: Prompt
    trajectories: list[Trajectory]
