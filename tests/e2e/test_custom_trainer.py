"""The example that composes workers into a trainer of its own."""

import ast
import asyncio
import importlib
from pathlib import Path

import pytest
import ray

from rlpost.platform import RAY_ENV

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_trainer" / "reinforce.py"


def test_example_is_short_and_does_without_rlpost_trainer():
    source = EXAMPLE.read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert len(source.splitlines()) < 80
    assert not any(module.startswith("rlpost.trainer") for module in imported)


@pytest.fixture
def local_ray():
    env = RAY_ENV | {"PYTHONPATH": f"{ROOT}:{EXAMPLE.parent}", "OMP_NUM_THREADS": "1"}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    yield
    ray.shutdown()


def test_reward_of_the_example_rises(local_ray, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    rewards = asyncio.run(importlib.import_module("reinforce").train(steps=16))
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4, rewards
