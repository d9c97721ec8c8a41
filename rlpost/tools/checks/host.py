"""Limits of the host: file descriptors, shared memory, disk, main memory. Nothing is started."""

import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from rlpost.tools.checks.base import GIB, Finding, Options, Status, passed

ENGINES_WANT_FILES = 65535  # what vLLM and SGLang raise their own limit to when they start, as far as they may
LEAST_FILES = 4096
LEAST_SHM_BYTES = GIB  # Docker gives 64 MiB, in which NCCL and the engines' processes fail
RAY_SHM_SHARE = 0.3  # of the memory: what Ray gives its object store; with less it goes to the disk
LEAST_DISK_BYTES, ENOUGH_DISK_BYTES = GIB, 20 * GIB
LEAST_MEMORY_BYTES, ENOUGH_MEMORY_BYTES = 2 * GIB, 8 * GIB  # the quickstart takes about 3 GiB on CPU
NVIDIA_NODE, AMD_NODE = "/dev/nvidiactl", "/dev/kfd"
UNLIMITED = resource.RLIM_INFINITY

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # v2, v1


def file_descriptors(options: Options) -> Finding:
    """Sockets and pipes of Ray, engines and rewards."""
    return judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_files(soft: int, hard: int) -> Finding:
    """The limits of `ulimit -n` (UNLIMITED: none); engines raise the soft one to the hard one by themselves."""
    found = f"soft limit {_limit(soft)}, hard limit {_limit(hard)}"
    if hard == UNLIMITED or hard >= ENGINES_WANT_FILES:
        return passed(found)
    fix = (
        f"the engines want {ENGINES_WANT_FILES}: in a container add --ulimit nofile=1048576:1048576, "
        "else raise `nofile` in /etc/security/limits.conf"
    )
    return Finding(Status.FAIL if hard < LEAST_FILES else Status.WARN, found, fix)


def _limit(value: int) -> str:
    return "none" if value == UNLIMITED else str(value)


def shared_memory(options: Options) -> Finding:
    """/dev/shm, through which NCCL, Ray and the engines' processes talk."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return judge_shm(free, memory_bytes()[0])


def judge_shm(free: int, total_memory: int) -> Finding:
    """Free bytes of /dev/shm against the memory of the host."""
    wanted = RAY_SHM_SHARE * total_memory
    found = f"/dev/shm has {_gib(free)} free"
    fix = f"in a container add --shm-size={wanted / GIB:.0f}g (or --ipc=host), else remount /dev/shm with that size"
    if free < LEAST_SHM_BYTES:
        return Finding(Status.FAIL, found, fix)
    if free < wanted:
        return Finding(Status.WARN, f"{found}; Ray's object store takes {_gib(wanted)} and would go to the disk", fix)
    return passed(found)


def disk(options: Options) -> Finding:
    """Where runs, made checkpoints and Ray's sessions go."""
    places = {"run folders": Path.cwd(), "home": Path.home(), "temporary files": Path(tempfile.gettempdir())}
    return judge_disk({what: shutil.disk_usage(place).free for what, place in places.items()})


def judge_disk(free: Mapping[str, int]) -> Finding:
    """Free bytes by use of the place."""
    found = ", ".join(f"{what}: {_gib(size)} free" for what, size in free.items())
    if min(free.values()) >= ENOUGH_DISK_BYTES:
        return passed(found)
    status = Status.FAIL if min(free.values()) < LEAST_DISK_BYTES else Status.WARN
    return Finding(status, found, "make room, or move hydra.run.dir, cache_dir or TMPDIR to a larger disk")


def memory(options: Options) -> Finding:
    """Main memory, the container's limit included."""
    return judge_memory(*memory_bytes())


def judge_memory(total: int, available: int) -> Finding:
    """Bytes that there are, and that are available."""
    found = f"{_gib(available)} of {_gib(total)} available"
    if available >= ENOUGH_MEMORY_BYTES:
        return passed(found)
    status = Status.FAIL if available < LEAST_MEMORY_BYTES else Status.WARN
    fix = "end other programs or raise the container's --memory; sleeping engines and offloaded parameters live there"
    return Finding(status, found, fix)


def gpu_drivers() -> list[str]:
    """Device nodes of the GPU drivers that are there; asks no library, since loading one is what may fail."""
    return [node for node in (NVIDIA_NODE, AMD_NODE) if Path(node).exists()]


def memory_bytes() -> tuple[int, int]:
    """Main memory of the host or of the container that limits it: total and available."""
    host = psutil.virtual_memory()
    limits = [Path(file).read_text().strip() for file in CGROUP_LIMITS if Path(file).is_file()]
    limit = min([host.total, *(int(text) for text in limits if text.isdigit())])
    return limit, min(host.available, limit)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
