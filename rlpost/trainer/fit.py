"""Whether a run's models can fit into its devices: reads from the config what `rlpost.workers.memory` adds up."""

import math

import torch

from rlpost.config import Config
from rlpost.platform import platform
from rlpost.workers.memory import EngineNeeds, TrainerNeeds, check_memory
from rlpost.workers.model import ModelInfo
from rlpost.workers.placement import Placement
from rlpost.workers.rollout.manifest import checkpoint_shapes


def check_fit(cfg: Config, model: ModelInfo, placement: Placement, sleep: bool) -> None:
    """Refuse what cannot fit into the devices, see `check_memory`. Host memory is not looked at."""
    if not placement.memory_bytes:
        return
    rollout, shape = cfg.rollout, model.shape
    tensor_parallel = rollout.tensor_model_parallel_size
    num_parameters = sum(math.prod(sizes) for sizes in checkpoint_shapes(model.path).values())
    itemsize = platform().dtype(rollout.dtype).itemsize
    split = 1 if shape.latent_attention else min(tensor_parallel, max(1, shape.num_kv_heads))
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    trained = {"critic": num_parameters} if cfg.algo.needs_critic else {}
    frozen = {}
    if cfg.model.lora_rank:  # adapters are small, and with its adapter off the actor is the reference
        frozen["actor"] = num_parameters * torch.float32.itemsize
    else:
        trained["actor"] = num_parameters
        if cfg.algo.needs_reference:
            frozen["ref"] = num_parameters * platform().dtype(cfg.actor.dtype).itemsize
    check_memory(
        placement.memory_bytes,
        EngineNeeds(
            num_parameters=num_parameters,
            weight_bytes=itemsize,
            tensor_parallel=tensor_parallel,
            cache_bytes=shape.num_layers * shape.kv_size * itemsize // split,
            max_model_len=rollout.max_model_len or longest,
            utilization=rollout.gpu_memory_utilization,
        ),
        TrainerNeeds(
            trained=trained,
            frozen_bytes=frozen,
            num_shards=placement.num_ranks if cfg.actor.fsdp.fsdp_size == -1 else cfg.actor.fsdp.fsdp_size,
        ),
        takes_turns=sleep or placement.shares_no_device,
    )
