"""Activations: the formula against what autograd saves in the training engine."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rlpost.batch import Batch
from rlpost.tools.planning.activations import attention_bytes, kept_bytes, layer_bytes
from rlpost.tools.planning.shapes import SHAPES, shape_of
from rlpost.workers.config import ActorConfig, ModelConfig
from rlpost.workers.engine.fsdp import FSDPEngine

SEQUENCES, LENGTH = 4, 64
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "llama": LlamaConfig(**SMALL),
    "experts": Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
}


pytestmark = pytest.mark.usefixtures("process_group")


def saved_bytes(config, folder: Path, dtype: str, checkpointing: bool) -> int:
    """Bytes of all storages other than weights that the engine's forward pass keeps for its backward pass."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing)
    engine = FSDPEngine(
        str(folder),
        model,
        ActorConfig(dtype=dtype),
        vocab_size=config.vocab_size,
        temperature=1.0,
        tokenizer_path=str(folder),
    )
    total = SEQUENCES * LENGTH
    batch = Batch(torch.arange(0, total + 1, LENGTH), {"token_ids": torch.randint(0, config.vocab_size, (total,))})
    kept: dict[int, torch.UntypedStorage] = {}
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def loss(micro, output):  # the forward pass is over, and gathered weights are still there
        weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
        sizes.append(sum(storage.nbytes() for place, storage in kept.items() if place not in weights))
        return output.logprobs.sum(), {}

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.accumulate([batch], loss)
    return sizes[0]


@pytest.mark.parametrize("dtype, width", [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_kept_bytes_are_what_autograd_saves(tmp_path, kind, dtype, width):
    config = CONFIGS[kind]
    shape = shape_of(json.loads(config.to_json_string()), kind)
    predicted = SEQUENCES * LENGTH * kept_bytes(shape, width, "sdpa", checkpointing=False)
    assert predicted == pytest.approx(saved_bytes(config, tmp_path, dtype, False), rel=0.05)


@pytest.mark.parametrize("dtype, width", [("bfloat16", 2), ("float32", 4)])
def test_kept_bytes_with_checkpointing_are_the_inputs_of_the_layers(tmp_path, dtype, width):
    shape = shape_of(json.loads(CONFIGS["qwen3"].to_json_string()), "qwen3")
    predicted = SEQUENCES * LENGTH * kept_bytes(shape, width, "sdpa", checkpointing=True)
    tables = SEQUENCES * LENGTH * 2 * width * shape.head_dim  # arguments of a layer, which no hook sees
    assert predicted == pytest.approx(saved_bytes(CONFIGS["qwen3"], tmp_path, dtype, True) + tables, rel=0.1)


def test_a_layer_of_qwen3_by_hand():
    shape = SHAPES["qwen3-0.6b"]
    hidden, queries, keys, inner, heads = 1024, 2048, 1024, 3072, 16
    norms = 2 * (4 * hidden + 2 * hidden + 2 * hidden + 4) + 6 * (queries + keys) + 4 * (heads + 8)
    inside = 2 * (2 * queries + 2 * queries) + 4 * heads  # a key head for every query head
    assert layer_bytes(shape, 2, "repeated") == norms + inside + 8 * inner
    assert attention_bytes(shape, 2, "repeated") - attention_bytes(shape, 2, "grouped") == 4 * (queries - keys)
