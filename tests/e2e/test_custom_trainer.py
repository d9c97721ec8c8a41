"""The example that composes workers into a trainer of its own."""

import ast
import asyncio
import importlib

from tests import tiny

EXAMPLE = tiny.ROOT / "examples" / "custom_trainer" / "reinforce.py"


def test_example_is_short_and_does_without_rlpost_trainer():
    source = EXAMPLE.read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert len(source.splitlines()) < 80
    assert not any(module.startswith("rlpost.trainer") for module in imported)


def test_reward_of_the_example_rises(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    with tiny.local_ray(EXAMPLE.parent):
        rewards = asyncio.run(importlib.import_module("reinforce").train(steps=16))
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4, rewards
