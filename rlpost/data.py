"""Prompts: loaded, rendered, tokenized, filtered by length, and issued in a seeded order that can be resumed."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from rlpost.data_adapters import Example, Messages, get_adapter
from rlpost.data_config import DataConfig
from rlpost.data_sources import Row, Source, read_source
from rlpost.trajectory import Prompt

logger = logging.getLogger(__name__)


class PromptStream:
    """Training prompts in a seeded shuffled order, epoch after epoch.

    `Prompt.id` is `<source>/<epoch>/<row>`, `Prompt.index` counts up over the run. A batch larger than what is left of
    an epoch continues into the next one, so a step may hold the same problem twice, under different ids.

    Args:
        cfg: the `data` section.
        tokenizer: a Hugging Face tokenizer.
        seed: the run's seed; `data.seed` takes its place when set.
        epochs: stop after so many; None: endless.

    Attributes:
        dropped_overlong: rows left out because their prompt exceeds `data.max_prompt_length`.

    Raises:
        ValueError: as `load_prompts`.
    """

    def __init__(self, cfg: DataConfig, tokenizer: Any, seed: int, epochs: int | None = None):
        self._shuffle, self._seed = cfg.shuffle, seed if cfg.seed is None else cfg.seed
        self._epochs = epochs
        loaded = _load(cfg.train_files, cfg, tokenizer, "train")
        self._prompts, self.dropped_overlong = loaded.prompts, loaded.dropped
        self._digest = _digest(self._prompts)
        self._epoch = self._position = self._index = 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Usable prompts an epoch."""
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        prompt = self._prompts[self._order[self._position]]
        source, _, row = prompt.id.split("/")
        issued = replace(prompt, id=f"{source}/{self._epoch}/{row}", index=self._index)
        self._index += 1
        self._position += 1
        if self._position == len(self._prompts):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        return issued

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; fewer (at last none) only where `epochs` ends."""
        return list(islice(self, n))

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The cursor: where the next prompt stands, and what the order depends on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "index": self._index,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self._prompts),
            "digest": self._digest,
        }

    def differences(self, state: dict[str, Any]) -> Iterator[str]:
        """What another order depends on than that of which `state` is the cursor."""
        present = self.state_dict()
        for name, key in (
            ("seed", "data.seed (or seed)"),
            ("shuffle", "data.shuffle"),
            ("num_prompts", "number of usable prompts"),
            ("digest", "digest of the prompts of data.train_files"),
        ):
            if state[name] != present[name]:
                yield f"{key} is {present[name]}, the checkpoint has {state[name]}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the prompt that would have come next when `state` was taken.

        Raises:
            ValueError: the data, their tokens, the seed or the shuffling are not those of the saved run.
        """
        if different := list(self.differences(state)):
            raise ValueError(f"cannot resume the data order: {'; '.join(different)}")
        self._epoch, self._position, self._index = state["epoch"], state["position"], state["index"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._prompts))


def load_prompts(files: str | Sequence[str], cfg: DataConfig, tokenizer: Any, split: str) -> list[Prompt]:
    """All usable prompts of one or several sources, in file order; `index` counts from 0.

    Args:
        files: one source or a list (see `DataConfig`).
        split: "train" or "val": which keys (`data.<split>_files`, `data.<split>_max_samples`) apply. Ids of "val"
            prompts begin with `val.`, so that they differ from those of training.

    Raises:
        ValueError: a missing or empty file, a malformed row (file and line are named), no prompt short enough, an
            overlong prompt with `data.filter_overlong_prompts=false`, or messages without a chat template.
    """
    return _load(files, cfg, tokenizer, split).prompts


def load_val_sets(cfg: DataConfig, tokenizer: Any) -> dict[str, list[Prompt]]:
    """Validation sets by the names of their metrics, `val/<name>/...`.

    With a map these are its names; one whose rows have several `data_source` is told apart as `<name>/<data source>`.
    With a string or a list they are the data sources.
    """
    if cfg.val_files is None:
        return {}
    if isinstance(cfg.val_files, dict):
        sets: dict[str, list[Prompt]] = {}
        for name, files in cfg.val_files.items():
            parts = _by_data_source(_load(files, cfg, tokenizer, "val", name).prompts)
            sets |= {name if len(parts) == 1 else f"{name}/{source}": prompts for source, prompts in parts.items()}
        return sets
    sources = _read_sources(cfg.val_files, "data.val_files")
    loaded = [_prompts_of([source], cfg, tokenizer, "val", None).prompts for source in sources]
    return _by_data_source([prompt for prompts in loaded for prompt in prompts])


def _by_data_source(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    parts: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        parts.setdefault(prompt.data_source, []).append(prompt)
    return parts


@dataclass(slots=True, kw_only=True)
class _Loaded:
    prompts: list[Prompt]
    dropped: int


@dataclass(slots=True, kw_only=True)
class _Rendered:
    """An example on its way to a `Prompt`.

    Attributes:
        messages: what `text` was made of; None where the row's prompt is a string.
        raw: `text` was written by the user as it is, not by a chat template.
    """

    source: Source
    row: Row
    example: Example
    messages: Messages | None
    text: str
    raw: bool


def _load(files: Any, cfg: DataConfig, tokenizer: Any, split: str, set_name: str | None = None) -> _Loaded:
    return _prompts_of(_read_sources(files, f"data.{split}_files"), cfg, tokenizer, split, set_name)


def _read_sources(files: Any, key: str) -> list[Source]:
    """The sources of one string or a list, with names made unique (`train`, `train-2`)."""
    uris = [files] if isinstance(files, str) else files
    if not isinstance(uris, list | tuple) or not uris or not all(isinstance(uri, str) for uri in uris):
        raise ValueError(f"{key}={files}: expected a path or address, or a list of them")
    sources: list[Source] = []
    for uri in uris:
        source = read_source(uri, key)
        base, number = source.name.replace("/", "_"), 2
        source.name = base
        while source.name in {other.name for other in sources}:
            source.name, number = f"{base}-{number}", number + 1
        sources.append(source)
    return sources


def _prompts_of(sources: list[Source], cfg: DataConfig, tokenizer: Any, split: str, set_name: str | None) -> _Loaded:
    adapter = get_adapter(cfg)
    rendered = []
    for source in sources:
        for row in source.rows:
            example = _adapt(adapter, row, cfg)
            messages = None if isinstance(example.prompt, str) else _messages(example.prompt, row, cfg)
            text, raw = _render(example.prompt if messages is None else messages, row, cfg, tokenizer)
            rendered.append(_Rendered(source=source, row=row, example=example, messages=messages, text=text, raw=raw))
    prefix = "" if split == "train" else f"{split}." if set_name is None else f"{split}.{set_name}."
    return _tokenize(rendered, cfg, tokenizer, split, prefix)


def _adapt(adapter: Any, row: Row, cfg: DataConfig) -> Example:
    try:
        example = adapter(row.columns, cfg)
    except (ValueError, KeyError, TypeError) as error:
        said = str(error) if isinstance(error, ValueError) else f"data.adapter={cfg.adapter}: {error!r}"
        raise ValueError(f"{row.where}: {said}") from error
    if not isinstance(example, Example):
        raise ValueError(
            f"{row.where}: data.adapter={cfg.adapter} returned a {type(example).__name__}, expected "
            "rlpost.data_adapters.Example"
        )
    return example


def _render(prompt: str | Messages, row: Row, cfg: DataConfig, tokenizer: Any) -> tuple[str, bool]:
    """The prompt's text, and whether it is raw: a string as it is, or messages through the chat template."""
    if isinstance(prompt, str):
        if cfg.system_prompt is not None:
            raise ValueError(
                f"{row.where}: data.system_prompt needs messages, but the prompt is a string; use data.adapter=chat "
                "to make it a user message, or unset data.system_prompt"
            )
        return (prompt if cfg.instruction is None else f"{prompt}\n{cfg.instruction}"), True
    if not cfg.apply_chat_template:
        return "\n".join(message["content"] for message in prompt), True
    if not tokenizer.chat_template:
        raise ValueError(
            f"{row.where}: the prompt is a list of messages, but the tokenizer has no chat template: set "
            "model.chat_template, or data.apply_chat_template=false to join the messages as plain text"
        )
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **cfg.chat_template_kwargs)
    return text, False


def _messages(prompt: Any, row: Row, cfg: DataConfig) -> Messages:
    """The row's messages with the system prompt and the instruction of the config."""
    whole = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
    if not whole or not all(isinstance(message.get("content"), str) and "role" in message for message in prompt):
        raise ValueError(
            f"{row.where}: the prompt is {str(prompt)[:80]!r}, expected a string or a list of "
            "{'role': ..., 'content': <text>} messages"
        )
    messages = [dict(message) for message in prompt]
    if cfg.instruction is not None:
        users = [message for message in messages if message["role"] == "user"]
        if not users:
            raise ValueError(f"{row.where}: data.instruction is appended to a user message, but the prompt has none")
        users[-1]["content"] += f"\n{cfg.instruction}"
    if cfg.system_prompt is not None:
        messages = [{"role": "system", "content": cfg.system_prompt}, *(m for m in messages if m["role"] != "system")]
    return messages


def _tokenize(rendered: list[_Rendered], cfg: DataConfig, tokenizer: Any, split: str, prefix: str) -> _Loaded:
    """Token ids and the length filter. The template writes its own special tokens; raw text gets the tokenizer's."""
    ids: dict[int, list[int]] = {}
    for raw in (True, False):
        chosen = [i for i, item in enumerate(rendered) if item.raw == raw]
        if chosen:
            texts = [rendered[i].text for i in chosen]
            ids.update(zip(chosen, tokenizer(texts, add_special_tokens=raw)["input_ids"], strict=True))
    limit = cfg.train_max_samples if split == "train" else cfg.val_max_samples
    prompts: list[Prompt] = []
    dropped = 0
    for i, item in enumerate(rendered):
        if limit is not None and len(prompts) == limit:
            break
        if not ids[i]:
            raise ValueError(f"{item.row.where}: the prompt has no tokens")
        if len(ids[i]) > cfg.max_prompt_length:
            _refuse_overlong(item, len(ids[i]), cfg)
            dropped += 1
            continue
        prompts.append(_prompt(item, ids[i], prefix, len(prompts)))
    if not prompts:
        shortest = min(map(len, ids.values()))
        raise ValueError(
            f"data.max_prompt_length={cfg.max_prompt_length}: none of the {len(rendered)} prompts of "
            f"data.{split}_files is short enough; the shortest has {shortest} tokens"
        )
    if dropped:
        logger.warning(
            "data.%s_files: %d of %d prompts exceed data.max_prompt_length=%d and are left out",
            split, dropped, len(prompts) + dropped, cfg.max_prompt_length,
        )  # fmt: skip
    return _Loaded(prompts=prompts, dropped=dropped)


def _refuse_overlong(item: _Rendered, length: int, cfg: DataConfig) -> None:
    if not cfg.filter_overlong_prompts:
        raise ValueError(
            f"{item.row.where}: the prompt has {length} tokens, data.max_prompt_length={cfg.max_prompt_length}; raise "
            "it, or set data.filter_overlong_prompts=true to leave such rows out"
        )


def _prompt(item: _Rendered, token_ids: list[int], prefix: str, index: int) -> Prompt:
    example = item.example
    extra_info = example.extra_info
    if item.messages is not None:
        extra_info = {**extra_info, "messages": item.messages}
    return Prompt(
        id=f"{prefix}{item.source.name}/0/{item.row.index}",
        index=index,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        text=item.text,
        data_source=item.source.name if example.data_source is None else str(example.data_source),
        ground_truth=example.ground_truth,
        extra_info=extra_info,
    )


def _digest(prompts: list[Prompt]) -> str:
    """Fingerprint of ids and tokens, in order."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(f"{prompt.id}:{len(prompt.token_ids)}:".encode())
        sha.update(prompt.token_ids.tobytes())
    return sha.hexdigest()
