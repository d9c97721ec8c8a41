"""Schema of the `reward` group."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlpost.problems import refuse
from rlpost.rewards.limits import MIB, CallLimits, Sandbox


@dataclass(slots=True, kw_only=True)
class RewardTermConfig:
    """One scored part of the reward: a registered name or the dotted path of a function, sync or async."""

    fn: str = "???"  # registered name or dotted path
    weight: float = 1.0  # 0: logged, not rewarded
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of fn, checked against its signature
    per_answer: bool | None = None  # one call an answer: a hang costs only that one; null: the term's own

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            refuse(f"reward.terms.*.weight={self.weight}: must be finite")


@dataclass(slots=True, kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13): linear over the last `len` tokens of the limit."""

    enable: bool = False  # punish answers near the limit
    len: int | None = None  # tokens; null: a quarter of data.max_response_length
    penalty_factor: float = 1.0  # what an answer at the limit loses

    def __post_init__(self) -> None:
        if self.len is not None and self.len < 1:
            refuse(f"reward.overlong_buffer.len={self.len}: must be >= 1, or null for a quarter of the limit")
        if self.penalty_factor < 0:
            refuse(f"reward.overlong_buffer.penalty_factor={self.penalty_factor}: must be >= 0 (a deduction)")


@dataclass(slots=True, kw_only=True)
class RewardModelConfig:
    """A sequence-classification checkpoint, served by a worker of its own; used by the term `fn: reward_model`."""

    path: str | None = None  # folder or hub id; null: none is served
    max_length: int = 2048  # tokens of prompt and answer; what is longer loses its beginning
    batch_size: int = 16  # answers a pass
    dtype: str = "auto"  # bfloat16 on GPUs, float32 on CPU

    def __post_init__(self) -> None:
        for key in ("max_length", "batch_size"):
            if getattr(self, key) < 1:
                refuse(f"reward.reward_model.{key}={getattr(self, key)}: must be >= 1")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            refuse(f"reward.reward_model.dtype={self.dtype}: expected auto, float32, bfloat16 or float16")


class OnError(StrEnum):
    """What becomes of an answer that could not be scored."""

    MASK = "mask"  # it trains nothing, the others of its group do
    DROP_GROUP = "drop_group"  # none of its group does
    STOP = "stop"  # the run ends


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """What is scored, in which processes, and what a failure means."""

    terms: dict[str, RewardTermConfig] = field(default_factory=dict)  # name -> term; the total is their weighted sum
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    num_processes: int = 1  # killable processes for each rollout worker, for terms that need them
    timeout_s: float = 10.0  # for one call of one term
    memory_limit_mb: int | None = 4096  # MiB that a call may allocate in its process; null: no limit
    max_output_mb: int = 16  # MiB that a call may print, and that its result may take
    sandbox: str = "full"  # for terms that run the model's code: full, or limits (no isolation)
    on_error: str = "mask"  # what becomes of an answer whose score failed: mask, drop_group or stop
    max_error_rate: float = 0.01  # above this share of failed scores in a step a warning says what failed
    stop_error_rate: float = 0.5  # above this share the run stops

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            refuse(f"reward.timeout_s={self.timeout_s}: must be > 0")
        if self.num_processes < 1:
            refuse(f"reward.num_processes={self.num_processes}: must be >= 1")
        for key in ("memory_limit_mb", "max_output_mb"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                refuse(f"reward.{key}={getattr(self, key)}: must be >= 1")
        for key, kind in (("on_error", OnError), ("sandbox", Sandbox)):
            if getattr(self, key) not in list(kind):
                refuse(f"reward.{key}={getattr(self, key)}: expected {', '.join(kind)}")
        for key in ("max_error_rate", "stop_error_rate"):
            if not 0 <= getattr(self, key) <= 1:
                refuse(f"reward.{key}={getattr(self, key)}: must lie in [0, 1]")
        for name in self.terms:
            if "/" in name or name == "overlong":
                refuse(f"reward.terms.{name}: a term may not be called 'overlong' or contain '/'; rename it")

    def call_limits(self) -> CallLimits:
        """What one call may use."""
        return CallLimits(
            timeout_s=self.timeout_s,
            memory_bytes=None if self.memory_limit_mb is None else self.memory_limit_mb * MIB,
            max_output_bytes=self.max_output_mb * MIB,
            sandbox=Sandbox(self.sandbox),
        )
