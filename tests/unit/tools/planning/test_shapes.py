"""Shapes: what they count is what transformers builds."""

import json

import pytest
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rlpost.tools.planning.shapes import SHAPES, known_shape, read_shape, shape_of

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
    "qwen3 tied": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL | {"head_dim": 8}),
    "llama": LlamaConfig(**SMALL),
    "experts": Qwen3MoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24),
}


def parameters_of(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(config):
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_shape_of_a_config_counts_what_transformers_builds(kind):
    config = CONFIGS[kind]
    assert shape_of(json.loads(config.to_json_string()), kind).parameters == parameters_of(on_meta(config))


def test_active_parameters_of_experts_are_those_that_a_token_meets():
    shape = shape_of(json.loads(CONFIGS["experts"].to_json_string()), "experts")
    attention = 32 * (64 + 2 * 32) + 64 * 32
    assert shape.active_parameters == 3 * (attention + 32 * 6 + 2 * 3 * 32 * 24) + 96 * 32
    assert shape.layer_matmul == shape.active_parameters - 96 * 32


def test_table_counts_published_sizes():
    assert SHAPES["qwen3-8b"].parameters == 8_190_735_360
    assert SHAPES["qwen2.5-7b"].parameters == 7_615_616_512
    assert SHAPES["qwen3-0.6b"].parameters == 596_049_920
    assert SHAPES["smollm2-135m"].parameters == 134_515_008
    assert SHAPES["qwen3-30b-a3b"].parameters == 30_532_122_624
    assert SHAPES["llama-3.1-8b"].parameters == 8_030_261_248
    assert SHAPES["llama-3.2-1b"].parameters == 1_235_814_400


def test_table_entry_of_linear_attention_with_vision_is_what_transformers_builds():
    config = transformers.Qwen3_5MoeConfig()
    with init_empty_weights():
        model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    entry, read = SHAPES["qwen3.5-35b-a3b"], shape_of(json.loads(config.to_json_string()), "folder")
    assert entry.parameters == parameters_of(model)
    assert read.parameters == entry.parameters - entry.other_parameters
    assert (read.linear_layers, read.softmax_layers) == (30, 10)


@pytest.mark.parametrize(
    "model, entry",
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"),
        ("/models/Qwen2.5-Coder-1.5B-Instruct/", "qwen2.5-1.5b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ],
)
def test_hub_ids_and_folders_find_their_entry(model, entry):
    assert known_shape(model) is SHAPES[entry]


def test_a_folder_goes_before_the_table(tmp_path):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIGS["qwen3"].to_json_string())
    assert read_shape(str(folder)).hidden == 32


def test_unknown_models_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="Qwen3-9B: neither a folder .*'qwen3-8b'.*shape=NAME"):
        read_shape("Qwen/Qwen3-9B")
    with pytest.raises(ValueError, match="has no hidden_size"):
        shape_of({"model_type": "gpt2"}, "gpt2")
    with pytest.raises(ValueError, match="latent attention"):
        shape_of({"kv_lora_rank": 512}, "deepseek")
