"""What users write to score answers: `RewardFn`. An error is an error, never a 0."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlpost.batch import Prompt


@dataclass(slots=True, kw_only=True)
class Answer:
    """One sampled answer as a reward sees it: `text` without special tokens, sampled `token_ids`, how it ended."""

    text: str
    token_ids: Sequence[int]
    truncated: bool = False


@dataclass(slots=True, kw_only=True)
class Reward:
    """A score and named scalar parts of it for the log; `accuracy` is what dynamic sampling filters on."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


class RewardError(Exception):
    """Scoring failed (exception, time-out, crash, non-finite value): the trajectory is masked and counted."""


# Sees the whole group; sync or async; returns one `Reward` (or a float) an answer. `kwargs` come from the config.
RewardFn = Callable[..., Sequence[Reward | float] | Awaitable[Sequence[Reward | float]]]
Scorer = Callable[[Prompt, Sequence[Answer]], Awaitable[list[Reward | RewardError]]]
