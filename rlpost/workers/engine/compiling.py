"""torch.compile of what is otherwise many small kernels: decoder layers, and the softmax over the vocabulary."""

import functools
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable)
RECOMPILE_LIMIT = 64  # roles, with and without gradient, and packs of one sequence or token: all share a layer's code


def wanted(setting: str, device: torch.device) -> bool:
    """What `model.compile` means here: `auto` compiles on GPUs, and where that fails says so and does without.

    Raises:
        ValueError: `on`, where nothing compiles.
    """
    if setting == "off" or (setting == "auto" and device.type == "cpu"):
        return False
    try:
        torch.compile(_sample)(torch.ones(8, device=device))
    except Exception as error:  # a compiler, its toolchain or its driver: each raises kinds of its own
        if setting == "on":
            raise ValueError(f"model.compile=on, but torch.compile fails on {device}: {error}") from error
        logger.warning("training is slower than it could be: torch.compile fails on %s (%s)", device, error)
        return False
    _LIMITS.addHandler(_ON_LIMIT)
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.suppress_errors = setting == "auto"  # a layer that does not compile runs as it is, and says so
    return True


class _OnLimit(logging.Handler):
    """Says among our own warnings when torch.compile has given up on some code, which then runs as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`. The first line says what, and the error of a compilation why."""
        what = record.getMessage().strip()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            what = f"{what.splitlines()[0]}: {error}"
        if error is not None or "recompile_limit" in what:
            logger.warning("training is slower than it could be, parts of it are not compiled: %s", what)


_LIMITS = logging.getLogger("torch._dynamo.convert_frame")
_ON_LIMIT = _OnLimit(logging.WARNING)


def _sample(x: Tensor) -> Tensor:
    return (x * 2.0 + 1.0).sum()


def compile_layer(layer: nn.Module) -> None:
    """Compile what the layer computes; hooks of FSDP and gradient checkpointing, which come later, stay around it.

    The first pack gives a graph of its lengths, the second, if it differs, one of any: of any number of sequences too
    where `varies` marked it.
    """
    layer.forward = torch.compile(layer.forward)


def varies(tensor: Tensor) -> None:
    """Tell torch.compile that dimension 0 differs between calls, before it has seen that.

    Tokens of two packs nearly always differ, their number of sequences often not until a later step, which would then
    wait for another compilation.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


@functools.cache
def compiled(function: F) -> F:
    """The compiled function, one for all callers."""
    return torch.compile(function)
