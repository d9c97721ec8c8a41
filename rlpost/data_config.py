"""Schema of the `data` group."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Where prompts come from and how they become tokens.

    A source is a path (`.jsonl`, `.parquet`), a hub data set `hf://owner/name?config=main&split=train`, a procedural
    task `reasoning-gym://chain_sum?min_terms=2&size=1000&seed=1`, or `task://<dotted path>?key=value` for a function
    that returns rows. Several sources are given as a list.
    """

    train_files: Any = "???"  # str or list of str
    val_files: Any = None  # str, list, or map of name -> str; null: no validation
    adapter: str = "auto"  # how a raw row becomes a prompt: auto, verl, gsm8k, math, plain, or a dotted path
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    answer_key: str = "answer"
    instruction: str | None = None  # appended to the question ("Put the final answer ...")
    system_prompt: str | None = None
    apply_chat_template: bool = True  # for prompts that are message lists; plain strings otherwise
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    train_batch_size: int = 64  # prompts a step
    val_batch_size: int | None = None  # prompts in flight at once in validation; null: all
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    filter_overlong_prompts: bool = True  # False: a longer prompt is an error
    train_max_samples: int | None = None
    val_max_samples: int | None = None
    shuffle: bool = True
    seed: int | None = None  # null: the run's seed

    def __post_init__(self) -> None:
        for key in ("train_batch_size", "max_prompt_length", "max_response_length"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key}={getattr(self, key)}: must be >= 1")
