"""Which models take new weights in place."""

import pytest
from torch import nn

pytest.importorskip("vllm")
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

from rlpost.workers.rollout.vllm_extension import loads_in_place


class Quantized(UnquantizedLinearMethod):
    """Anything but the plain method itself."""


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
