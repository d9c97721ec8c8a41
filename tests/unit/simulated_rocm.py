"""ROCm machines that exist on paper: what rlpost would set, pass and say there, for `test_rocm_golden.py`.

`python -m tests.unit.simulated_rocm` writes the golden files anew.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rlpost.platform import RAY_ENV, Platform
from rlpost.rocm import check_architectures
from rlpost.visibility import resolve_visibility
from rlpost.workers.config import AiterKernelsConfig, RolloutConfig
from rlpost.workers.model import ModelInfo, ModelShape
from rlpost.workers.placement import Placement
from rlpost.workers.rollout import sglang, vllm
from rlpost.workers.rollout.setup import engine_setup

GOLDEN = Path(__file__).parents[1] / "golden" / "rocm"
DENSE = ModelShape(num_layers=36, num_kv_heads=8, head_dim=128, kv_size=2048)
MOE = ModelShape(num_layers=48, num_kv_heads=4, head_dim=128, kv_size=1024, num_experts=128)
LATENT = ModelShape(num_layers=61, num_kv_heads=128, head_dim=128, kv_size=576, latent_attention=True)
TINY = ModelShape(num_layers=2, num_kv_heads=2, head_dim=32, kv_size=128)
ADAPTERS = {"vllm": vllm, "sglang": sglang}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One or more alike nodes of `num_gpus` GPUs and what the user exported and configured there."""

    arch: str = "gfx942"
    archs: tuple[str, ...] = ()  # where they differ
    num_gpus: int = 1
    num_nodes: int = 1
    hip: tuple[int, int] = (7, 2)
    has_aiter: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    shape: ModelShape = DENSE
    tensor_parallel: int = 1
    rollout: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)


def uuid(index: int) -> str:
    return f"GPU-{0xA0 + index:016x}"


MACHINES = {
    "mi300x_1": Machine(),
    "mi300x_4_masked_to_2": Machine(num_gpus=4, env={"HIP_VISIBLE_DEVICES": "2,3"}, tensor_parallel=2),
    "mi300x_4_cuda_mask": Machine(num_gpus=4, env={"CUDA_VISIBLE_DEVICES": "1"}),
    "mi300x_4_uuid_mask": Machine(num_gpus=4, env={"HIP_VISIBLE_DEVICES": f"{uuid(3)},{uuid(0)}"}),
    "mi355x_8": Machine(arch="gfx950", num_gpus=8, hip=(7, 14), tensor_parallel=2),
    "mi300x_2x8_sglang": Machine(
        num_gpus=8, num_nodes=2, hip=(7, 14), tensor_parallel=8, rollout={"name": "sglang", "dtype": "bfloat16"}
    ),
    "mi355x_8_sglang": Machine(arch="gfx950", num_gpus=8, hip=(7, 14), rollout={"name": "sglang"}, tensor_parallel=8),
    "mi300x_8_rocr": Machine(num_gpus=8, env={"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, tensor_parallel=4),
    "mi300x_8_rocr_and_hip_agree": Machine(
        num_gpus=8, env={"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "1,3"}
    ),
    "mi300x_8_rocr_and_hip_contradict": Machine(
        num_gpus=8, env={"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
    ),
    "mi300x_4_hip_and_cuda_contradict": Machine(
        num_gpus=4, env={"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "2,3"}
    ),
    "mi300x_4_no_such_device": Machine(num_gpus=4, env={"HIP_VISIBLE_DEVICES": "0,4"}),
    "mi250_1": Machine(arch="gfx90a"),
    "mixed_2": Machine(archs=("gfx942", "gfx1100"), num_gpus=2),
    "mixed_2_masked": Machine(archs=("gfx942", "gfx1100"), num_gpus=2, env={"HIP_VISIBLE_DEVICES": "0"}),
    "sleep_before_rocm_7": Machine(hip=(6, 3)),
    "sglang_sleep_on_7_2": Machine(rollout={"name": "sglang"}),
    "sglang_awake_on_7_2": Machine(rollout={"name": "sglang", "free_cache_engine": False}),
    "expandable_segments": Machine(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "moe_vllm": Machine(shape=MOE),
    "moe_vllm_expert_parallel": Machine(shape=MOE, rollout={"engine_kwargs": {"enable_expert_parallel": True}}),
    "moe_sglang": Machine(shape=MOE, hip=(7, 14), rollout={"name": "sglang"}),
    "moe_sglang_insisted": Machine(shape=MOE, hip=(7, 14), rollout={"name": "sglang"}, kernels={"moe": "on"}),
    "fp8_sglang": Machine(hip=(7, 14), rollout={"name": "sglang", "engine_kwargs": {"quantization": "fp8"}}),
    "float32": Machine(rollout={"dtype": "float32"}),
    "small_heads": Machine(shape=TINY),
    "latent_vllm": Machine(shape=LATENT),
    "latent_sglang_tp4": Machine(shape=LATENT, num_gpus=4, hip=(7, 14), tensor_parallel=4, rollout={"name": "sglang"}),
    "aiter_off": Machine(rollout={"aiter": "off"}),
    "aiter_off_sglang": Machine(hip=(7, 14), rollout={"name": "sglang", "aiter": "off"}),
    "two_families_off": Machine(kernels={"rope": "off", "linear": "off"}),
    "sglang_rope_off": Machine(hip=(7, 14), rollout={"name": "sglang"}, kernels={"rope": "off"}),
    "aiter_missing": Machine(has_aiter=False),
    "aiter_missing_insisted": Machine(has_aiter=False, rollout={"aiter": "on"}),
    "exported_against_config": Machine(
        env={"VLLM_ROCM_USE_AITER": "0", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1", "HSA_ENABLE_IPC_MODE_LEGACY": "0"}
    ),
    "hf": Machine(num_gpus=4, rollout={"name": "hf"}),
    "hf_insisted": Machine(rollout={"name": "hf", "aiter": "on"}),
}


def simulate(machine: Machine) -> dict[str, Any]:
    """What a run would set for driver, Ray, trainers and engines; or why it would not start."""
    try:
        return _simulate(machine)
    except ValueError as error:
        return {"refused": str(error)}


def _simulate(machine: Machine) -> dict[str, Any]:
    archs = machine.archs or (machine.arch,) * machine.num_gpus
    uuids = [uuid(i) for i in range(machine.num_gpus)]
    visibility = resolve_visibility("rocm", machine.env, machine.num_gpus, uuids)
    check_architectures({d.mask: archs[d.physical] for d in visibility.devices})
    here = Platform("rocm", machine.arch, machine.hip, machine.has_aiter)
    environ = {**machine.env, **visibility.env()}
    masks = tuple(device.mask for device in visibility.devices)
    num_ranks = len(masks) * machine.num_nodes
    placement = Placement(
        num_ranks,
        num_ranks // machine.tensor_parallel,
        machine.tensor_parallel,
        here,
        device_ids=masks * machine.num_nodes,
        nodes=tuple(f"node{n}" for n in range(machine.num_nodes) for _ in masks),
        process_env=here.process_env(environ),
    )
    placement.check_nodes()
    cfg = RolloutConfig(
        tensor_model_parallel_size=machine.tensor_parallel,
        aiter_kernels=AiterKernelsConfig(**machine.kernels),
        **{"name": "vllm"} | machine.rollout,
    )
    model = ModelInfo(
        path="MODEL",
        tokenizer_path="MODEL",
        vocab_size=100,
        embedding_size=100,
        stop_token_ids=(1,),
        max_position_embeddings=4096,
        shape=machine.shape,
    )
    setup = engine_setup(cfg, model, here, environ)
    return {
        "devices": [
            {"logical": d.logical, "physical": d.physical, "mask": d.mask, "uuid": d.uuid} for d in visibility.devices
        ],
        "driver": visibility.env(),
        "ray": {k: v for k, v in (RAY_ENV | placement.process_env).items() if RAY_ENV.get(k) != v},
        "trainers": [placement.trainer_env(rank) for rank in range(num_ranks)],
        "engines": [placement.engine_env(replica, setup.env) for replica in range(placement.num_replicas)],
        "engine_arguments": _arguments(setup.cfg, model, here),
        "warnings": list(setup.warnings),
        "hazards": list(setup.hazards),
    }


def _arguments(cfg: RolloutConfig, model: ModelInfo, here: Platform) -> dict[str, Any]:
    """What AITER and its hazards change among the engine's arguments, compared with a run on CUDA."""
    if cfg.name not in ADAPTERS:
        return {}
    adapter = ADAPTERS[cfg.name]
    accepted = {"attention_backend", "enable_expert_parallel", "quantization"}
    with mock.patch.object(adapter, "platform", lambda: here):
        rocm = adapter.engine_arguments(cfg, model, 3072, accepted)
    with mock.patch.object(adapter, "platform", lambda: Platform("cuda")):
        cuda = adapter.engine_arguments(cfg, model, 3072, accepted)
    return {key: value for key, value in rocm.items() if key not in cuda or cuda[key] != value}


def text(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"


if __name__ == "__main__":
    for old in GOLDEN.glob("*.json"):
        old.unlink()
    for name, machine in MACHINES.items():
        (GOLDEN / f"{name}.json").write_text(text(simulate(machine)))
