"""Schema of the `reward` group."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class RewardTermConfig:
    """One scored part of the reward: a registered name or the dotted path of a function, sync or async."""

    fn: str = "???"
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13): linear over the last `len` tokens of the limit."""

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0


@dataclass(slots=True, kw_only=True)
class RewardModelConfig:
    """A sequence-classification checkpoint, served by a worker of its own; used by the term `fn: reward_model`."""

    path: str | None = None
    max_length: int = 2048
    batch_size: int = 16
    dtype: str = "auto"


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """What is scored, in which processes, and what a failure means."""

    terms: dict[str, RewardTermConfig] = field(default_factory=dict)  # name -> term; the total is their weighted sum
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    num_processes: int = 1  # killable processes for each rollout worker, for terms that need them
    timeout_s: float = 10.0  # for one call of one term
    max_error_rate: float = 0.5  # above this share of failed scores in a step the run stops

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"reward.timeout_s={self.timeout_s}: must be > 0")
