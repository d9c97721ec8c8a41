"""Full weights under checkpoint names, some at a time, from a sharded model."""

import zlib
from collections.abc import Iterator, Sequence

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from rlpost.workers.engine.packed_model import PackedModel
from rlpost.workers.engine.parallel import all_gather

PORTION_BYTES = 64 << 20  # of full parameters that are gathered at once: small ones would each cost a message


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
    """See `TrainEngine.named_weights`. Full parameters of `PORTION_BYTES` exist at a time, or one that is larger."""
    plain: list[tuple[str, nn.Parameter]] = []
    for name, module, parameter in names.parameters():
        layer = names.lora.get(module)
        if layer is not None and name.endswith(".weight"):
            merged = round_stochastically(_merged(layer, parameter, device), dtype, seed=zlib.crc32(name.encode()))
            yield from names.to_checkpoint(name, merged).items()
        else:
            plain.append((name, parameter))
    for portion in _portions(plain, dtype):
        fulls = gather([parameter for _, parameter in portion], dtype, device)
        for (name, _), full in zip(portion, fulls, strict=True):
            yield from names.to_checkpoint(name, full).items()


def _portions(
    parameters: list[tuple[str, nn.Parameter]], dtype: torch.dtype
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    portion: list[tuple[str, nn.Parameter]] = []
    nbytes = 0
    for name, parameter in parameters:
        more = parameter.numel() * dtype.itemsize
        if portion and nbytes + more > PORTION_BYTES:
            yield portion
            portion, nbytes = [], 0
        portion.append((name, parameter))
        nbytes += more
    if portion:
        yield portion


def gather(parameters: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The full parameters on `device`, cast before they are gathered, in one message; shards may lie in host memory.

    Args:
        parameters: plain tensors, or all of them sharded by rows over the same mesh (and replicated over others).
    """
    if not isinstance(parameters[0], DTensor):
        return [parameter.detach().to(device, dtype) for parameter in parameters]
    first = parameters[0]
    (over,) = (i for i, placement in enumerate(first.placements) if placement.is_shard(0))
    size = first.device_mesh.size(over)
    shards = [parameter.detach().to_local().to(device, dtype) for parameter in parameters]
    if size == 1:
        return shards
    rows = [-(-parameter.shape[0] // size) for parameter in parameters]  # of each rank but the last, which has the rest
    lengths = [n * parameter.shape[1:].numel() for n, parameter in zip(rows, parameters, strict=True)]
    own = torch.zeros(sum(lengths), dtype=dtype, device=device)
    for part, shard in zip(own.split(lengths), shards, strict=True):
        part[: shard.numel()] = shard.flatten()
    whole = own.new_empty(size, len(own))
    all_gather(whole.flatten(), own, first.device_mesh.get_group(over))
    return [
        part.reshape(-1, *parameter.shape[1:])[: parameter.shape[0]]
        for part, parameter in zip(whole.split(lengths, dim=1), parameters, strict=True)
    ]


def round_stochastically(full: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """`full` (float32) in `dtype`, each number rounded up or down with chances that make its mean right.

    Adapters change weights by less than half of the last bit for a long time; rounded to the nearest, the weights that
    the engine gets would not change at all. The same seed rounds the same numbers alike, on every rank.
    """
    if dtype == full.dtype:
        return full
    generator = torch.Generator(full.device).manual_seed(seed)
    noise = torch.rand(full.shape, generator=generator, device=full.device) - 0.5
    last_bit = torch.exp2(torch.frexp(full).exponent.float() - 1) * torch.finfo(dtype).eps
    nearest = full.to(dtype)
    return torch.where(nearest == full, nearest, (full + noise * last_bit).to(dtype))


def _merged(layer: LoraLayer, base: Tensor, device: torch.device) -> Tensor:
    """W + scaling * B A (Hu et al. 2021) in float32, without touching the layer."""
    (adapter,) = layer.lora_A.keys()
    parts = (base, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
    full, a, b = gather(parts, torch.float32, device)
    return full.add(b @ a, alpha=layer.scaling[adapter])
