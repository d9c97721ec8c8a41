"""Schema of the `data` group."""

from dataclasses import dataclass, field
from typing import Any

from rlpost.problems import refuse

# Adapters, and the keys of `DataConfig` that each reads; tests hold the table to the code.
ADAPTERS_READ: dict[str, tuple[str, ...]] = {
    "auto": ("prompt_key", "answer_key", "reward_fn_key"),
    "rows": (),
    "verl": ("prompt_key", "reward_fn_key"),
    "gsm8k": ("reward_fn_key",),
    "math": ("reward_fn_key",),
    "plain": ("prompt_key", "answer_key", "reward_fn_key"),
    "chat": ("prompt_key", "answer_key", "reward_fn_key"),
}


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Where prompts come from and how they become tokens.

    A source is a `.jsonl` or `.parquet` file, a folder of data files `path?split=test`, a hub data set
    `hf://owner/name?config=main&split=train`, a procedural task
    `reasoning-gym://chain_sum?min_terms=2&size=1000&seed=1`, or `task://<dotted path>?key=value` for a function that
    returns rows. Several sources are given as a list.

    A prompt that is a list of messages goes through the chat template; a prompt that is a string is tokenized exactly
    as it is. The adapters `gsm8k`, `math` and `chat` make one user message of a question, `verl` rows hold messages.
    """

    train_files: Any = "???"  # str or list of str
    val_files: Any = None  # str, list, or map of name -> str or list; null: no validation
    adapter: str = "auto"  # how a row becomes a prompt: auto, rows, verl, gsm8k, math, plain, chat, or a dotted path
    prompt_key: str = "prompt"  # column of the adapters verl, plain and chat
    reward_fn_key: str = "data_source"  # column that names the data set, where there is one
    answer_key: str | None = "answer"  # ground truth of the adapters plain and chat; null: there is none
    instruction: str | None = None  # appended to the question on a new line ("Put the final answer ...")
    system_prompt: str | None = None  # takes the place of a system message that the row has
    apply_chat_template: bool = True  # False: the contents of a message list are joined by newlines as plain text
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # more arguments of the chat template
    train_batch_size: int = 64  # prompts a step; a batch that passes the end of an epoch goes on with the next one
    val_batch_size: int | None = None  # prompts in flight at once in validation; null: all
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    filter_overlong_prompts: bool = True  # False: a longer prompt is an error
    train_max_samples: int | None = None  # first usable prompts of all files together
    val_max_samples: int | None = None  # first usable prompts of each validation set
    shuffle: bool = True  # anew each epoch
    seed: int | None = None  # null: the run's seed

    def __post_init__(self) -> None:
        for key in ("train_batch_size", "max_prompt_length", "max_response_length"):
            if getattr(self, key) < 1:
                refuse(f"data.{key}={getattr(self, key)}: must be >= 1")
        for key in ("val_batch_size", "train_max_samples", "val_max_samples"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                refuse(f"data.{key}={getattr(self, key)}: must be >= 1, or null")
        if isinstance(self.train_files, dict):
            refuse(
                f"data.train_files={self.train_files}: expected a path or address, or a list of them: "
                "data.train_files=[...]"
            )
        if self.chat_template_kwargs and not self.apply_chat_template:
            refuse(
                f"data.chat_template_kwargs={self.chat_template_kwargs} has no effect with data.apply_chat_template="
                "false: remove one of the two"
            )
