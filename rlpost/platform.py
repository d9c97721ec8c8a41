"""The one place that knows devices: cpu, cuda, rocm, their uuids, memory, and what processes get as environment.

What needs no device is in pure modules beside it: `visibility.py` (masks), `rocm.py` (the kernel's list of GPUs),
`aiter.py` (kernel families and their switches) and `hazards.py` (the table of what goes wrong on ROCm).
"""

import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlpost.hazards import Situation, examine
from rlpost.host import cpu_count
from rlpost.rocm import check_architectures, hip_version, list_gpus
from rlpost.visibility import CUDA, ROCR, Visibility, mask_env, resolve_visibility

# Ray would otherwise rewrite the visibility variables of actors that reserve no GPU, or less than one.
RAY_ENV = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# What Ray reads as it starts: it would report to its makers, and let all other processes go before ours (niceness 15).
RAY_START_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
DRIVER_THREADS = 4


@dataclass(slots=True, frozen=True)
class Platform:
    """Facts about this host's accelerators.

    Attributes:
        kind: "cpu", "cuda" or "rocm".
        arch: on ROCm, such as "gfx942".
        hip: on ROCm, its (major, minor) version.
        has_aiter: the package `aiter` is installed.
    """

    kind: str
    arch: str = ""
    hip: tuple[int, int] = (0, 0)
    has_aiter: bool = False

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
        """Give cached device memory back, so that the engine on the same card can take it.

        Without the garbage collector, to which no pass leaves a tensor: it took 0.35 s each time, and more once layers
        are compiled.
        """
        if self.kind != "cpu":
            torch.cuda.empty_cache()

    def peak_memory_bytes(self) -> int:
        """Peak device memory reserved by this process since the last reset; 0 on CPU."""
        return 0 if self.kind == "cpu" else torch.cuda.max_memory_reserved()

    def held_memory_bytes(self) -> int:
        """Device memory that tensors of this process hold now, cached memory not counted; 0 on CPU."""
        return 0 if self.kind == "cpu" else torch.cuda.memory_allocated()

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        if self.kind != "cpu":
            torch.cuda.reset_peak_memory_stats()

    def memory_bytes(self, index: int = 0) -> int:
        """Memory of visible accelerator `index`, used or not; 0 on CPU."""
        return 0 if self.kind == "cpu" else torch.cuda.get_device_properties(index).total_memory

    def free_memory_bytes(self, index: int = 0) -> int:
        """Of it, what no process uses; 0 on CPU."""
        return 0 if self.kind == "cpu" else torch.cuda.mem_get_info(index)[0]

    def device_name(self, index: int = 0) -> str:
        """What its maker calls it; "cpu" without one."""
        return "cpu" if self.kind == "cpu" else torch.cuda.get_device_name(index)

    def visibility_env(self, ids: Sequence[str]) -> dict[str, str]:
        """Environment that shows a process exactly these devices; HIP and CUDA agree on ROCm."""
        return mask_env(self.kind, ids)

    def process_env(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Environment that every process of a run needs on this platform, where the driver's is `environ`."""
        if self.kind != "rocm":
            return {}
        return examine(Situation(arch=self.arch, hip=self.hip, env=environ)).env

    def engine_env(self, engine: str) -> dict[str, str]:
        """Environment an inference engine needs before it is imported, AITER's switches aside."""
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
        if engine == "sglang":
            # It keeps some positions of a request for itself, so its context is longer than what rollout asks for.
            env |= {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
            if self.kind == "cpu":
                env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(max(1, cpu_count() // 2))}
        return env


@functools.lru_cache(maxsize=1)
def platform() -> Platform:
    """The platform of this process, found once."""
    if not torch.cuda.is_available():
        return Platform("cpu")
    if not torch.version.hip:
        return Platform("cuda")
    gpus = list_gpus()
    arch = gpus[0].arch if gpus else torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    return Platform("rocm", arch, hip_version(torch.version.hip), importlib.util.find_spec("aiter") is not None)


def adopt_visibility() -> Visibility:
    """Which devices this run may use, decided once, in the driver, before Ray starts.

    On ROCm the driver's own variables are made to agree, and Ray and all workers inherit them.

    Raises:
        ValueError: variables that contradict each other, or a visible GPU that is not supported; says what to set.
    """
    here = platform()
    if here.kind != "rocm":
        counted = None if CUDA in os.environ or here.kind == "cpu" else torch.cuda.device_count()
        return resolve_visibility(here.kind, os.environ, counted)
    gpus = list_gpus()
    counted = len(gpus) or torch.cuda.device_count()
    visibility = resolve_visibility("rocm", os.environ, counted, [gpu.uuid for gpu in gpus])
    if gpus:
        check_architectures({d.mask: gpus[d.physical].arch for d in visibility.devices if d.physical is not None})
    else:
        check_architectures({"0": here.arch})
    os.environ.update(visibility.env())
    os.environ.pop(ROCR, None)  # the same devices, now by HIP's mask alone
    return visibility


def limit_threads() -> None:
    """Let torch use few threads in this process, the driver, unless `OMP_NUM_THREADS` says how many.

    Its tensors are small, and by itself it would take every core while engines need theirs. Processes that it starts
    do not inherit the limit.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(DRIVER_THREADS, torch.get_num_threads()))
