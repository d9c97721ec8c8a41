"""Full weights under checkpoint names, one parameter at a time, from a sharded model."""

from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from rlpost.workers.engine.packed_model import PackedModel


class WeightNames:
    """Maps a model's parameters to the names and shapes that its checkpoint has.

    transformers 5 fuses some checkpoint tensors into one parameter (the experts of a layer) and renames others; its
    own save conversion undoes that. Dense models have nothing to undo.
    """

    def __init__(self, model: PackedModel):
        self.model = model.model
        self.lora = {name: m for name, m in self.model.named_modules() if isinstance(m, LoraLayer)}
        plain = {_plain(name): p for name, p in self.model.named_parameters() if not _is_adapter(name)}
        shapes = {name: torch.empty(p.shape, device="meta") for name, p in plain.items()}
        saved = revert_weight_conversion(self.model, shapes)
        self.converted = {n for n in shapes if n not in saved or saved[n].shape != shapes[n].shape}

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """(name without peft's wrapper, name of the module it belongs to, parameter); tied weights once."""
        for name, parameter in self.model.named_parameters():
            if not _is_adapter(name):
                module = name.rpartition(".")[0].removesuffix(".base_layer")
                yield _plain(name), module, parameter

    def to_checkpoint(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What the checkpoint has in place of one parameter."""
        if name not in self.converted:
            return {name: tensor}
        return revert_weight_conversion(self.model, {name: tensor})


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def named_weights(names: WeightNames, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """See `TrainEngine.named_weights`. Only one full parameter exists at a time."""
    for name, module, parameter in names.parameters():
        layer = names.lora.get(module)
        if layer is not None and name.endswith(".weight"):
            full = _merged(layer, parameter, device).to(dtype)
        else:
            full = gather(parameter, dtype, device)
        yield from names.to_checkpoint(name, full).items()


def gather(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The full parameter on `device`, cast before it is gathered; the shard may lie in host memory."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().to(device, dtype)
    shard = parameter.detach().to_local().to(device, dtype)
    if parameter.device_mesh.size() == 1:
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()


def _merged(layer: LoraLayer, base: Tensor, device: torch.device) -> Tensor:
    """W + scaling * B A (Hu et al. 2021) in float32, without touching the layer."""
    (adapter,) = layer.lora_A.keys()
    full = gather(base, torch.float32, device)
    a = gather(layer.lora_A[adapter].weight, torch.float32, device)
    b = gather(layer.lora_B[adapter].weight, torch.float32, device)
    return full.add(b @ a, alpha=layer.scaling[adapter])
