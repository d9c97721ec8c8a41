"""Bytes of activations that the training engine keeps for each token, layer by layer; pure arithmetic.

What `PackedModel` saves for its backward pass in a compute dtype of b bytes, with the modules of transformers as they
are; of a compiled layer a share of it (`Efficiency.compiled_kept`). An RMSNorm of H numbers: its input in float32 (4 H)
and the normalised numbers (b H), which its own weight needs. A matrix product: its input, once however many products
share it. Attention: queries, keys, values, output and a float32 log-sum-exp for each head. The gated MLP: gate, its
activation, up and the product of the two. Residual sums save nothing.
`tests/unit/tools/planning/test_activations.py` holds this to what autograd says it saved.
"""

from rlpost.tools.planning.shapes import Shape

FLOAT = 4


def norm_bytes(size: int, width: int) -> int:
    """An RMSNorm over `size` numbers whose result is computed in `width` bytes."""
    return (FLOAT + width) * size


def attention_bytes(shape: Shape, width: int, kernel: str) -> int:
    """Softmax attention of one layer, projections included, for one token.

    Args:
        shape: of the model.
        width: bytes of the compute dtype.
        kernel: "sdpa" pads to copies; "grouped" takes keys as they are; "repeated" takes a key head for every query
            head (torch's varlen attention on ROCm, up to 2.11).
    """
    queries, keys = shape.query_size, shape.key_size
    norms = norm_bytes(queries + keys, width) + FLOAT * (shape.heads + shape.kv_heads) if shape.qk_norm else 0
    gate = 3 * width * queries if shape.output_gate else 0  # itself, its sigmoid, and the output before it
    kept_keys = queries if kernel == "repeated" else keys
    inside = width * (2 * queries + 2 * kept_keys) + FLOAT * shape.heads
    copies = 2 * width * (queries + keys) if kernel == "sdpa" else 0  # q, k, v and the output without padding
    return norms + inside + copies + gate


def linear_attention_bytes(shape: Shape, width: int) -> int:
    """Gated DeltaNet of one layer for one token; an estimate, since its kernels differ from host to host.

    q, k and v before and after convolution and activation and once more in float32 for the recurrence; its output in
    float32, the gate, the gated norm, and the input of the last product.
    """
    mixed = 2 * shape.linear_key_size + shape.linear_value_size
    return mixed * (3 * width + FLOAT) + shape.linear_value_size * (2 * FLOAT + 3 * width)


def mlp_bytes(shape: Shape, width: int) -> int:
    """The MLP of one layer for one token: dense, experts (their inputs and outputs are gathered copies), shared."""
    dense = 4 * width * shape.intermediate
    shared = width * (4 * shape.shared_intermediate + 2 * shape.hidden) if shape.shared_intermediate else 0
    # gate and up lie in one tensor, whose activated half, product and weighted output follow
    expert = width * (2 * shape.hidden + 4 * shape.expert_intermediate)
    router = (FLOAT + width) * shape.experts
    return dense + shared + shape.experts_per_token * expert + router


def layer_bytes(shape: Shape, width: int, kernel: str) -> float:
    """One layer for one token, the mean over kinds of layers: both norms, their outputs, attention and MLP."""
    around = 2 * (norm_bytes(shape.hidden, width) + width * shape.hidden + FLOAT)
    softmax = shape.softmax_layers * attention_bytes(shape, width, kernel)
    linear = shape.linear_layers * linear_attention_bytes(shape, width) if shape.linear_layers else 0
    return around + mlp_bytes(shape, width) + (softmax + linear) / shape.layers


def ends_bytes(shape: Shape, width: int, wanted: float) -> float:
    """Outside the layers for one token: ids and positions, the rotary tables, the last norm and the hidden state that
    it gives; and of a share `wanted` of the tokens, whose logprob is asked for, row, target and three numbers."""
    tables = 2 * width * shape.head_dim
    indices = 8 * 3
    return tables + indices + norm_bytes(shape.hidden, width) + width * shape.hidden + wanted * (2 * 8 + 3 * FLOAT)


def kept_bytes(
    shape: Shape, width: int, kernel: str, *, checkpointing: bool, wanted: float = 1.0, share: float = 1.0
) -> float:
    """Everything that is kept from the forward to the backward pass for one token.

    Args:
        shape, width, kernel: see `attention_bytes`.
        checkpointing: only the input of each layer is kept; one layer at a time comes on top while it is computed anew.
        wanted: see `ends_bytes`.
        share: of `layer_bytes` that a layer keeps; less than 1 where it is compiled.
    """
    each = width * shape.hidden if checkpointing else share * layer_bytes(shape, width, kernel)
    return shape.layers * each + ends_bytes(shape, width, wanted)


def passing_bytes(shape: Shape, width: int, kernel: str) -> float:
    """What one layer needs for one token at its worst moment without a backward pass."""
    residual = 2 * width * shape.hidden
    norm = 3 * FLOAT * shape.hidden
    queries = shape.query_size
    attention = attention_bytes(shape, width, kernel) if shape.softmax_layers else 0
    expert = shape.experts_per_token * width * (2 * shape.hidden + 4 * shape.expert_intermediate)
    mlp = max(3 * width * max(shape.intermediate, shape.shared_intermediate), expert)
    return residual + max(norm, attention + width * queries, mlp)


def backward_bytes(shape: Shape, width: int) -> float:
    """Gradients that pass through one layer for one token: those of the MLP, or of a norm in float32, and the
    residual's."""
    expert = shape.experts_per_token * width * (shape.hidden + 3 * shape.expert_intermediate)
    mlp = max(3 * width * max(shape.intermediate, shape.shared_intermediate), expert)
    return 2 * width * shape.hidden + max(mlp, 3 * FLOAT * shape.hidden)
