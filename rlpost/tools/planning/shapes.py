"""Shapes of language models: a table of public configs by name, a checkpoint's config.json, and what they count."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.registry import near


@dataclass(slots=True, frozen=True, kw_only=True)
class Shape:
    """A decoder of identical layers; some may have linear attention in place of softmax attention.

    Attributes:
        intermediate: of the dense MLP; 0 where all layers have experts.
        qk_norm, qkv_bias, output_gate: whether attention has them.
        experts, experts_per_token, expert_intermediate, shared_intermediate: of mixture of experts; 0 without.
        linear_layers: how many of `layers` have linear attention (Gated DeltaNet), with
        linear_heads, linear_key_size, linear_value_size: value heads; all key heads' and all value heads' numbers.
        other_parameters: of parts that no text token passes, such as a vision tower.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    output_gate: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    linear_layers: int = 0
    linear_heads: int = 0
    linear_key_size: int = 0
    linear_value_size: int = 0
    other_parameters: int = 0

    @property
    def query_size(self) -> int:
        """Numbers of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers of all key heads of a token."""
        return self.kv_heads * self.head_dim

    @property
    def softmax_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.layers - self.linear_layers

    @property
    def attention_matrices(self) -> int:
        """Weights of the projections of softmax attention."""
        queries = self.query_size * (2 if self.output_gate else 1)
        return self.hidden * (queries + 2 * self.key_size + self.query_size)

    @property
    def linear_matrices(self) -> int:
        """Weights of the projections of linear attention."""
        return self.hidden * (2 * self.linear_key_size + 3 * self.linear_value_size + 2 * self.linear_heads)

    @property
    def expert_matrices(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def common_mlp_matrices(self) -> int:
        """Weights of the MLP that every token passes: dense or shared expert, router, the shared expert's gate."""
        shared = 3 * self.hidden * self.shared_intermediate + (self.hidden if self.shared_intermediate else 0)
        return 3 * self.hidden * self.intermediate + shared + self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        """Of one layer with softmax attention."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        bias = self.query_size + 2 * self.key_size if self.qkv_bias else 0
        return self.attention_matrices + norms + bias + self.common_mlp_matrices + self.experts * self.expert_matrices

    @property
    def root_parameters(self) -> int:
        """Embedding, output embedding unless tied, and the last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        instead = 0
        if self.linear_layers:  # short convolution over q, k and v; decay and its bias; a norm of one head
            conv = 4 * (2 * self.linear_key_size + self.linear_value_size)
            linear = self.linear_matrices + conv + 2 * self.linear_heads + self.linear_value_size // self.linear_heads
            softmax = self.attention_matrices + (2 * self.head_dim if self.qk_norm else 0)
            instead = self.linear_layers * (linear - softmax)
        return self.layers * self.layer_parameters + instead + self.root_parameters + self.other_parameters

    @property
    def layer_matmul(self) -> int:
        """Weights of all layers that one token is multiplied with."""
        attention = self.softmax_layers * self.attention_matrices + self.linear_layers * self.linear_matrices
        return attention + self.layers * (self.common_mlp_matrices + self.experts_per_token * self.expert_matrices)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with, the output embedding included."""
        return self.layer_matmul + self.vocab * self.hidden

    @property
    def largest_parameter(self) -> int:
        """Numbers of the largest tensor: an embedding, or all experts of a layer."""
        return max(self.vocab * self.hidden, self.experts * 2 * self.hidden * self.expert_intermediate)

    @property
    def linear_layer_numbers(self) -> int:
        """Numbers kept by one sequence in a layer of linear attention."""
        return self.linear_key_size * self.linear_value_size // max(1, self.linear_heads)


def _qwen3(name: str, hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> Shape:
    return Shape(
        name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128,
        intermediate=intermediate, vocab=151_936, tied=tied, qk_norm=True,
    )  # fmt: skip


def _qwen2(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool) -> Shape:
    return Shape(
        name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads,
        intermediate=intermediate, vocab=151_936 if tied else 152_064, tied=tied, qkv_bias=True,
    )  # fmt: skip


def _llama(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool):
    return Shape(
        name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads,
        intermediate=intermediate, vocab=vocab, tied=tied,
    )  # fmt: skip


VISION_PARAMETERS = 453_650_672  # of Qwen3.5-35B-A3B

SHAPES = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-0.6b", 1024, 3072, 28, 16, True),
        _qwen3("qwen3-1.7b", 2048, 6144, 28, 16, True),
        _qwen3("qwen3-4b", 2560, 9728, 36, 32, True),
        _qwen3("qwen3-8b", 4096, 12288, 36, 32, False),
        _qwen3("qwen3-14b", 5120, 17408, 40, 40, False),
        _qwen3("qwen3-32b", 5120, 25600, 64, 64, False),
        _qwen2("qwen2.5-0.5b", 896, 4864, 24, 14, 2, True),
        _qwen2("qwen2.5-1.5b", 1536, 8960, 28, 12, 2, True),
        _qwen2("qwen2.5-3b", 2048, 11008, 36, 16, 2, True),
        _qwen2("qwen2.5-7b", 3584, 18944, 28, 28, 4, False),
        _qwen2("qwen2.5-14b", 5120, 13824, 48, 40, 8, False),
        _qwen2("qwen2.5-32b", 5120, 27648, 64, 40, 8, False),
        _llama("smollm2-135m", 576, 1536, 30, 9, 3, 49_152, True),
        _llama("smollm2-360m", 960, 2560, 32, 15, 5, 49_152, True),
        _llama("smollm2-1.7b", 2048, 8192, 24, 32, 32, 49_152, True),
        _llama("llama-3.2-1b", 2048, 8192, 16, 32, 8, 128_256, True),
        _llama("llama-3.2-3b", 3072, 8192, 28, 24, 8, 128_256, True),
        _llama("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128_256, False),
        Shape(
            name="qwen3-30b-a3b", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, intermediate=0,
            vocab=151_936, tied=False, qk_norm=True, experts=128, experts_per_token=8, expert_intermediate=768,
        ),
        Shape(
            name="qwen3.5-35b-a3b", hidden=2048, layers=40, heads=16, kv_heads=2, head_dim=256, intermediate=0,
            vocab=248_320, tied=False, qk_norm=True, output_gate=True, experts=256, experts_per_token=8,
            expert_intermediate=512, shared_intermediate=512, linear_layers=30, linear_heads=32,
            linear_key_size=2048, linear_value_size=4096, other_parameters=VISION_PARAMETERS,
        ),
    )
}  # fmt: skip
SUFFIXES = ("-instruct", "-base", "-chat", "-thinking", "-instruct-2507", "-thinking-2507")


def known_shape(model: str) -> Shape | None:
    """The table's entry for a name, a hub id or a folder that is called after one."""
    name = Path(model).name.lower().removesuffix("/")
    name = re.sub(r"^(qwen2\.5)-(math|coder)-", r"\1-", name.removeprefix("meta-"))
    for suffix in ("", *SUFFIXES):
        if (shape := SHAPES.get(name.removesuffix(suffix))) is not None:
            return shape
    return None


def read_shape(model: str) -> Shape:
    """Of a checkpoint folder's config.json, or of the table.

    Raises:
        ValueError: neither; or a config of a kind that is not known.
    """
    path = Path(model).expanduser() / "config.json"
    if path.is_file():
        return shape_of(json.loads(path.read_text()), model)
    if (shape := known_shape(model)) is not None:
        return shape
    raise ValueError(
        f"model {model}: neither a folder with a config.json nor in the table of shapes "
        f"({near(Path(model).name.lower(), SHAPES)}). Name one with shape=NAME, or shape=FOLDER with a config.json"
    )


def shape_of(config: dict[str, Any], name: str) -> Shape:
    """From the contents of a config.json.

    Raises:
        ValueError: a key is missing; or attention with one latent vector, which is not modelled.
    """
    text = config.get("text_config", config)
    if text.get("kv_lora_rank"):
        raise ValueError(f"model {name}: latent attention (kv_lora_rank) is not modelled by plan")
    kind = text.get("model_type", "")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if key not in text:
            raise ValueError(f"model {name}: its config.json has no {key}, so its shape is not known")
    heads, layers = text["num_attention_heads"], text["num_hidden_layers"]
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    expert_size = text.get("moe_intermediate_size") or (text.get("intermediate_size", 0) if experts else 0)
    linear = _linear_layers(text, layers) if text.get("linear_num_value_heads") else 0
    return Shape(
        name=name,
        hidden=text["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        intermediate=0 if experts else text["intermediate_size"],
        vocab=text["vocab_size"],
        tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
        qk_norm=kind.startswith("qwen3"),
        qkv_bias=kind.startswith("qwen2") or bool(text.get("attention_bias")),
        output_gate=bool(linear),
        experts=experts,
        experts_per_token=text.get("num_experts_per_tok") or 0,
        expert_intermediate=expert_size if experts else 0,
        shared_intermediate=text.get("shared_expert_intermediate_size") or 0,
        linear_layers=linear,
        linear_heads=text.get("linear_num_value_heads", 0),
        linear_key_size=text.get("linear_num_key_heads", 0) * text.get("linear_key_head_dim", 0),
        linear_value_size=text.get("linear_num_value_heads", 0) * text.get("linear_value_head_dim", 0),
    )


def _linear_layers(text: dict[str, Any], layers: int) -> int:
    kinds = text.get("layer_types")
    if kinds:
        return sum(kind == "linear_attention" for kind in kinds)
    return layers - layers // (text.get("full_attention_interval") or 4)
