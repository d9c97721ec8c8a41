"""Which models take new weights in place, and what their logits are."""

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from rlpost.workers.rollout.vllm_extension import loads_in_place


class Quantized(UnquantizedLinearMethod):
    """Anything but the plain method itself."""

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)


def model(*methods) -> nn.Module:
    layers = [nn.Linear(2, 2) for _ in methods]
    for layer, method in zip(layers, methods, strict=True):
        layer.quant_method = method
    return nn.Sequential(*layers, nn.LayerNorm(2))


def test_only_plain_weights_on_cuda_are_written_in_place(monkeypatch):
    plain, quantized = (object.__new__(kind) for kind in (UnquantizedLinearMethod, Quantized))
    assert not loads_in_place(model(plain))  # on a CPU they are packed
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert loads_in_place(model(plain, None, plain))
    assert not loads_in_place(model(plain, quantized))


@pytest.mark.parametrize("method", [UnquantizedEmbeddingMethod, Quantized])
@pytest.mark.parametrize("float32", [True, False])
def test_logits_are_of_the_tokenizer_alone_and_float32_where_asked_and_possible(method, float32):
    class Head(nn.Module):
        tp_size = 1

    head, states = Head(), torch.randn(3, 16).bfloat16()
    head.weight = nn.Parameter(torch.randn(40, 16).bfloat16(), requires_grad=False)
    head.quant_method = object.__new__(method)
    head.cpu_linear = nn.functional.linear  # what vLLM packs for a CPU
    config = {"rlpost_vocab_size": 37} | ({"rlpost_float32_logits": True} if float32 else {})
    with set_current_vllm_config(VllmConfig(additional_config=config)):
        logits = LogitsProcessor(40)(head, states)
    exact = states.float() @ head.weight.float().T
    if float32 and method is UnquantizedEmbeddingMethod:
        torch.testing.assert_close(logits, exact[:, :37], rtol=0, atol=0)
    else:
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits, exact[:, :37].bfloat16(), rtol=1e-2, atol=1e-2)
