"""Adapters: how the columns of a raw row become a prompt and what its answer is compared with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlpost.data_config import DataConfig
from rlpost.registry import Registry, load_dotted, near
from rlpost.rewards.match import last_boxed

Messages = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Example:
    """What an adapter makes of a row. A list of messages goes through the chat template, a string does not."""

    prompt: str | Messages
    ground_truth: Any = None
    data_source: str | None = None  # null: the name of the source
    extra_info: dict[str, Any] = field(default_factory=dict)


# Called with the columns of one row; a `ValueError` is reported with the row's file and line.
Adapter = Callable[[dict[str, Any], DataConfig], Example]

ADAPTERS: Registry[Adapter] = Registry("adapter")


def get_adapter(cfg: DataConfig) -> Adapter:
    """The adapter that `data.adapter` names; `auto` decides by the columns, row by row."""
    if cfg.adapter == "auto":
        return lambda columns, cfg: ADAPTERS.get(detect(columns, cfg), "data.adapter")(columns, cfg)
    if "." in cfg.adapter:
        function = load_dotted(cfg.adapter, "data.adapter")
        if not callable(function):
            raise ValueError(f"data.adapter={cfg.adapter}: not a function")
        return function
    return ADAPTERS.get(cfg.adapter, "data.adapter")


def detect(columns: dict[str, Any], cfg: DataConfig) -> str:
    """Name of the adapter that fits these columns.

    Raises:
        ValueError: none fits; lists the columns.
    """
    if "reward_model" in columns and cfg.prompt_key in columns:
        return "verl"
    if "prompt" in columns and "ground_truth" in columns:
        return "rows"
    if "question" in columns and "####" in str(columns.get("answer")):
        return "gsm8k"
    if "problem" in columns and ("answer" in columns or "solution" in columns):
        return "math"
    if cfg.prompt_key in columns:
        return "plain"
    raise ValueError(
        f"data.adapter=auto fits no row with the columns {', '.join(columns)}: set data.prompt_key (and "
        f"data.answer_key) to the columns to use, or data.adapter to one of {', '.join(ADAPTERS.names())} or a dotted "
        "path"
    )


def pop_column(columns: dict[str, Any], name: str, key: str) -> Any:
    """Take a column out of the row; `key` is the config key (or adapter) that asked for it."""
    if name not in columns:
        raise ValueError(f"{key}: the row has no column '{name}'; {near(name, columns)}")
    return columns.pop(name)


@ADAPTERS.register("rows")
def rows(columns: dict[str, Any], cfg: DataConfig) -> Example:
    """Our own layout, of `task://` and `reasoning-gym://`: `prompt`, `ground_truth`, `data_source`, anything else."""
    rest = dict(columns)
    return Example(
        prompt=pop_column(rest, "prompt", "data.adapter=rows"),
        ground_truth=rest.pop("ground_truth", None),
        data_source=rest.pop("data_source", None),
        extra_info=rest,
    )


@ADAPTERS.register("verl")
def verl(columns: dict[str, Any], cfg: DataConfig) -> Example:
    """verl's columns: `prompt` (messages), `data_source`, `reward_model: {ground_truth, style}`, `extra_info`."""
    rest = dict(columns)
    prompt = pop_column(rest, cfg.prompt_key, f"data.prompt_key={cfg.prompt_key}")
    reward_model = pop_column(rest, "reward_model", "data.adapter=verl")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise ValueError("data.adapter=verl: the column 'reward_model' has no 'ground_truth'")
    data_source, extra_info = rest.pop(cfg.reward_fn_key, None), rest.pop("extra_info", None) or {}
    return Example(
        prompt=prompt,
        ground_truth=reward_model["ground_truth"],
        data_source=data_source,
        extra_info={**rest, **extra_info},
    )


@ADAPTERS.register("gsm8k")
def gsm8k(columns: dict[str, Any], cfg: DataConfig) -> Example:
    """GSM8K: `question`; the ground truth follows `####` in `answer`, without its thousands commas."""
    rest = dict(columns)
    question = pop_column(rest, "question", "data.adapter=gsm8k")
    _, mark, final = str(pop_column(rest, "answer", "data.adapter=gsm8k")).rpartition("####")
    if not mark:
        raise ValueError("data.adapter=gsm8k: the column 'answer' has no '####' before its final answer")
    data_source = rest.pop(cfg.reward_fn_key, "gsm8k")
    return Example(
        prompt=_user(question), ground_truth=final.strip().replace(",", ""), data_source=data_source, extra_info=rest
    )


@ADAPTERS.register("math")
def math(columns: dict[str, Any], cfg: DataConfig) -> Example:
    """MATH: `problem`; the ground truth is `answer` or, without one, the last `\\boxed{...}` of `solution`."""
    rest = dict(columns)
    problem = pop_column(rest, "problem", "data.adapter=math")
    truth = rest.pop("answer", None)
    if truth is None:
        truth = last_boxed(str(pop_column(rest, "solution", "data.adapter=math")))
    if truth is None:
        raise ValueError("data.adapter=math: there is no column 'answer', and 'solution' has no \\boxed{...}")
    return Example(
        prompt=_user(problem), ground_truth=truth, data_source=rest.pop(cfg.reward_fn_key, "math"), extra_info=rest
    )


@ADAPTERS.register("plain")
def plain(columns: dict[str, Any], cfg: DataConfig) -> Example:
    """`data.prompt_key` as it is (string or messages) and `data.answer_key`."""
    rest = dict(columns)
    prompt = pop_column(rest, cfg.prompt_key, f"data.prompt_key={cfg.prompt_key}")
    truth = None
    if cfg.answer_key is not None:
        truth = pop_column(rest, cfg.answer_key, f"data.answer_key={cfg.answer_key} (null: no ground truth)")
    return Example(prompt=prompt, ground_truth=truth, data_source=rest.pop(cfg.reward_fn_key, None), extra_info=rest)


@ADAPTERS.register("chat")
def chat(columns: dict[str, Any], cfg: DataConfig) -> Example:
    """As `plain`, but a string becomes one user message and so goes through the chat template."""
    example = plain(columns, cfg)
    if isinstance(example.prompt, str):
        example.prompt = _user(example.prompt)
    return example


def _user(question: str) -> Messages:
    return [{"role": "user", "content": question}]
