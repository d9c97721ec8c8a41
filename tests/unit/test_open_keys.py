"""Names below maps that take any: every spelling of theirs works, through the real entry point too."""

import itertools
import subprocess
import sys

import pytest
import yaml

from rlpost.config import CONFIG_DIR, open_keys, register, to_object
from rlpost.open_keys import hydra_words
from rlpost.overrides import check_overrides, compose
from rlpost.rewards.config import RewardTermConfig
from rlpost.tools.planning.run import read_run

PLUS = ("", "+", "++")
LAUNCH = """
import json
from rlpost.launch import launch

def execute(cfg, run_dir):
    return {
        "val_files": cfg.data.val_files,
        "terms": {name: [term.fn, term.weight, term.kwargs] for name, term in cfg.reward.terms.items()},
        "engine_kwargs": cfg.rollout.engine_kwargs,
    }

launch(execute)
"""
OPEN_MAPS = [
    "model.override_config",
    "rollout.engine_kwargs",
    "data.chat_template_kwargs",
    "cluster.ray_init_kwargs",
    "tracking.wandb",
]


@pytest.fixture(autouse=True)
def registered():
    register()


def composed(*words):
    """The typed config of words that nothing is said against."""
    assert check_overrides(list(words)) is None
    return to_object(compose(list(words))[0])


def launched(tmp_path, *words):
    """What each job of a command got."""
    command = [sys.executable, "-c", LAUNCH, *words]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(CONFIG_DIR.parent)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return [yaml.safe_load(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]


def test_open_keys_are_those_of_the_schemas_types():
    found = {".".join(path): item for path, item in open_keys().items()}
    assert set(OPEN_MAPS) < set(found)
    assert found["reward.terms"] is RewardTermConfig and "reward.terms.*.kwargs" in found
    assert found["data.val_files"] is None


@pytest.mark.parametrize(("key", "plus"), list(itertools.product(OPEN_MAPS, PLUS)))
def test_a_name_is_set_below_an_open_map_or_with_all_of_it(key, plus):
    base = ["tracking=wandb"]
    assert value_of(composed(*base, f"{plus}{key}.x=1"), key) == {"x": 1}
    assert value_of(composed(*base, f"{plus}{key}={{a: {{b: 1}}}}", f"{plus}{key}.a.c=2"), key) == {
        "a": {"b": 1, "c": 2}
    }


def value_of(cfg, key):
    section, _, name = key.partition(".")
    return getattr(getattr(cfg, section), name)


@pytest.mark.parametrize("plus", PLUS)
def test_validation_files_take_the_place_of_a_presets(plus):
    for value, files in [
        ("x.jsonl", "x.jsonl"),
        ("[a, b]", ["a", "b"]),
        ("{a: f, b: [g, h]}", {"a": "f", "b": ["g", "h"]}),
        ("null", None),
    ]:
        assert composed("data=gsm8k", f"{plus}data.val_files={value}").data.val_files == files


@pytest.mark.parametrize("plus", PLUS)
def test_a_validation_set_is_added_to_a_presets_or_to_none(plus):
    assert list(composed("data=gsm8k", f"{plus}data.val_files.second=f.jsonl").data.val_files) == ["gsm8k", "second"]
    none = composed("data=files", "data.train_files=t", f"{plus}data.val_files.second=f.jsonl").data
    assert none.val_files == {"second": "f.jsonl"}
    given = composed("data=gsm8k", "data.val_files={a: f}", f"{plus}data.val_files.b=g").data
    assert given.val_files == {"a": "f", "b": "g"}


@pytest.mark.parametrize("plus", PLUS)
@pytest.mark.parametrize(
    "words",
    [
        ("reward.terms.len.fn=length", "reward.terms.len.weight=0.5", "reward.terms.len.kwargs.max_length=9"),
        ("reward.terms.len={fn: length, weight: 0.5, kwargs: {max_length: 9}}",),
        ("reward.terms={len: {fn: length, weight: 0.5}}", "reward.terms.len.kwargs={max_length: 9}"),
        ("reward.terms.len={fn: length}", "reward.terms.len.weight=0.5", "reward.terms.len.kwargs.max_length=9"),
    ],
    ids=["keys", "map", "map of terms", "both"],
)
def test_a_second_reward_term(plus, words):
    terms = composed(*(f"{plus}{word}" for word in words)).reward.terms
    assert list(terms) == ["accuracy", "len"]
    assert terms["len"] == RewardTermConfig(fn="length", weight=0.5, kwargs={"max_length": 9})


def test_a_presets_term_is_changed_or_left_out():
    terms = composed("reward.terms.accuracy.kwargs.x=1", "reward.terms.accuracy.weight=2").reward.terms
    assert terms == {"accuracy": RewardTermConfig(fn="exact_match", weight=2.0, kwargs={"x": 1})}
    assert list(composed("~reward.terms.accuracy", "reward.terms.len.fn=length").reward.terms) == ["len"]


def test_several_terms_whose_names_are_no_words():
    terms = composed(
        "reward.terms.a-1.fn=length", "reward.terms.b_2.fn=length", "reward.terms.a-1.weight=2"
    ).reward.terms
    assert list(terms) == ["accuracy", "a-1", "b_2"] and terms["a-1"].weight == 2


def test_other_words_and_flags_stay_as_they_are():
    words = [
        "-m",
        "algo=ppo",
        "--config-dir",
        "x",
        "~reward.terms.a",
        "hydra.run.dir=a[b",
        "actor.optim.lr=1",
        "",
        "a b",
    ]
    assert hydra_words(words) == words


def test_jobs_of_a_sweep_get_what_was_typed(tmp_path):
    jobs = launched(
        tmp_path,
        "-m",
        "data=gsm8k",
        "rollout.engine_kwargs.x=1,2",
        "reward.terms.len.fn=length",
        "reward.terms.len.weight=0.5",
        "+reward.terms.accuracy.kwargs.y=3",
        "data.val_files=[a,b],{c: d}",
    )
    assert [(job["engine_kwargs"]["x"], job["val_files"]) for job in jobs] == [
        (x, files) for x in (1, 2) for files in (["a", "b"], {"c": "d"})
    ]
    assert all(job["terms"] == {"accuracy": ["exact_match", 1, {"y": 3}], "len": ["length", 0.5, {}]} for job in jobs)


def test_what_hydra_saves_of_the_command_line_can_be_typed_again(tmp_path):
    words = [
        "rollout.engine_kwargs.x=1",
        "reward.terms.len={fn: length}",
        "data.val_files=[a,b]",
        "hydra.run.dir=first",
    ]
    before = launched(tmp_path, *words)
    saved = yaml.safe_load((tmp_path / "first/.hydra/overrides.yaml").read_text())
    assert launched(tmp_path, *saved, "hydra.run.dir=second") == before
    assert yaml.safe_load((tmp_path / "second/.hydra/overrides.yaml").read_text()) == saved


def test_words_meet_an_experiment_of_a_folder_of_ones_own(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "rollout:\n  engine_kwargs: {a: 1}\n"
        "reward:\n  terms:\n    style: {fn: length, weight: 0.1}\n"
        "data:\n  val_files: {mine: f.jsonl}\n"
    )
    (job,) = launched(
        tmp_path,
        "--config-dir",
        str(tmp_path),
        "experiment=mine",
        "rollout.engine_kwargs.b=2",
        "reward.terms.style.weight=0.2",
        "data.val_files={other: g.jsonl}",
    )
    assert job["engine_kwargs"] == {"a": 1, "b": 2} and job["val_files"] == {"other": "g.jsonl"}
    assert job["terms"]["style"] == ["length", 0.2, {}]


def test_the_plan_takes_the_same_words():
    run = read_run(["reward.terms.len.fn=length", "rollout.engine_kwargs.x=1", "data.val_files=[a,b]"])
    assert list(run.cfg.reward.terms) == ["accuracy", "len"] and run.cfg.data.val_files == ["a", "b"]
    assert run.cfg.rollout.engine_kwargs == {"x": 1}
