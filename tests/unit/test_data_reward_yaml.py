"""Every preset of the groups `data` and `reward` composes, and what it names exists."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlpost.config import CONFIG_DIR, register
from rlpost.data_adapters import get_adapter
from rlpost.data_config import DataConfig
from rlpost.data_sources import read_source
from rlpost.rewards.config import RewardConfig
from rlpost.rewards.scorer import RewardScorer

PRESET_NEEDS = {  # what a preset leaves to the user; "code" is also to be built on hosts without the sandbox
    "model": ["reward.reward_model.path=x"],
    "code": ["reward.sandbox=limits"],
}


def presets(group: str) -> list[str]:
    return sorted(path.stem for path in (Path(CONFIG_DIR) / group).glob("*.yaml"))


def load(group: str, name: str, *overrides: str) -> DataConfig | RewardConfig:
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return OmegaConf.to_object(compose(f"{group}/{name}", overrides=list(overrides))[group])


@pytest.mark.parametrize("name", presets("data"))
def test_data_preset_composes(name: str) -> None:
    cfg = load("data", name, *(["data.train_files=x.jsonl"] if name == "files" else []))
    assert isinstance(cfg, DataConfig)
    get_adapter(cfg)
    files = [cfg.train_files] if isinstance(cfg.train_files, str) else cfg.train_files
    for uri in [*files, *(cfg.val_files or {}).values()]:
        if uri.startswith(("task://", "reasoning-gym://")):
            assert read_source(uri, "data.train_files").rows


@pytest.mark.parametrize("name", presets("reward"))
def test_reward_preset_builds_a_scorer(name: str) -> None:
    cfg = load("reward", name, *PRESET_NEEDS.get(name, []))
    assert isinstance(cfg, RewardConfig)

    async def served(inputs: list) -> list[float]:
        return [0.0] * len(inputs)

    RewardScorer(cfg, 16, reward_model=served).close()
    assert name == "model" or list(cfg.terms) == ["accuracy"]


def test_addition_preset_fits_its_length_limits() -> None:
    cfg = load("data", "addition")
    assert isinstance(cfg, DataConfig)
    sources = [read_source(uri, "data") for uri in (cfg.train_files, cfg.val_files["addition"])]
    rows = [row.columns for source in sources for row in source.rows]
    assert max(len(row["prompt"]) for row in rows) <= cfg.max_prompt_length
    assert max(len(row["ground_truth"]) for row in rows) + 1 <= cfg.max_response_length
    assert len(sources[1].rows) == 200
