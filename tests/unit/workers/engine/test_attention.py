"""Packed attention against one call for each sequence."""

import pytest
import torch

from rlpost.workers.engine import attention
from rlpost.workers.engine.attention import KERNELS, Packing, choose_kernel

SEQLENS = (5, 1, 8, 3)


def _qkv(heads: int = 4, kv_heads: int = 2, dim: int = 8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sum(SEQLENS), h, dim, generator=generator) for h in (heads, kv_heads, kv_heads)]


def _packing() -> Packing:
    return Packing(torch.tensor([0, *SEQLENS]).cumsum(0).int(), max(SEQLENS))


@pytest.mark.parametrize("window", [None, 3, 100])
def test_sdpa_kernel_equals_each_sequence_alone(window):
    q, k, v = _qkv()
    got = KERNELS["sdpa"](q, k, v, _packing(), 0.3, window)
    for rows in torch.arange(sum(SEQLENS)).split(list(SEQLENS)):
        k_all, v_all = k[rows].repeat_interleave(2, 1), v[rows].repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k_all) * 0.3
        distance = rows[:, None] - rows
        visible = (distance >= 0) & (distance < (window or 100))
        p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        torch.testing.assert_close(got[rows], torch.einsum("hqk,khd->qhd", p, v_all))


def test_auto_is_sdpa_on_cpu_and_varlen_on_gpus():
    assert choose_kernel("auto", "cpu", torch.float32) == "sdpa"
    assert choose_kernel("auto", "cuda", torch.float32) == "sdpa"
    assert choose_kernel("auto", "cuda", torch.bfloat16) == "varlen"


def test_kernel_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="=varlen runs on GPUs in bfloat16 or float16, here it is cpu"):
        choose_kernel("varlen", "cpu", torch.float32)
    with pytest.raises(ValueError, match="needs the package flash_attn_interface"):
        choose_kernel("flash_attention_3", "cuda", torch.bfloat16)


def test_attention_that_packing_does_not_know_is_refused():
    function = attention.AttentionInterface()[attention.register("sdpa")]
    q, k, v = (x.transpose(0, 1)[None] for x in _qkv())
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match="Identity does not pass its keyword arguments"):
        function(module, q, k, v, None)
    with pytest.raises(ValueError, match="Identity uses softcap"):
        function(module, q, k, v, None, packing=_packing(), softcap=30.0)
