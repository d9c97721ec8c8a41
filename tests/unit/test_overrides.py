"""What the user stated, as against what the config comes to: sweeps, experiments, commands in the documentation."""

import re
import shlex
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from rlpost.config import CONFIG_DIR, all_keys, register, typed_and_problems
from rlpost.overrides import check_overrides, check_stated, compose, experiment_keys, judge, stated_keys

ROOT = CONFIG_DIR.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]


@pytest.fixture(autouse=True)
def registered():
    register()


def commands():
    """Overrides of each command that documentation shows."""
    found = {}
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^\S*python -m rlpost\.(?:main|tools\.check|tools\.evaluate) (.*)$", text, re.M):
            words = shlex.split(line, comments=True)
            if not any("..." in word for word in words):
                found[f"{page.name}: {' '.join(words)}"] = [word for word in words if word != "-m"]
    return found


@pytest.mark.parametrize("overrides", commands().values(), ids=list(commands()))
def test_commands_in_the_documentation_are_right(overrides):
    assert check_overrides(overrides) is None


def test_commands_were_found():
    assert len(commands()) >= 10


def test_a_key_that_one_job_of_a_sweep_reads_is_no_mistake():
    assert check_overrides(["algo=grpo,ppo", "critic.optim.lr=1e-5"]) is None
    assert check_overrides(["algo=ppo,grpo", "critic.optim.lr=1e-5,1e-4"]) is None
    message = check_overrides(["algo=grpo,rloo", "critic.optim.lr=1e-5"])
    assert message is not None and "critic.optim.lr=1e-05 would have no effect" in message


def test_overrides_that_fit_alone_but_not_together_are_refused_without_a_trace():
    assert "val_files" in (check_overrides(["data.val_files=x.jsonl", "data.val_files.more=y.jsonl"]) or "")


def test_null_and_choices_state_nothing():
    stated = stated_keys(
        ["algo=ppo", "ref.path=null", "hydra.run.dir=x", "~data.val_files.a", "+a.b={c: {d: 1}, e: '2'}"]
    )
    assert stated == {"a.b.c.d": 1, "a.b.e": "2"}


def test_values_of_free_form_maps_are_read():
    assert check_overrides(["+rollout.engine_kwargs.kv_cache_dtype=fp8", "+data.val_files.more=x.jsonl"]) is None


@pytest.mark.parametrize("choice", ["algo=schema", "trainer=async_schema"])
def test_schemas_are_no_choices(choice):
    assert check_overrides([choice]) == f"{choice}: what the other choices are made of, and none itself; see --help"


def test_the_experiments_that_come_along_need_no_remark():
    cfg, runtime = compose(["experiment=quickstart"])
    assert judge(typed_and_problems(cfg)[0], runtime, ["experiment=quickstart"]).remarks == []


def judged(tmp_path, experiment, *overrides):
    """The verdict on a run with `experiment` as its file."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{experiment}")
    values = OmegaConf.to_container(OmegaConf.create(experiment))
    flat = [f"{section}.{key}={value}" for section, keys in values.items() for key, value in keys.items()]
    cfg, _ = typed_and_problems(compose([*flat, *overrides])[0])
    sources = [SimpleNamespace(path=str(tmp_path), schema="file"), SimpleNamespace(path="x", schema="pkg")]
    return judge(cfg, SimpleNamespace(choices={"experiment": "mine"}, config_sources=sources), list(overrides))


def test_an_experiment_may_set_what_another_algorithm_would_read(tmp_path):
    verdict = judged(tmp_path, "critic:\n  ppo_epochs: 2\n  grad_clip: 3.0\n")
    assert not verdict.problems and not verdict.unread
    assert verdict.remarks == [
        "experiment=mine also sets critic.ppo_epochs, critic.grad_clip, which is for a critic",
    ]


def test_an_experiment_that_contradicts_itself_is_refused(tmp_path):
    verdict = judged(tmp_path, "algo:\n  use_kl_loss: false\n  kl_loss_coef: 0.1\n")
    assert len(verdict.problems) == 1 and not verdict.remarks
    assert verdict.problems[0].startswith("experiment=mine: algo.kl_loss_coef=0.1 would have no effect")


def test_what_the_command_line_overrules_is_not_the_experiments_mistake(tmp_path):
    verdict = judged(tmp_path, "algo:\n  use_kl_loss: true\n  kl_loss_coef: 0.1\n", "algo.use_kl_loss=false")
    assert not verdict.problems and "algo.kl_loss_coef" in verdict.remarks[0]


@pytest.mark.parametrize("path", sorted((CONFIG_DIR / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_experiments_do_not_contradict_themselves_with_any_algorithm(path):
    free_form = ("data.val_files.", "reward.terms.")
    assert all(key in all_keys() or key.startswith(free_form) for key in experiment_keys(path))
    for algo in ("grpo", "ppo", "dapo"):
        assert check_overrides([f"experiment={path.stem}", f"algo={algo}"]) is None


def hydra_cfg(mode, *overrides):
    runtime = SimpleNamespace(choices={}, config_sources=[])
    return SimpleNamespace(runtime=runtime, overrides=SimpleNamespace(task=list(overrides)), mode=mode)


def test_a_job_is_held_to_its_command_line_unless_it_is_one_of_a_sweep():
    from hydra.types import RunMode

    cfg, _ = typed_and_problems(compose(["critic.ppo_epochs=2"])[0])
    with pytest.raises(ValueError, match="critic.ppo_epochs=2 would have no effect"):
        check_stated(cfg, hydra_cfg(RunMode.RUN, "critic.ppo_epochs=2"))
    check_stated(cfg, hydra_cfg(RunMode.MULTIRUN, "critic.ppo_epochs=2"))


def test_numbers_far_out_of_range_are_refused_or_fine_but_never_a_crash():
    """Rules between sections see values that their sections refuse."""
    for value in ("0", "-3", "1000000"):
        for base in (["algo=ppo"], ["trainer=fully_async"]):
            cfg, _ = compose(base)
            for key in all_keys():
                if type(OmegaConf.select(cfg, key)) in (int, float):
                    OmegaConf.update(cfg, key, float(value) if isinstance(OmegaConf.select(cfg, key), float) else value)
            _, problems = typed_and_problems(cfg)
            assert problems


def test_words_that_cannot_be_read_are_named_beside_what_else_is_wrong():
    address = "hf://openai/gsm8k?config=main&split=train"
    told = check_overrides([f"data.train_files={address}", "rollout.n = 4", "rollout", "algo.adv_estimatr=grpo"])
    assert told is not None
    lines = told.splitlines()
    assert lines[0].startswith(f"data.train_files={address}: ") and lines[0].endswith(
        f"""'data.train_files="{address}"'"""
    )
    assert all(line.endswith("write key=value, without spaces around the =") for line in lines[1:3])
    assert lines[1].startswith("rollout.n = 4: ") and lines[2].startswith("rollout: ")
    assert lines[-1].endswith("did you mean 'algo.adv_estimator'?")
    assert check_overrides([f'data.train_files="{address}"', "data=files"]) is None
