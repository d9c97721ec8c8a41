"""Facts about AMD GPUs that need no runtime and no torch: the kernel's list, their architectures, ROCm's version."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = {"gfx942": "MI300A, MI300X, MI308X, MI325X", "gfx950": "MI350X, MI355X"}  # what rlpost is made for
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(slots=True, frozen=True)
class Gpu:
    """One GPU as the kernel driver describes it; `uuid` as HIP writes it."""

    arch: str
    uuid: str
    memory_bytes: int


def list_gpus(nodes: Path = KFD_NODES) -> list[Gpu]:
    """All GPUs of this host in the order in which ROCr numbers them, whatever is masked; empty without the driver.

    Asking the runtime instead would start it in the driver process, which then could not change visibility any more.
    """
    gpus = []
    for node in sorted(nodes.glob("[0-9]*"), key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if not properties.get("simd_count"):  # a CPU, or a GPU that this container may not use
            continue
        banks = [_properties(bank).get("size_in_bytes", 0) for bank in (node / "mem_banks").glob("*/properties")]
        gpus.append(
            Gpu(gfx_name(properties["gfx_target_version"]), f"GPU-{properties.get('unique_id', 0):016x}", sum(banks))
        )
    return gpus


def gfx_name(gfx_target_version: int) -> str:
    """The kernel's number of an architecture as compilers name it: 90402 is gfx942, 90010 is gfx90a."""
    major, rest = divmod(gfx_target_version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor}{stepping:x}"


def hip_version(text: str | None) -> tuple[int, int]:
    """`torch.version.hip` as (major, minor) of ROCm; (0, 0) without ROCm."""
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_architectures(archs: Mapping[str, str]) -> None:
    """Refuse GPUs that rlpost is not made for.

    Args:
        archs: architecture of each visible GPU, by its name for the message.

    Raises:
        ValueError: names the GPU, its architecture and those that are supported.
    """
    for gpu, arch in archs.items():
        if arch not in ARCHITECTURES:
            supported = "; ".join(f"{name}: {models}" for name, models in ARCHITECTURES.items())
            raise ValueError(
                f"GPU {gpu} is {arch}, which rlpost does not support ({supported}): leave it out of "
                "HIP_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES=-1 runs on CPU)"
            )


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # the kernel refuses nodes outside this container's devices
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
