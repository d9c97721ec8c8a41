"""`rlpost.tools.check` on real engines: silent when all is well, and planted faults are caught and named."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file, save_file

from rlpost.config import CONFIG_DIR, Config, register, to_object
from rlpost.launch import FAILED
from rlpost.tools import check
from rlpost.trainer import build
from tests.e2e.runs import Run, small

MODULE = "rlpost.tools.check"
ENGINE, CLOSE = ("vllm", 1e-4) if importlib.util.find_spec("vllm") else ("hf", 1e-5)


def means(summary) -> dict[str, float]:
    return {stage["name"]: stage["parity"]["mean"] for stage in summary["stages"]}


def test_healthy_engine_passes_and_the_planted_stale_weight_is_noticed(checkpoint, tmp_path):
    command = Run(tmp_path, *small(checkpoint, f"rollout={ENGINE}"), module=MODULE)
    summary = command.succeed()
    assert summary["passed"] and summary["engine"] == ENGINE and summary["cause"] == "" and summary["variants"] == []
    differences = means(summary)
    assert differences.pop("weights changed, not synced") > max(summary["limit"], 0.01)
    assert len(differences) == 4 and max(differences.values()) < CLOSE
    stale = next(stage for stage in summary["stages"] if not stage["expected"])
    assert stale["cause"].startswith("stale weights: after pushing the weights again")
    assert all(sum(stage["histogram"]) == stage["parity"]["num_tokens"] > 50 for stage in summary["stages"])
    assert json.loads((command.folder / "check.json").read_text()) == summary
    assert "engine and trainer agree" in command.stderr
    assert command.left_behind() == []


def test_coarser_engine_is_narrowed_down_to_precision(checkpoint, tmp_path):
    command = Run(
        tmp_path, *small(checkpoint, "rollout.dtype=bfloat16", "trainer.logprob_diff_limit=1e-4"), module=MODULE
    )
    assert command.wait() == FAILED
    summary = json.loads(command.stdout.splitlines()[-1])
    assert not summary["passed"]
    assert summary["cause"].startswith("precision: with rollout.dtype=float32 actor.dtype=float32")
    assert [(t["variant"]["name"], t["agrees"]) for t in summary["variants"]] == [("precision", True)]
    assert "cause: precision" in command.stderr


@pytest.fixture
def planted(local_ray, checkpoint, tmp_path, monkeypatch):
    """`check` in this process, where faults can be planted."""
    monkeypatch.setattr(build, "start_ray", lambda cfg: lambda: None)
    register()

    def run(*overrides: str) -> dict:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            cfg = hydra.compose("config", small(checkpoint, *overrides))
        GlobalHydra.instance().clear()
        return check.execute(to_object(cfg), tmp_path)

    return run


def test_wrong_temperature_in_the_engine_is_named(planted, monkeypatch):
    prepare = build.prepare

    def hotter(cfg: Config) -> build.Facts:
        facts = prepare(cfg)
        return dataclasses.replace(facts, spec=dataclasses.replace(facts.spec, temperature=0.7))

    monkeypatch.setattr(build, "prepare", hotter)
    summary = planted()
    assert not summary["passed"] and summary["variants"] == []
    assert summary["cause"].startswith("sampling settings: with temperature 0.7 in the trainer")


def test_other_weights_in_the_engines_checkpoint_are_named(planted, checkpoint, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoint.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    build_pool = build.build_pool

    async def from_other(cfg, facts, *rest):
        model = dataclasses.replace(facts.model, path=str(Path(other)))
        return await build_pool(cfg, dataclasses.replace(facts, model=model), *rest)

    monkeypatch.setattr(build, "build_pool", from_other)
    summary = planted()
    assert [stage["name"] for stage in summary["stages"] if not stage["passed"]] == ["as loaded"]
    assert summary["cause"].startswith("the engine loaded other weights than the trainer")
    assert summary["variants"] == []
