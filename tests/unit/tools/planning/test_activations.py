"""Activations: the formula against what autograd saves in the trainer's own root module."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rlpost.tools.planning.activations import attention_bytes, kept_bytes, layer_bytes
from rlpost.tools.planning.shapes import SHAPES, shape_of
from rlpost.workers.engine import attention, head
from rlpost.workers.engine.packed_model import PackedModel

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


def saved_bytes(config, dtype: torch.dtype, checkpointing: bool) -> int:
    """Bytes of all storages other than weights that a forward pass over whole sequences keeps for the backward pass."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register("sdpa")).to(dtype)
    packed = PackedModel(model, config.vocab_size).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    total = SEQUENCES * LENGTH
    cu_seqlens = torch.arange(0, total + 1, LENGTH)
    token_ids = torch.randint(0, config.vocab_size, (total,))
    weights = {parameter.untyped_storage().data_ptr() for parameter in packed.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        packed(
            token_ids,
            torch.arange(LENGTH).repeat(SEQUENCES),
            attention.Packing(cu_seqlens.int(), (LENGTH,) * SEQUENCES),
            head.next_tokens(token_ids),
            head.predicts(cu_seqlens, None, total),
            1.0,
            True,
        )
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_kept_bytes_are_what_autograd_saves(kind, dtype):
    config = CONFIGS[kind]
    shape = shape_of(json.loads(config.to_json_string()), kind)
    predicted = SEQUENCES * LENGTH * kept_bytes(shape, dtype.itemsize, "sdpa", checkpointing=False)
    assert predicted == pytest.approx(saved_bytes(config, dtype, False), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kept_bytes_with_checkpointing_are_the_inputs_of_the_layers(dtype):
    shape = shape_of(json.loads(CONFIGS["qwen3"].to_json_string()), "qwen3")
    predicted = SEQUENCES * LENGTH * kept_bytes(shape, dtype.itemsize, "sdpa", checkpointing=True)
    tables = SEQUENCES * LENGTH * 2 * dtype.itemsize * shape.head_dim  # arguments of a layer, which no hook sees
    assert predicted == pytest.approx(saved_bytes(CONFIGS["qwen3"], dtype, True) + tables, rel=0.1)


def test_a_layer_of_qwen3_by_hand():
    shape = SHAPES["qwen3-0.6b"]
    hidden, queries, keys, inner, heads = 1024, 2048, 1024, 3072, 16
    norms = 2 * (4 * hidden + 2 * hidden + 2 * hidden + 4) + 6 * (queries + keys) + 4 * (heads + 8)
    inside = 2 * (2 * queries + 2 * queries) + 4 * heads  # a key head for every query head
    assert layer_bytes(shape, 2, "repeated") == norms + inside + 8 * inner
    assert attention_bytes(shape, 2, "repeated") - attention_bytes(shape, 2, "grouped") == 4 * (queries - keys)
