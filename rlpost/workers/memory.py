"""Can it fit? Device memory that engine and trainer need at the very least, before either starts. Pure arithmetic.

Activations, caches of kernels and the runtime's own memory come on top: what passes here may still run out, what fails
here cannot run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1024**3
TRAINED_BYTES = {"master weights": 4, "gradients": 4, "Adam's two moments": 8}  # float32, a parameter


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineNeeds:
    """What one tensor-parallel rank of an engine holds at least.

    Attributes:
        num_parameters, weight_bytes: of the model; bytes of one weight.
        tensor_parallel: ranks that share the weights.
        cache_bytes: keys and values of one token on one rank.
        max_model_len: tokens of the longest sequence.
        utilization: `rollout.gpu_memory_utilization`.
    """

    num_parameters: int
    weight_bytes: int
    tensor_parallel: int
    cache_bytes: int
    max_model_len: int
    utilization: float


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainerNeeds:
    """What one trainer rank holds at least while it trains.

    Attributes:
        trained: role -> parameters that have an optimizer.
        frozen_bytes: role -> bytes of weights that are only read.
        num_shards: ranks over which all of it is spread.
    """

    trained: Mapping[str, int]
    frozen_bytes: Mapping[str, int]
    num_shards: int


def check_memory(device_bytes: int, engine: EngineNeeds, trainer: TrainerNeeds, *, takes_turns: bool) -> None:
    """Refuse a run that cannot fit.

    Args:
        device_bytes: memory of one device.
        engine, trainer: what each needs.
        takes_turns: engine and trainer are never both on one device, so each may fill it.

    Raises:
        ValueError: shows the sum, and which setting makes it fit.
    """
    share = engine.utilization * device_bytes
    weights = engine.num_parameters * engine.weight_bytes / engine.tensor_parallel
    cache = engine.max_model_len * engine.cache_bytes
    if weights + cache > share:
        least = (weights + cache) / device_bytes
        fix = (
            f"raise rollout.gpu_memory_utilization above {least:.2f}"
            if least < 0.95
            else "raise rollout.tensor_model_parallel_size, or shorten the sequences"
        )
        raise ValueError(
            f"rollout.gpu_memory_utilization={engine.utilization:g} cannot fit: weights {_gib(weights)} "
            f"({engine.num_parameters / 1e9:.2f}e9 x {engine.weight_bytes} bytes / "
            f"rollout.tensor_model_parallel_size={engine.tensor_parallel}) + KV cache of one sequence {_gib(cache)} "
            f"({engine.max_model_len} tokens x {engine.cache_bytes} bytes) = {_gib(weights + cache)}, but "
            f"{engine.utilization:g} x {_gib(device_bytes)} = {_gib(share)}; {fix}"
        )
    parts = {
        f"{role}'s {what}": num * size / trainer.num_shards
        for role, num in trainer.trained.items()
        for what, size in TRAINED_BYTES.items()
    } | {f"{role}'s weights": size / trainer.num_shards for role, size in trainer.frozen_bytes.items()}
    total, left = sum(parts.values()), device_bytes - (0 if takes_turns else share)
    if total > left:
        sums = " + ".join(f"{what} {_gib(size)}" for what, size in parts.items())
        beside = "" if takes_turns else f" - {_gib(share)} of rollout.gpu_memory_utilization={engine.utilization:g}"
        fix = (
            "use more GPUs (cluster.n_gpus_per_node, cluster.nnodes), or LoRA (model.lora_rank)"
            if total > device_bytes
            else "lower rollout.gpu_memory_utilization, or set rollout.free_cache_engine=true"
        )
        raise ValueError(
            f"the trainer cannot fit: {sums} = {_gib(total)} a GPU over {trainer.num_shards} shards, but there are "
            f"{_gib(device_bytes)}{beside}; {fix}"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
