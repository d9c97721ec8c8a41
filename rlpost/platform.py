"""The one place that knows devices: cpu, cuda, rocm, their visibility variables, uuids, memory and engine settings."""

import functools
import gc
import os
import socket
from dataclasses import dataclass

import torch

# Ray would otherwise rewrite the visibility variables of actors that reserve no GPU, or less than one.
RAY_ENV = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(slots=True, frozen=True)
class Platform:
    """Facts about this host's accelerator; `kind` is "cpu", "cuda" or "rocm"."""

    kind: str

    @property
    def device_type(self) -> str:
        """torch's name: "cuda" serves NVIDIA and AMD alike."""
        return "cpu" if self.kind == "cpu" else "cuda"

    @property
    def collective_backend(self) -> str:
        """Backend of the trainer's process group. NCCL's name also stands for RCCL."""
        return "gloo" if self.kind == "cpu" else "cpu:gloo,cuda:nccl"

    @property
    def train_dtype(self) -> str:
        """Compute dtype that `auto` means."""
        return "float32" if self.kind == "cpu" else "bfloat16"

    def dtype(self, name: str) -> torch.dtype:
        """`auto` or a dtype's name, as a torch dtype."""
        return getattr(torch, self.train_dtype if name == "auto" else name)

    def device_count(self) -> int:
        """Accelerators visible to this process; 0 on CPU."""
        return 0 if self.kind == "cpu" else torch.cuda.device_count()

    def device(self, index: int = 0) -> torch.device:
        """The torch device of visible accelerator `index`."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", index)

    def set_device(self, index: int) -> None:
        """Make `index` this process's current device."""
        if self.kind != "cpu":
            torch.cuda.set_device(index)

    def device_uuid(self, index: int = 0) -> str:
        """Identity of the physical device, equal in every process that sees it; "cpu" without one."""
        return "cpu" if self.kind == "cpu" else str(torch.cuda.get_device_properties(index).uuid)

    def synchronize(self) -> None:
        """Wait for the device's queue."""
        if self.kind != "cpu":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give cached device memory back, so that the engine on the same card can take it."""
        if self.kind != "cpu":
            gc.collect()
            torch.cuda.empty_cache()

    def peak_memory_bytes(self) -> int:
        """Peak device memory reserved by this process since the last reset; 0 on CPU."""
        return 0 if self.kind == "cpu" else torch.cuda.max_memory_reserved()

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        if self.kind != "cpu":
            torch.cuda.reset_peak_memory_stats()

    def visibility_env(self, ids: list[str]) -> dict[str, str]:
        """Environment that shows a process exactly these devices; HIP and CUDA agree on ROCm."""
        if self.kind == "cpu":
            return {}
        names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if self.kind == "rocm" else ("CUDA_VISIBLE_DEVICES",)
        return {name: ",".join(ids) for name in names}

    def engine_env(self, engine: str) -> dict[str, str]:
        """Environment an inference engine needs before it is imported."""
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if engine == "vllm":
            env |= {
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            }
            if self.kind == "cpu":
                threads = str(max(1, cpu_count() // 2))
                env |= {
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "OMP_NUM_THREADS": threads,
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                }
            if self.kind == "cuda":
                env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
            if self.kind == "rocm":
                env |= {"VLLM_ROCM_USE_AITER": "1"}
        return env


@functools.lru_cache(maxsize=1)
def platform() -> Platform:
    """The platform of this process, found once."""
    if not torch.cuda.is_available():
        return Platform("cpu")
    return Platform("rocm" if torch.version.hip else "cuda")


def cpu_count() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def host_address() -> str:
    """An address of this host that other ranks reach."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # documentation range: only picks the route, sends nothing
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
