"""Watches one pass of a model forward and backward, and notes where numbers first cease to be finite."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlpost.batch import Batch
from rlpost.trainer.nonfinite import name_token
from rlpost.workers.engine.base import Output
from rlpost.workers.engine.optim import local

ROOT = "the model as a whole"


@dataclass(slots=True, frozen=True)
class Finding:
    """Something that is not finite: where (`column`, `weight`, `forward`, `loss`, `backward`, `gradient`), and what."""

    where: str
    name: str
    what: str


class Probe:
    """Hooks on every module of `model`; `findings` are in the order in which things happened.

    Args:
        model: a `PackedModel`; its weights are looked at now.
    """

    def __init__(self, model: nn.Module):
        self._model, self._micro = model, Batch(torch.zeros(1))
        self.findings = list(_weights(model))
        self._order: dict[str, int] = {}  # modules, as they first end
        self._handles = [
            module.register_forward_hook(partial(self._forward, _short(name))) for name, module in model.named_modules()
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def begin(self, micro: Batch) -> Batch:
        """The micro-batch that runs next, given back."""
        self._micro = micro
        return micro

    def loss(self, micro: Batch, output: Output, share: Tensor) -> None:
        """What the loss was given and gave; before the backward pass."""
        for name in ("logprobs", "entropy", "values"):
            values = getattr(output, name)
            if values is not None:
                self._look("forward", name, values)
                if values.requires_grad:
                    values.register_hook(partial(self._look, "backward", name))
        self._look("loss", "the loss", share)

    def gradients(self) -> None:
        """Look at every parameter's gradient, the one that is reached first on the way back first."""
        bad = [
            (name, found)
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and (found := _count(local(parameter.grad)))
        ]
        latest = len(self._order)  # weights that the head uses without their module are nearest to the loss
        bad.sort(key=lambda item: -self._order.get(_short(item[0]).rpartition(".")[0], latest))
        self.findings += [Finding("gradient", _short(name), found) for name, found in bad]

    def _forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._order.setdefault(name, len(self._order))
        for tensor in _tensors(output):
            self._look("forward", name or ROOT, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look, "backward", name or ROOT))

    def _look(self, where: str, name: str, tensor: Tensor) -> None:
        if found := _count(tensor):
            self.findings.append(Finding(where, name, found + self._token(tensor)))

    def _token(self, tensor: Tensor) -> str:
        """The first token that is not finite, where the tensor has a dimension of tokens."""
        total = self._micro.num_tokens
        axis = next((i for i, size in enumerate(tensor.shape) if size == total), None)
        if axis is None or total < 2:
            return ""
        bad = ~tensor.detach().isfinite().movedim(axis, 0).reshape(total, -1).all(dim=1)
        return f", first at {name_token(self._micro, int(bad.nonzero()[0]))}"


def _weights(model: nn.Module) -> Iterator[Finding]:
    for name, parameter in model.named_parameters():
        if found := _count(local(parameter)):
            yield Finding("weight", _short(name), found)


def _count(tensor: Tensor) -> str:
    """`3 of 64 are not finite`, or "" where all are."""
    if not tensor.is_floating_point():
        return ""
    bad = int((~tensor.detach().isfinite()).sum())
    return f"{bad} of {tensor.numel()} numbers are not finite" if bad else ""


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for item in output:
            yield from _tensors(item)


def _short(name: str) -> str:
    """The name in the checkpoint: without the `PackedModel` around it."""
    return name.removeprefix("model.")
