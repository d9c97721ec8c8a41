"""What an engine process starts with off ROCm; on it, `tests/unit/test_rocm_golden.py` shows everything."""

import pytest

from rlpost.platform import Platform
from rlpost.workers.config import AiterKernelsConfig, RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.setup import engine_setup, with_families

MODEL = ModelInfo(
    path="", tokenizer_path="", vocab_size=1, embedding_size=1, stop_token_ids=(), max_position_embeddings=1
)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["vllm", "sglang", "hf"])
def test_aiter_is_off_and_unmentioned_off_rocm(kind, name):
    setup = engine_setup(RolloutConfig(name=name), MODEL, Platform(kind), {"VLLM_ROCM_USE_AITER": "1"})
    assert setup.cfg.aiter == "off" and not setup.cfg.aiter_kernels.set_to("on")
    assert setup.env == Platform(kind).engine_env(name) and not [key for key in setup.env if "AITER" in key]
    assert setup.warnings == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aiter": "on"}, "rollout.aiter=on with rollout=vllm on cuda: AITER is for vllm and sglang under ROCm"),
        ({"aiter_kernels": AiterKernelsConfig(moe="on")}, "rollout.aiter_kernels.moe=on with rollout=vllm on cuda"),
    ],
)
def test_aiter_by_name_is_refused_off_rocm(changes, message):
    with pytest.raises(ValueError, match=message):
        engine_setup(RolloutConfig(**changes), MODEL, Platform("cuda"), {})


def test_with_families_states_every_switch():
    cfg = with_families(RolloutConfig(), frozenset({"moe", "rope"}))
    assert cfg.aiter == "on"
    assert cfg.aiter_kernels == AiterKernelsConfig(
        attention="off", rmsnorm="off", rope="on", moe="on", linear="off", quantization="off"
    )
    assert with_families(cfg, frozenset()).aiter == "off"


def test_setup_that_was_decided_once_is_decided_alike_again():
    """As in a restart of the engines, whose config has every switch at on or off."""
    here = Platform("rocm", "gfx942", (7, 2), has_aiter=True)
    first = engine_setup(RolloutConfig(dtype="float32"), MODEL, here, {})
    assert first.cfg.aiter_kernels.attention == "off" and first.cfg.aiter_kernels.moe == "on"
    again = engine_setup(first.cfg, MODEL, here, {})
    assert again.cfg == first.cfg and again.env == first.env
