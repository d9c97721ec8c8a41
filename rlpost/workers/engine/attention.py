"""Attention over packed sequences, for any transformers model that takes its attention from `AttentionInterface`.

The registered function gets a `Packing` through the model's keyword arguments. It has the [1, N, heads, dim] layout's
sequences apart by `cu_seqlens`, so no mask exists anywhere. Under sequence parallelism (DeepSpeed-Ulysses, Jacobs et
al. 2023) ranks hold slices of the pack outside attention, and all tokens of some heads inside.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rlpost.workers.engine.parallel import all_gather

NAME = "rlpost_packed"
_WINDOW = "rlpost_window"  # attribute of an attention module: tokens, or None
VARLEN_NAMES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(slots=True, frozen=True)
class Packing:
    """Where sequences begin in a pack.

    Attributes:
        cu_seqlens: int32 `[S + 1]`, of the whole pack, on the device.
        max_seqlen: of the longest sequence, tokens; at least 2, because at 1 kernels take another way.
        group: process group over which the pack is sliced; None without sequence parallelism.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    group: dist.ProcessGroup | None = None


# (q [N, H, D], k [N, Hkv, D], v [N, Hkv, D], packing, scale, window or None) -> [N, H, D]; causal
Kernel = Callable[[Tensor, Tensor, Tensor, Packing, float, int | None], Tensor]


def choose_kernel(attn_implementation: str, device_type: str, dtype: torch.dtype) -> str:
    """What `model.attn_implementation` means here: `auto` takes torch's varlen attention on GPUs in half precision.

    Raises:
        ValueError: a kernel that is not installed or cannot run on this device and dtype.
    """
    half_on_gpu = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    packages = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if attn_implementation == "auto":
        return "varlen" if half_on_gpu else "sdpa"
    if attn_implementation == "sdpa":
        return "sdpa"
    if not half_on_gpu:
        raise ValueError(
            f"model.attn_implementation={attn_implementation} runs on GPUs in bfloat16 or float16, here it is "
            f"{device_type} in {str(dtype).removeprefix('torch.')}: use model.attn_implementation=auto"
        )
    package = packages.get(attn_implementation)
    if package and not importlib.util.find_spec(package):
        raise ValueError(
            f"model.attn_implementation={attn_implementation} needs the package {package}, which is not installed: "
            "install it or use model.attn_implementation=auto"
        )
    return attn_implementation


def register(kernel: str) -> str:
    """Make `kernel` a transformers attention implementation; returns its name, for `attn_implementation`.

    transformers builds no mask for a name that its mask interface does not know.
    """
    name = f"{NAME}_{kernel}"
    AttentionInterface.register(name, _interface(KERNELS[kernel]))
    return name


def _interface(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packing: Packing | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        name = type(module).__name__
        if packing is None:
            raise ValueError(
                f"{name} does not pass its keyword arguments on to attention, so packed sequences cannot run"
            )
        if softcap is not None or s_aux is not None:
            raise ValueError(
                f"{name} uses {'softcap' if s_aux is None else 'attention sinks'}, which packed attention lacks"
            )
        window = getattr(module, _WINDOW, None)
        if sliding_window is None and window is not None and packing.max_seqlen > window:
            raise ValueError(
                f"{name} gives its sliding window of {window} tokens by a mask alone, which packed attention lacks: "
                "sequences must not be longer (data.max_prompt_length + data.max_response_length)"
            )
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [1, H, N, D] -> [N, H, D]
        if packing.group is None:
            return kernel(q, k, v, packing, scale, sliding_window)[None], None
        q, k, v = _heads_to_ranks(q, k, v, packing.group)
        return _all_to_all(kernel(q, k, v, packing, scale, sliding_window), packing.group, 0, 1)[None], None

    return attention


def note_windows(model: nn.Module) -> None:
    """Note on each module of attention which sliding window it should have by its config.

    Beforehand, because attention is compiled once for all layers as long as it does not ask which one it is in.
    """
    for module in model.modules():
        config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None or (number is not None and kinds[number] == "sliding_attention"):
            setattr(module, _WINDOW, getattr(config, "sliding_window", None))


def _heads_to_ranks(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Slices with all heads -> the whole pack with this rank's heads; key heads are repeated when there are too few."""
    size, num_heads, num_kv = dist.get_world_size(group), q.shape[1], k.shape[1]
    if num_heads % size or (num_kv % size and size % num_kv):
        raise ValueError(
            f"ulysses_sequence_parallel_size={size} must divide the {num_heads} attention heads, and divide or be a "
            f"multiple of the {num_kv} key heads"
        )
    if num_kv < size:
        k, v = (x.repeat_interleave(size // num_kv, dim=1) for x in (k, v))
    return tuple(_all_to_all(x, group, 1, 0) for x in (q, k, v))


class _AllToAll(torch.autograd.Function):
    """Split dimension `split` over the ranks, join what they send along `join`; its own inverse with both swapped."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        sent = torch.stack([part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=split)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(list(received), dim=join)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.group, ctx.join, ctx.split), None, None, None


def _all_to_all(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    return _AllToAll.apply(x, group, split, join)


def gather_slices(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`[N / size, ...]` of each rank -> `[N, ...]` on all. Every rank then computes the same loss, so that the backward
    pass hands each rank the gradient of its own slice and adds nothing up."""
    return x if group is None else _GatherSlices.apply(x, group)


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        all_gather(whole, x.contiguous(), group)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _sdpa(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    """Pad q, k and v to [S, T_max] for the call: causal attention never sees the padding behind a sequence."""
    count, longest = packing.cu_seqlens.shape[0] - 1, packing.max_seqlen
    starts = packing.cu_seqlens[:-1].long()
    shift, lengths = torch.arange(count, device=q.device) * longest - starts, packing.cu_seqlens.diff()
    place = torch.arange(len(q), device=q.device) + shift.repeat_interleave(lengths, output_size=len(q))

    def pad(x: Tensor) -> Tensor:  # [N, H, D] -> [S, H, T, D]
        padded = x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, place, x)
        return padded.unflatten(0, (count, longest)).transpose(1, 2)

    mask = None
    if window is not None and window < longest:
        distance = torch.arange(longest, device=q.device)[:, None] - torch.arange(longest, device=q.device)
        mask = (distance >= 0) & (distance < window)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        pad(q), pad(k), pad(v), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, place)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    """torch's own. Its kernel for CUDA takes grouped key heads, also where (torch 2.11) no argument announces them."""
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if VARLEN_NAMES_GROUPS else {}
    if torch.version.hip and not VARLEN_NAMES_GROUPS:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    cu_seqlens, longest = packing.cu_seqlens, packing.max_seqlen
    left = -1 if window is None else window - 1
    return varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens, cu_seqlens, longest, longest,
        scale=scale, window_size=(left, 0), **grouped,
    )  # fmt: skip


def _flash(package: str) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
        varlen = importlib.import_module(package).flash_attn_varlen_func
        cu_seqlens, longest = packing.cu_seqlens, packing.max_seqlen
        left = -1 if window is None else window - 1
        out = varlen(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=scale, causal=True, window_size=(left, 0),
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out  # version 3 also returns the log-sum-exp

    return kernel


KERNELS: dict[str, Kernel] = {
    "sdpa": _sdpa,
    "varlen": _varlen,
    "flash_attention_2": _flash("flash_attn"),
    "flash_attention_3": _flash("flash_attn_interface"),
}
