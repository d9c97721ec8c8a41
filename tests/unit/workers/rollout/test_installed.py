"""An engine that is not installed, or too old, is refused with the extra to install and what it lacks."""

import importlib.util
import sys
from types import ModuleType

import pytest

from rlpost.workers.rollout.installed import PACKAGES, Package, require_installed, require_offered


@pytest.fixture
def old_engine(monkeypatch):
    """A package `old_engine` 0.1 with a class that has one method."""
    module = ModuleType("old_engine")
    module.__version__ = "0.1"
    module.Engine = type("Engine", (), {"generate": None})
    monkeypatch.setitem(sys.modules, "old_engine", module)
    monkeypatch.setitem(PACKAGES, "old", Package(module="old_engine", title="Old", install="pip install 'rlpost[old]'"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_that_is_not_installed_names_its_extra(engine, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"rollout={engine}: .* is not installed: pip install 'rlpost\[{engine}\]'"):
        require_installed(engine)


def test_engine_without_a_package_of_its_own_needs_none(monkeypatch):
    looked_for = []
    monkeypatch.setattr(importlib.util, "find_spec", looked_for.append)
    require_installed("hf")
    assert looked_for == []


def test_engine_that_lacks_something_says_what_was_asked_for(old_engine):
    require_offered("old", ["old_engine:Engine.generate"])
    with pytest.raises(ValueError) as error:
        require_offered("old", ["old_engine:Engine.generate", "old_engine:Engine.update", "old_engine.more:f"])
    assert "Old 0.1 lacks old_engine:Engine.update, old_engine.more:f" in str(error.value)
    assert "pip install 'rlpost[old]'" in str(error.value)


def test_installed_vllm_offers_what_the_adapter_calls():
    pytest.importorskip("vllm")
    from rlpost.workers.rollout import vllm

    with pytest.raises(ValueError, match="lacks vllm:made_up, which"):  # and nothing else
        require_offered("vllm", [*vllm._OFFERED, "vllm:made_up"])
