"""What users write to score answers: `RewardFn`, and the registry of terms. An error is an error, never a 0."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlpost.registry import Registry
from rlpost.rewards.limits import ErrorKind
from rlpost.trajectory import Prompt


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
    """Scoring failed: the trajectory is masked, and counted under its kind."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.EXCEPTION):
        super().__init__(message, kind)  # both are arguments, or it would lose its kind when pickled
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


# Sees the whole group; sync or async; returns one `Reward` (or a float) an answer. `kwargs` come from the config; a
# `RewardError` in the place of a reward fails that answer alone.
RewardFn = Callable[..., Sequence[Reward | float] | Awaitable[Sequence[Reward | float]]]
Scorer = Callable[[Prompt, Sequence[Answer]], Awaitable[list[Reward | RewardError]]]


@dataclass(slots=True, frozen=True, kw_only=True)
class RewardTerm:
    """A reward function and how it is called.

    Attributes:
        isolated: runs in a killable process. In the caller's process nothing stops a hang or survives a crash: that
            suits only functions whose time is linear in the text.
        per_answer: one call an answer, so that a hang or crash costs only that one; the function still gets a sequence.
        imports: optional packages that it needs, imported in the process before the first call.
        sandboxed: it runs the model's code, and is refused where the sandbox that `reward.sandbox` names does not work.
        functions: keywords that are dotted paths of functions, which are looked up before anything starts.
    """

    fn: RewardFn
    isolated: bool = True
    per_answer: bool = False
    imports: tuple[str, ...] = ()
    sandboxed: bool = False
    functions: tuple[str, ...] = ()


_MODULES = ("code_tests", "match", "math_answer", "model", "reasoning_gym", "shaping", "verl")
REWARDS: Registry[RewardTerm] = Registry("reward term", modules=[f"rlpost.rewards.{name}" for name in _MODULES])


def register_reward(
    name: str,
    *,
    isolated: bool = True,
    per_answer: bool = False,
    imports: tuple[str, ...] = (),
    sandboxed: bool = False,
    functions: tuple[str, ...] = (),
) -> Callable[[RewardFn], RewardFn]:
    """Decorator: file a reward function under `name`; see `RewardTerm` for the options."""

    def add(fn: RewardFn) -> RewardFn:
        term = RewardTerm(
            fn=fn, isolated=isolated, per_answer=per_answer, imports=imports, sandboxed=sandboxed, functions=functions
        )
        REWARDS.register(name)(term)
        return fn

    return add
