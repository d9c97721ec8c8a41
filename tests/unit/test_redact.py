"""No secret is saved; what only looks like one stays."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlpost.config import folder_name
from rlpost.redact import redact, redact_files, redact_text

ROOT = Path(__file__).parents[2]
LAUNCH = "from rlpost.launch import launch; launch(lambda cfg, folder: {'finished': True})"


@pytest.mark.parametrize(
    "key", ["api_key", "apikey", "hf_token", "token", "WANDB_API_KEY", "_redis_password", "client_secret", "secret_key"]
)
def test_secrets_are_hidden_wherever_they_are(key):
    hidden = redact({"a": [{key: "abc"}], "b": {key: {"inner": "abc"}}, "c": [f"x.{key}=abc", f"{key}: 'a bc'"]})
    assert "abc" not in str(hidden) and "a bc" not in str(hidden) and key in str(hidden)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", 4),
        ("stop_token_ids", [1, 2]),
        ("eos_token", "<|end|>"),
        ("ppo_max_token_len_per_gpu", 5),
        ("tokenizer_path", "folder"),
        ("prompt_key", "question"),
        ("author", "me"),
        ("token", None),
        ("partition_key", "no"),
    ],
)
def test_other_keys_keep_their_values(key, value):
    assert redact({key: value}) == {key: value}
    assert redact_text(f"a.{key}={value}") == f"a.{key}={value}" or value is None


def test_passwords_in_addresses_are_hidden():
    assert redact({"mlflow_uri": "https://me:abc@host:5000/x"}) == {"mlflow_uri": "https://***@host:5000/x"}


def test_command_lines_and_folders_named_after_them_are_clean():
    line = "+tracking.wandb.api_key=abc,seed=2,rollout.engine_kwargs.hf_token='d ef'"
    assert redact_text(line) == "+tracking.wandb.api_key=***,seed=2,rollout.engine_kwargs.hf_token=***"
    assert "abc" not in folder_name(line) and "seed=2" in folder_name(line)


def test_folder_name_begins_with_what_is_not_lost_to_its_limit() -> None:
    line = "++data.val_files.x=task://a?b=1,+reward.terms={accuracy:{},len:{}},actor.dtype=float16,seed=2"
    assert folder_name(line) == "actor.dtype=float16,data.val_files.x=task_a_b=1,seed=2"


def test_files_are_rewritten_only_if_they_hold_a_secret(tmp_path):
    secret, plain = tmp_path / "secret.yaml", tmp_path / "plain.yaml"
    secret.write_text("a:\n  auth:\n    user: abc\n  path: ${a.b}\n")
    plain.write_text("a:   1 # as it was\n")
    redact_files([secret, plain, tmp_path / "none.yaml"])
    assert OmegaConf.to_container(OmegaConf.load(secret)) == {"a": {"auth": "***", "path": "${a.b}"}}
    assert plain.read_text() == "a:   1 # as it was\n"


@pytest.mark.parametrize("multirun", [False, True])
def test_nothing_that_a_command_saves_holds_a_secret(tmp_path, multirun):
    arguments = ["tracking=wandb", "tracking.wandb.api_key=abc123", "+cluster.ray_init_kwargs._redis_password=abc456"]
    arguments += [f"hydra.sweep.dir={tmp_path}/out", "-m"] if multirun else [f"hydra.run.dir={tmp_path}/out"]
    command = [sys.executable, "-c", LAUNCH, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    saved = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "overrides.yaml", "hydra.yaml"} <= {path.name for path in saved}
    assert not [path for path in saved if b"abc123" in path.read_bytes() or b"abc456" in path.read_bytes()]
    assert not [path for path in tmp_path.rglob("*") if "abc123" in path.name]
    (config, *_) = tmp_path.rglob("config.yaml")
    assert OmegaConf.load(config).tracking.wandb.api_key == "***" and OmegaConf.load(config).seed == 1
