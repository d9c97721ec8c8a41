"""Raw rows and where each came from: files, hub data sets, procedural tasks."""

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from rlpost.registry import load_dotted, near


@dataclass(slots=True, kw_only=True)
class Row:
    """One raw row: its `index` in the source, its columns, and where a user finds it (`train.jsonl:17`)."""

    index: int
    columns: dict[str, Any]
    where: str


@dataclass(slots=True, kw_only=True)
class Source:
    """All rows of one source; `name` is short and goes into prompt ids and, by default, `data_source`."""

    name: str
    uri: str
    rows: list[Row]


def read_source(uri: str, key: str) -> Source:
    """Read every row of `uri` (see `DataConfig` for its forms).

    Args:
        key: the config key it came from (`data.train_files`), for messages.

    Raises:
        ValueError: an unknown form, a missing or empty file, a malformed line, a data set or task that does not load.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return _from_path(uri, key)
    if scheme not in _SCHEMES:
        raise ValueError(f"{key}={uri}: unknown scheme '{scheme}://'; {near(scheme, _SCHEMES)}")
    target, _, query = rest.partition("?")
    return _SCHEMES[scheme](uri, target, parse_query(query), key)


def parse_query(query: str) -> dict[str, Any]:
    """`a=1&b=0.5&c=true&d=x` as `{"a": 1, "b": 0.5, "c": True, "d": "x"}`: JSON where it parses, else text."""
    return {name: _parse_value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def _numbered(name: str, uri: str, tables: Iterable[dict[str, Any]], key: str, label: str) -> Source:
    rows = [Row(index=i, columns=columns, where=f"row {i} of {label}") for i, columns in enumerate(tables)]
    if not rows:
        raise ValueError(f"{key}={uri}: {label} has no rows")
    return Source(name=name, uri=uri, rows=rows)


def _from_path(uri: str, key: str) -> Source:
    path, options = Path(uri).expanduser(), {}
    if not path.exists() and "?" in uri:
        text, _, query = uri.partition("?")
        path, options = Path(text).expanduser(), parse_query(query)
    if not path.exists():
        raise ValueError(f"{key}={uri}: no such file or folder: {path.absolute()}{_near_file(path)}")
    if path.is_dir():
        return _from_folder(uri, path, options, key)
    if options:
        raise ValueError(f"{key}={uri}: options after '?' are for folders, not for single files")
    if path.suffix == ".jsonl":
        rows = list(_read_jsonl(path, key))
        if not rows:
            raise ValueError(f"{key}={uri}: the file is empty")
        return Source(name=path.stem, uri=uri, rows=rows)
    if path.suffix == ".parquet":
        return _numbered(path.stem, uri, _read_parquet(path, key), key, str(path))
    raise ValueError(f"{key}={uri}: expected a .jsonl or .parquet file, a folder, or one of {', '.join(_SCHEMES)}://")


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()])
    return "; did you mean " + " or ".join(f"'{path.parent / name}'" for name in close) + "?" if close else ""


def _read_jsonl(path: Path, key: str) -> Iterator[Row]:
    index = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                columns = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{key}={path}: line {number} is not valid JSON ({error.msg}, column {error.colno})"
                ) from error
            if not isinstance(columns, dict):
                raise ValueError(f"{key}={path}: line {number} is a JSON {type(columns).__name__}, expected an object")
            yield Row(index=index, columns=columns, where=f"{path}:{number}")
            index += 1


def _read_parquet(path: Path, key: str) -> list[dict[str, Any]]:
    import pyarrow.lib  # comes with datasets; read directly, since datasets would first write a copy to its cache
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.lib.ArrowException as error:
        raise ValueError(f"{key}={path}: not a readable parquet file ({error})") from error


def _from_folder(uri: str, path: Path, options: dict[str, Any], key: str) -> Source:
    """A folder written by `Dataset.save_to_disk`, or one of data files whose names tell the split."""
    import datasets

    _check_options(uri, options, ("split",), key)
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    try:
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"{key}={uri}: the folder does not load as a data set ({error})") from error
    return _numbered(path.name, uri, _pick_split(uri, loaded, options.get("split"), key), key, uri)


def _from_hub(uri: str, target: str, options: dict[str, Any], key: str) -> Source:
    import datasets

    _check_options(uri, options, ("config", "split", "revision"), key)
    config, revision = options.get("config"), options.get("revision")
    try:
        loaded = datasets.load_dataset(
            target, None if config is None else str(config), revision=None if revision is None else str(revision)
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"{key}={uri}: the data set does not load ({type(error).__name__}: {error}); without a network, "
            "download it elsewhere and give its folder or file"
        ) from error
    return _numbered(target.rpartition("/")[2], uri, _pick_split(uri, loaded, options.get("split"), key), key, uri)


def _pick_split(uri: str, loaded: Any, split: str | None, key: str) -> Any:
    """One split of a `DatasetDict`, or the `Dataset` itself; a choice between several must be stated."""
    if not isinstance(loaded, dict):
        if split is not None:
            raise ValueError(f"{key}={uri}: this data set has no splits; remove 'split={split}'")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        said = "has several splits, choose one" if split is None else f"has no split '{split}'"
        raise ValueError(f"{key}={uri}: {said}: " + ", ".join(f"?split={name}" for name in loaded))
    return loaded[split]


def _from_reasoning_gym(uri: str, target: str, options: dict[str, Any], key: str) -> Source:
    """Questions of a reasoning-gym task; the seed defaults to 0, since its own default differs from run to run."""
    from rlpost.rewards.reasoning_gym import make_dataset

    options = {"seed": 0, **options}
    try:
        entries = list(make_dataset(target, options))
    except (ValueError, AssertionError, TypeError) as error:
        raise ValueError(f"{key}={uri}: {error}") from error
    rows = [
        {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "ground_truth": entry["answer"],
            "data_source": target,
            "reasoning_gym": {"name": target, "options": options, "entry": entry},
        }
        for entry in entries
    ]
    return _numbered(target, uri, rows, key, uri)


def _from_task(uri: str, target: str, options: dict[str, Any], key: str) -> Source:
    """Rows that a function returns: dicts with `prompt` (str or messages), `ground_truth`, `data_source`, ..."""
    function = load_dotted(target, key)
    if not callable(function):
        raise ValueError(f"{key}={uri}: '{target}' is not a function")
    _check_options(uri, options, inspect.signature(function).parameters, key)
    rows = list(function(**options))
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{key}={uri}: row {index} is a {type(row).__name__}, expected a dict of columns")
    return _numbered(target.rpartition(".")[2], uri, rows, key, uri)


def _check_options(uri: str, options: dict[str, Any], known: Iterable[str], key: str) -> None:
    known = list(known)
    for name in options:
        if name not in known:
            raise ValueError(f"{key}={uri}: unknown option '{name}'; {near(name, known)}")


_SCHEMES: dict[str, Callable[[str, str, dict[str, Any], str], Source]] = {
    "hf": _from_hub,
    "reasoning-gym": _from_reasoning_gym,
    "task": _from_task,
}
