"""All reward terms of a group, summed: `RewardScorer`."""

import asyncio
import importlib.util
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rlpost.registry import load_dotted, near
from rlpost.rewards.base import REWARDS, Answer, Reward, RewardError, RewardTerm
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.rewards.limits import ErrorKind
from rlpost.rewards.model import Score
from rlpost.rewards.pool import PoolError, ProcessPool
from rlpost.rewards.sandbox import jail
from rlpost.rewards.shaping import soft_overlong_punishment
from rlpost.trajectory import Prompt

Scored = Reward | RewardError


class RewardScorer:
    """Scores a group: every term of `reward.terms`, their weighted sum, and the overlong punishment.

    `parts` of a reward hold each term's unweighted value under the term's key in `reward.terms` (dynamic sampling reads
    `accuracy` unless told otherwise), the parts that a term returned as `<key>/<part>`, and `overlong`.

    An async function runs on the event loop; any other in a killable process, except the registered terms that are
    quick by construction. `reward.timeout_s` holds for both; an async function that blocks the loop cannot be stopped.

    Args:
        cfg: the `reward` section.
        max_response_length: limit of sampled tokens, for the overlong punishment.
        reward_model: where the term `reward_model` gets its scores.

    Raises:
        ValueError: no terms, an unknown term or keyword, a missing package, no reward model where a term needs one, or
            a host that cannot shut in the code that a term runs (`reward.sandbox`).
    """

    def __init__(self, cfg: RewardConfig, max_response_length: int, reward_model: Score | None = None):
        if not cfg.terms:
            raise ValueError("reward.terms is empty: nothing would be rewarded; name at least one term")
        self._timeout_s = cfg.timeout_s
        limits = cfg.call_limits()
        given = {"reward_model": reward_model, "call_limits": limits}
        self._terms = {key: _resolve(key, term, given) for key, term in cfg.terms.items()}
        if any(term.sandboxed for term in self._terms.values()):
            jail.check(limits.sandbox)
        self._overlong = cfg.overlong_buffer
        self._max_length = max_response_length
        self._buffer_len = cfg.overlong_buffer.len or max(1, max_response_length // 4)
        if self._overlong.enable and self._buffer_len > max_response_length:
            raise ValueError(
                f"reward.overlong_buffer.len={self._buffer_len} exceeds data.max_response_length={max_response_length}"
            )
        self._pool = None
        if any(term.in_pool for term in self._terms.values()):
            self._pool = ProcessPool(
                cfg.num_processes, memory_bytes=limits.memory_bytes, max_output_bytes=limits.max_output_bytes
            )

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[Scored]:
        """A `Reward` for each answer, or a `RewardError` that names the terms that failed on it and why."""
        columns = await asyncio.gather(*(self._run_term(term, prompt, answers) for term in self._terms.values()))
        return [self._total(answer, list(row)) for answer, row in zip(answers, zip(*columns, strict=True), strict=True)]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()

    def _total(self, answer: Answer, row: list[Scored]) -> Scored:
        named = list(zip(self._terms.values(), row, strict=True))
        errors = [(term, item) for term, item in named if isinstance(item, RewardError)]
        if errors:
            reasons = "; ".join(f"reward term '{term.key}' ({term.name}): {item}" for term, item in errors)
            return RewardError(reasons, errors[0][1].kind)
        total, parts = 0.0, {}
        for term, item in named:
            assert isinstance(item, Reward)
            total += term.weight * item.value
            parts[term.key] = item.value
            parts |= {f"{term.key}/{name}": value for name, value in item.parts.items()}
        if self._overlong.enable:
            parts["overlong"] = soft_overlong_punishment(
                len(answer.token_ids), self._max_length, self._buffer_len, self._overlong.penalty_factor
            )
            total += parts["overlong"]
        return Reward(value=total, parts=parts)

    async def _run_term(self, term: "_Term", prompt: Prompt, answers: Sequence[Answer]) -> list[Scored]:
        """One item an answer; with `per_answer` every answer is a call of its own."""
        batches = [[answer] for answer in answers] if term.per_answer else [list(answers)]
        results = await asyncio.gather(*(self._call(term, prompt, batch) for batch in batches if batch))
        return [item for result in results for item in result]

    async def _call(self, term: "_Term", prompt: Prompt, answers: list[Answer]) -> list[Scored]:
        try:
            if term.in_pool:
                assert self._pool is not None
                args = (prompt, answers)
                result = await self._pool.run(term.path, args, term.kwargs, self._timeout_s, term.imports)
            elif term.is_async:
                result = await asyncio.wait_for(term.fn(prompt, answers, **term.kwargs), self._timeout_s)
            else:
                result = term.fn(prompt, answers, **term.kwargs)
            return check_rewards(result, len(answers))
        except (PoolError, RewardError) as error:
            reason, kind = str(error), error.kind
        except TimeoutError:
            reason, kind = f"timed out: the call took more than {self._timeout_s:g} s", ErrorKind.TIMEOUT
        except Exception as error:  # the edge to code that is not ours: reported, counted and masked by the caller
            reason, kind = f"{type(error).__name__}: {error}", ErrorKind.EXCEPTION
        return [RewardError(reason, kind) for _ in answers]


def check_rewards(result: Any, num_answers: int) -> list[Scored]:
    """What a reward function returned, as rewards; a value that is no finite number becomes an error of its answer.

    Raises:
        RewardError: not a list, or of another length than the answers.
    """
    items = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(items, list | tuple):
        message = f"returned a {type(result).__name__}, expected a list of {num_answers} rewards"
        raise RewardError(message, ErrorKind.WRONG_TYPE)
    if len(items) != num_answers:
        raise RewardError(f"returned {len(items)} rewards for {num_answers} answers", ErrorKind.WRONG_TYPE)
    return [_check_reward(item) for item in items]


def _check_reward(item: Any) -> Scored:
    if isinstance(item, RewardError):
        return item
    reward = item if isinstance(item, Reward) else Reward(value=item)
    numbers = {"its value": reward.value, **{f"part '{name}'": value for name, value in reward.parts.items()}}
    for name, value in numbers.items():
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, Real):
            return RewardError(f"{name} is a {type(value).__name__}, expected a number", ErrorKind.WRONG_TYPE)
        if not math.isfinite(value):
            return RewardError(f"{name} is {float(value)}", ErrorKind.NOT_FINITE)
    return Reward(value=float(reward.value), parts={name: float(value) for name, value in reward.parts.items()})


@dataclass(slots=True, frozen=True, kw_only=True)
class _Term:
    """A configured term, ready to call."""

    key: str  # in reward.terms
    name: str  # as `fn` names it
    fn: Any
    path: str  # dotted, for the pool
    weight: float
    kwargs: dict[str, Any]
    is_async: bool
    in_pool: bool
    per_answer: bool
    imports: tuple[str, ...]
    sandboxed: bool


def _resolve(key: str, cfg: RewardTermConfig, given: dict[str, Any]) -> _Term:
    """Find the function and check that it can be called as configured."""
    at = f"reward.terms.{key}"
    term = _find(cfg.fn, at)
    for module in term.imports:
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"{at}.fn={cfg.fn} needs the package '{module}': pip install 'rlpost[rewards]'")
    kwargs = _check_kwargs(term, cfg, at, given)
    for name in term.functions:
        _load_function(kwargs[name], f"{at}.kwargs.{name}")
    is_async = _is_async(term.fn)
    return _Term(
        key=key,
        name=cfg.fn,
        fn=term.fn,
        path=cfg.fn if "." in cfg.fn else f"{term.fn.__module__}.{term.fn.__name__}",
        weight=cfg.weight,
        kwargs=kwargs,
        is_async=is_async,
        in_pool=term.isolated and not is_async,
        per_answer=term.per_answer if cfg.per_answer is None else cfg.per_answer,
        imports=("rlpost.rewards.base", *term.imports),  # what prompts and answers are made of takes seconds to import
        sandboxed=term.sandboxed,
    )


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _find(name: str, at: str) -> RewardTerm:
    if "." not in name:
        return REWARDS.get(name, f"{at}.fn")
    return RewardTerm(fn=_load_function(name, f"{at}.fn"))


def _load_function(path: str, key: str) -> Any:
    function = load_dotted(path, key)
    if not callable(function):
        raise ValueError(f"{key}={path}: not a function")
    return function


def _check_kwargs(term: RewardTerm, cfg: RewardTermConfig, at: str, given: dict[str, Any]) -> dict[str, Any]:
    """The term's keywords, with the reward model or the limits where it asks for them.

    Raises:
        ValueError: a keyword that the function does not take or one that it lacks.
    """
    kwargs = dict(cfg.kwargs)
    parameters = inspect.signature(term.fn).parameters
    kwargs |= {name: value for name, value in given.items() if name in parameters}
    if "reward_model" in parameters:
        if given["reward_model"] is None:
            raise ValueError(f"{at}.fn={cfg.fn} asks a reward model, but none is served: set reward.reward_model.path")
        if not _is_async(term.fn):
            raise ValueError(f"{at}.fn={cfg.fn} takes a 'reward_model' and so must be async")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in kwargs:
            if name not in parameters:
                known = near(name, list(parameters)[2:])
                raise ValueError(f"{at}.kwargs.{name}: '{cfg.fn}' takes no such keyword; {known}")
    try:
        inspect.signature(term.fn).bind("prompt", "answers", **kwargs)
    except TypeError as error:
        raise ValueError(f"{at}.fn={cfg.fn} cannot be called as fn(prompt, answers, **{at}.kwargs): {error}") from error
    return kwargs
