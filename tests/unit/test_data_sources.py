import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.data_sources import parse_query, read_source
from rlpost.tasks.addition import problems

KEY = "data.train_files"
DATA = Path(os.environ.get("RLPOST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_rows_carry_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    source = read_source(str(path), KEY)
    assert source.name == "train"
    assert [(row.index, row.columns, row.where) for row in source.rows] == [
        (0, {"a": 1}, f"{path}:1"),
        (1, {"a": 2}, f"{path}:3"),
    ]


def test_parquet_rows_keep_nested_columns(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}}
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    assert read_source(str(path), KEY).rows[0].columns == row


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", '{"a": 1}\n{"a": \n', r"data.train_files=.*bad.jsonl: line 2 is not valid JSON"),
        ("list.jsonl", "[1]\n", r"list.jsonl: line 1 is a JSON list, expected an object"),
        ("empty.jsonl", "", r"empty.jsonl: the file is empty"),
        ("bad.parquet", "text", r"bad.parquet: not a readable parquet file"),
        ("data.csv", "a,b", r"data.csv: expected a .jsonl or .parquet file, a folder"),
    ],
)
def test_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_source(str(tmp_path / name), KEY)


def test_missing_file_lists_near_names(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"a": 1})
    with pytest.raises(ValueError, match=r"no such file or folder: .*trian.jsonl; did you mean '.*train.jsonl'\?"):
        read_source(str(tmp_path / "trian.jsonl"), KEY)


def test_folder_split_is_chosen_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", {"a": 1})
    write(folder / "test.jsonl", {"a": 2})
    assert [row.columns for row in read_source(f"{folder}?split=test", KEY).rows] == [{"a": 2}]
    with pytest.raises(ValueError, match=r"has several splits, choose one: \?split=train, \?split=test"):
        read_source(str(folder), KEY)
    with pytest.raises(ValueError, match=r"unknown option 'spilt'; did you mean 'split'\?"):
        read_source(f"{folder}?spilt=test", KEY)


def test_folder_saved_to_disk_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"a": 1}, {"a": 2}]).save_to_disk(str(tmp_path / "saved"))
    assert [row.columns for row in read_source(str(tmp_path / "saved"), KEY).rows] == [{"a": 1}, {"a": 2}]


def test_query_values_become_numbers_and_booleans() -> None:
    parsed = parse_query("a=1&b=0.5&c=true&d=False&e=word&f=[1,2]&g=")
    assert parsed == {"a": 1, "b": 0.5, "c": True, "d": False, "e": "word", "f": [1, 2], "g": ""}


def test_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown scheme 's3://'; known: hf, reasoning-gym, task"):
        read_source("s3://bucket/file", KEY)


def test_reasoning_gym_questions_are_the_same_every_time() -> None:
    pytest.importorskip("reasoning_gym")
    uri = "reasoning-gym://chain_sum?min_terms=2&max_terms=3&size=5"
    first, second = read_source(uri, KEY), read_source(uri, KEY)
    assert [row.columns for row in first.rows] == [row.columns for row in second.rows]
    assert len(first.rows) == 5
    columns = first.rows[0].columns
    assert columns["prompt"] == [{"role": "user", "content": columns["reasoning_gym"]["entry"]["question"]}]
    assert columns["data_source"] == "chain_sum"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("reasoning-gym://chain_sums", r"no task 'chain_sums'; did you mean 'chain_sum'"),
        ("reasoning-gym://chain_sum?min_term=2", r"no option 'min_term'; did you mean .*'min_terms'"),
        ("reasoning-gym://chain_sum?min_terms=0", r"data.train_files=reasoning-gym://chain_sum\?min_terms=0"),
    ],
)
def test_reasoning_gym_mistakes_name_the_task(uri: str, message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=message):
        read_source(uri, KEY)


def test_task_function_gets_its_options() -> None:
    source = read_source("task://rlpost.tasks.addition.problems?digits=1&size=3&seed=5", KEY)
    assert source.name == "problems"
    assert [row.columns for row in source.rows] == problems(digits=1, size=3, seed=5)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("task://rlpost.tasks.addition.problem", r"has no 'problem'; did you mean 'problems'"),
        ("task://rlpost.tasks.addition.problems?digit=2", r"unknown option 'digit'; did you mean 'digits'"),
        ("task://rlpost.tasks.addition.HELD_OUT_ONE_IN", r"is not a function"),
        ("task://os.path.splitext?p=file.txt", r"row 0 is a str, expected a dict"),
    ],
)
def test_task_mistakes_name_the_function(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_source(uri, KEY)


@pytest.mark.parametrize(("name", "rows"), [("gsm8k/train.jsonl", 7473), ("math500/test.jsonl", 500)])
def test_real_data_sets_are_read_whole(name: str, rows: int) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}; set RLPOST_DATA to its folder")
    assert len(read_source(str(DATA / name), KEY).rows) == rows


def test_hub_address_names_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple] = []

    def load_dataset(path: str, name: str | None, revision: str | None) -> Any:
        asked.append((path, name, revision))
        splits = {"train": [{"a": 1}], "test": [{"a": 2}]}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = read_source("hf://owner/name?config=main&split=test&revision=v1", KEY)
    assert (source.name, [row.columns for row in source.rows]) == ("name", [{"a": 2}])
    assert asked == [("owner/name", "main", "v1")]
    with pytest.raises(ValueError, match=r"has no split 'val': \?split=train, \?split=test"):
        read_source("hf://owner/name?split=val", KEY)
    with pytest.raises(ValueError, match=r"unknown option 'subset'"):
        read_source("hf://owner/name?subset=main", KEY)


def test_hub_data_set_that_does_not_load_suggests_files(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"does not load \(ConnectionError: no network\); without a network, download"):
        read_source("hf://owner/name", KEY)
