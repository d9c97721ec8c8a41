"""Qwen3's shapes with random weights, for every benchmark that wants a model of some size."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3Config

VOCABULARY = 151_936  # rows of Qwen3's embedding


def _shape(hidden: int, intermediate: int, layers: int, heads: int, tied: bool = True) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
    }


QWEN3 = {
    "tiny": _shape(64, 96, 2, 8) | {"num_key_value_heads": 4, "head_dim": 32},  # for CPUs, and for what hosts cost
    "0.6b": _shape(1024, 3072, 28, 16),
    "1.7b": _shape(2048, 6144, 28, 16),
    "8b": _shape(4096, 12288, 36, 32, tied=False),
}


def config(shape: str, **changes: Any) -> "Qwen3Config":
    """transformers' config of a shape of `QWEN3`, with fields in place of its own."""
    from transformers import Qwen3Config

    return Qwen3Config(**{"vocab_size": VOCABULARY, "max_position_embeddings": 40_960} | QWEN3[shape] | changes)


def write(wanted: "Qwen3Config", folder: Path, stop_token_ids: list[int] | None = None, seed: int = 0) -> int:
    """Random weights in bfloat16, made on the device; returns the number of parameters.

    Args:
        wanted: of the model.
        folder: where it is written.
        stop_token_ids: for the generation config; None for what follows from `wanted`.
        seed: of the weights.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from rlpost.platform import platform

    here = platform()
    torch.manual_seed(seed)
    with here.device():
        model = Qwen3ForCausalLM(wanted)
    model.to(torch.bfloat16)
    if stop_token_ids is not None:
        model.generation_config.eos_token_id = stop_token_ids or None
    model.save_pretrained(str(folder))
    count = model.num_parameters()
    del model
    here.empty_cache()
    return count
