"""Mistakes of the user: the exit status says whose fault it is, a message names key, row or file, and nothing hangs."""

import importlib.util
import json
import shutil
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from rlpost.config import CONFIG_DIR, register
from rlpost.launch import CONFIG_ERROR, FAILED, run
from tests.e2e.runs import Run, small

CHAT = {"prompt": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}
PLAIN = {"prompt": "1+1=", "ground_truth": "2"}


@pytest.fixture
def attempt(tmp_path, monkeypatch, capsys):
    """Run overrides in this process, as `rlpost.main` does once its command line composes; Ray must not start."""
    from rlpost.trainer import build

    def refuse(cfg):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(build, "start_ray", refuse)
    register()

    def attempt(*overrides: str) -> str:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            cfg = hydra.compose("config", list(overrides))
        GlobalHydra.instance().clear()
        assert run(cfg, tmp_path, build.execute) == CONFIG_ERROR
        message = capsys.readouterr().err
        assert message.startswith("rlpost: ") and "Traceback" not in message
        return message

    return attempt


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_command_line_that_cannot_work_is_refused_before_anything_starts(checkpoint, tmp_path):
    command = Run(tmp_path, *small(checkpoint, "rollout.n=1", "actor.ppo_mini_batch_size=8"))
    assert command.wait() == CONFIG_ERROR
    for part in ("rollout.n=1", "algo.adv_estimator=grpo", "actor.ppo_mini_batch_size=8", "data.train_batch_size=4"):
        assert part in command.stderr
    assert "Traceback" not in command.stderr and not command.folder.exists()


def test_missing_model_exits_2_with_one_message(checkpoint, tmp_path):
    command = Run(tmp_path, *small(tmp_path / "nowhere"))
    assert command.wait() == CONFIG_ERROR
    assert command.stderr.startswith(f"rlpost: model.path={tmp_path}/nowhere: no such folder")
    assert "Traceback" not in command.stderr


def test_folder_that_is_no_checkpoint(attempt, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in attempt(*small(tmp_path / "empty"))


def test_checkpoint_without_tokenizer(attempt, checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    message = attempt(*small(tmp_path))
    assert f"model.path={tmp_path}" in message and "tokenizer" in message and "model.tokenizer_path" in message


def test_checkpoint_with_a_broken_config(attempt, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    message = attempt(*small(tmp_path / "model"))
    assert f"model.path={tmp_path}/model" in message and "config.json" in message


@pytest.mark.parametrize(
    ("rows", "changes", "parts"),
    [
        ([], [], ["data.train_files", "{file}"]),
        ([PLAIN, '{"prompt": "1+'], [], ["data.train_files={file}", "line 2 is not valid JSON"]),
        ([PLAIN, {"question": "1+1="}], [], ["{file}:2", "prompt"]),
        ([PLAIN, CHAT], [], ["{file}:2", "no chat template", "model.chat_template", "data.apply_chat_template=false"]),
        ([PLAIN], ["data.max_prompt_length=2"], ["data.max_prompt_length=2", "data.train_files", "4 tokens"]),
        (
            [PLAIN, PLAIN | {"prompt": "1+1+1+1+1+1="}],
            ["data.filter_overlong_prompts=false"],
            ["{file}:2", "12 tokens", "data.max_prompt_length=8"],
        ),
    ],
    ids=["empty", "malformed", "no-prompt", "no-template", "all-too-long", "one-too-long"],
)
def test_data_that_cannot_be_used(rows, changes, parts, attempt, checkpoint, tmp_path):
    file = write(tmp_path / "train.jsonl", *rows)
    message = attempt(*small(checkpoint, f"data.train_files={file}", *changes))
    for part in parts:
        assert part.format(file=file) in message


def test_missing_data_file(attempt, checkpoint, tmp_path):
    message = attempt(*small(checkpoint, f"data.train_files={tmp_path}/train.jsonl"))
    assert "data.train_files" in message and f"{tmp_path}/train.jsonl" in message


def test_reward_that_does_not_import(attempt, checkpoint):
    message = attempt(*small(checkpoint, "reward.terms.accuracy.fn=my_rewards.score"))
    assert "reward.terms.accuracy.fn=my_rewards.score" in message and "PYTHONPATH" in message


def test_reward_that_the_module_lacks_names_a_near_one(attempt, checkpoint):
    message = attempt(*small(checkpoint, "reward.terms.accuracy.fn=tests.e2e.rewards.paritty"))
    assert "did you mean 'parity'" in message


def test_unknown_reward_workflow_engine_and_estimator_name_near_ones(attempt, checkpoint):
    assert "did you mean 'exact_match'" in attempt(*small(checkpoint, "reward.terms.accuracy.fn=exact_mach"))
    assert "did you mean 'single_turn'" in attempt(*small(checkpoint, "rollout.workflow=single_turns"))
    assert "vllm" in attempt(*small(checkpoint, "rollout.name=vlm"))
    assert "algo.adv_estimator=grppo" in attempt(*small(checkpoint, "algo.adv_estimator=grppo"))


def test_engine_that_is_not_installed_names_its_extra_before_anything_starts(attempt, checkpoint, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'rlpost[vllm]'" in attempt(*small(checkpoint, "rollout=vllm"))


def test_resume_from_a_wrong_path(attempt, checkpoint, tmp_path):
    message = attempt(*small(checkpoint, f"trainer.resume={tmp_path}"))
    assert f"trainer.resume={tmp_path}" in message and "manifest.json" in message


def test_engine_that_does_not_start_says_why(checkpoint, tmp_path):
    pytest.importorskip("vllm")
    command = Run(tmp_path, *small(checkpoint, "rollout=vllm", "+rollout.engine_kwargs.kv_cache_dtype=int3"))
    assert command.wait() == FAILED
    ours = command.stderr[command.stderr.rindex("rlpost: ") :]
    for part in ("vLLM did not start", "cache_dtype", "'int3'"):
        assert part in ours
    assert "Traceback" in (command.folder / "error.txt").read_text()
    assert command.left_behind() == []
