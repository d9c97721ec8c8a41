"""Prompts and groups as JSON and flat arrays: what a checkpoint holds of rollout. Reading it runs no code (no pickle).

`Packer.pack` stands in for an object with its position; the objects themselves are in `objects.json`, and the columns
of all trajectories, one after the other, in `columns.safetensors`.
"""

import base64
import datetime
import decimal
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlpost.files import sync, write_synced
from rlpost.trajectory import Group, Prompt, Status, Trajectory

OBJECTS, COLUMNS = "objects.json", "columns.safetensors"
OBJECT = "__object__"
DTYPES = {
    "token_ids": np.int64,
    "provenance": np.uint8,
    "rollout_logprobs": np.float32,
    "versions": np.int32,
    "rewards": np.float32,
}
PROMPT_IDS = "prompt_ids"

# values beyond JSON that ground truths and further columns of a row may hold: tag -> type, to JSON, and back
TAGS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda value: [plain(item) for item in value], tuple),
    "set": (set, lambda value: [plain(item) for item in value], set),
    "frozenset": (frozenset, lambda value: [plain(item) for item in value], frozenset),
    "dict": (dict, lambda value: [[plain(k), plain(v)] for k, v in value.items()], dict),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "array": (
        np.ndarray,
        lambda a: [a.dtype.str, a.shape, plain(a.ravel().tolist())],
        lambda saved: np.array(saved[2], dtype=saved[0]).reshape(saved[1]),
    ),
    "scalar": (np.generic, lambda s: [s.dtype.str, plain(s.item())], lambda saved: np.dtype(saved[0]).type(saved[1])),
    "datetime": (datetime.datetime, lambda value: value.isoformat(), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda value: value.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda value: value.isoformat(), datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
}


def plain(value: Any) -> Any:
    """`value` as JSON can hold it; `untag` brings it back with the same types.

    Raises:
        ValueError: a type that is neither JSON's nor in `TAGS`.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [plain(item) for item in value]
    if type(value) is dict and all(type(key) is str and not key.startswith("__") for key in value):
        return {key: plain(item) for key, item in value.items()}
    for tag, (kind, encode, _) in TAGS.items():
        if isinstance(value, kind):
            return {f"__{tag}__": encode(value)}
    raise ValueError(
        f"a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: make it text, numbers,"
        " lists or dicts of those in the data adapter, task or workflow that it comes from"
    )


def untag(value: dict[str, Any]) -> Any:
    """`object_hook` of JSON: undoes `plain`."""
    if len(value) == 1:
        (key, content), *_ = value.items()
        tag = key.removeprefix("__").removesuffix("__")
        if key == f"__{tag}__" and tag in TAGS:
            return TAGS[tag][2](content)
    return value


class Packer:
    """Collects the prompts and groups of one state. An object that occurs twice is stored once."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        self._sources: list[Any] = []  # keeps them alive, so that an `id` means one object
        self._objects: list[dict[str, Any]] = []
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in (*DTYPES, PROMPT_IDS)}

    def pack(self, value: Any) -> dict[str, int]:
        """What stands for `value` in JSON; to be its `default`.

        Raises:
            ValueError: neither a `Prompt` nor a `Group`, or one that holds what JSON cannot.
        """
        if id(value) not in self._positions:
            if isinstance(value, Prompt):
                packed = self._prompt(value)
            elif isinstance(value, Group):
                packed = self._group(value)
            else:
                raise ValueError(f"the state to be saved holds a {type(value).__qualname__}, which cannot be saved")
            self._positions[id(value)] = len(self._objects)
            self._sources.append(value)
            self._objects.append(packed)
        return {OBJECT: self._positions[id(value)]}

    def write(self, folder: Path) -> None:
        """Write the files, if there is anything to write."""
        if not self._objects:
            return
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items() if parts}
        save_file(columns, folder / COLUMNS)
        sync(folder / COLUMNS)
        write_synced(folder / OBJECTS, json.dumps(self._objects).encode())

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        self._columns[PROMPT_IDS].append(np.asarray(prompt.token_ids, np.int64))
        return {
            "kind": "prompt",
            "id": prompt.id,
            "index": prompt.index,
            "length": len(prompt.token_ids),
            "text": prompt.text,
            "data_source": prompt.data_source,
            "ground_truth": _named(f"prompt '{prompt.id}': ground_truth", prompt.ground_truth),
            "extra_info": _named(f"prompt '{prompt.id}': extra_info", prompt.extra_info),
        }

    def _group(self, group: Group) -> dict[str, Any]:
        prompt = self.pack(group.prompt)
        for name, dtype in DTYPES.items():
            self._columns[name] += [np.asarray(getattr(t, name), dtype) for t in group.trajectories]
        return {
            "kind": "group",
            "id": group.id,
            "index": group.index,
            "data_source": group.data_source,
            "prompt": prompt[OBJECT],
            "trajectories": [
                {
                    "length": len(t.token_ids),
                    "status": str(t.status),
                    "sample_id": t.sample_id,
                    "reward_parts": _named(f"group '{group.id}': reward_parts", t.reward_parts),
                    "error": t.error,
                    "extras": _named(f"group '{group.id}': extras", t.extras),
                }
                for t in group.trajectories
            ],
        }


def _named(where: str, value: Any) -> Any:
    try:
        return plain(value)
    except ValueError as error:
        raise ValueError(f"{where} holds {error}") from None


class Unpacker:
    """Objects of a checkpoint, as they were; `put_back` is an `object_hook`."""

    def __init__(self, folder: Path):
        self._objects: list[Any] = []
        if not (folder / OBJECTS).is_file():
            return
        self._columns, self._used = load_file(folder / COLUMNS), dict.fromkeys((*DTYPES, PROMPT_IDS), 0)
        for packed in json.loads((folder / OBJECTS).read_bytes(), object_hook=untag):
            kind = packed.pop("kind")
            self._objects.append(self._prompt(**packed) if kind == "prompt" else self._group(**packed))

    def put_back(self, value: dict[str, Any]) -> Any:
        """The object that `value` stands for, or `value`."""
        return self._objects[value[OBJECT]] if value.keys() == {OBJECT} else value

    def _prompt(self, length: int, **fields: Any) -> Prompt:
        return Prompt(token_ids=self._next(PROMPT_IDS, length), **fields)

    def _group(self, prompt: int, trajectories: list[dict[str, Any]], **fields: Any) -> Group:
        return Group(prompt=self._objects[prompt], trajectories=[self._trajectory(**t) for t in trajectories], **fields)

    def _trajectory(self, length: int, status: str, **fields: Any) -> Trajectory:
        columns: dict[str, Any] = {name: self._next(name, length) for name in DTYPES}
        return Trajectory(status=Status(status), **columns, **fields)

    def _next(self, name: str, length: int) -> np.ndarray:
        start = self._used[name]
        self._used[name] = start + length
        return self._columns[name][start : start + length].copy()


def prompts_in(state: Any) -> Iterator[Prompt]:
    """Every prompt in nested dicts, lists and tuples, those of groups included."""
    if isinstance(state, Prompt):
        yield state
    elif isinstance(state, Group):
        yield state.prompt
    elif isinstance(state, dict):
        yield from prompts_in(list(state.values()))
    elif isinstance(state, list | tuple):
        for item in state:
            yield from prompts_in(item)
