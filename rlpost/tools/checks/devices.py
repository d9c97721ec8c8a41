"""Devices: what torch sees of them, and whether AITER's kernels compute what torch computes."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from rlpost.aiter import FAMILIES
from rlpost.hazards import Situation, examine
from rlpost.host import cpu_count, exported
from rlpost.platform import adopt_visibility, platform
from rlpost.tools.checks.base import GIB, Finding, Options, Status, passed
from rlpost.tools.checks.host import gpu_drivers
from rlpost.workers.rollout.installed import PACKAGES

AITER_TOLERANCE = 0.02  # bfloat16 holds 8 bits: results near 1 differ by up to 0.008


def devices(options: Options) -> Finding:
    """What torch sees, and whether something else sits on it."""
    here = platform()
    if here.kind == "cpu":
        if present := gpu_drivers():
            fix = "install a torch built for this GPU, or look at CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES"
            return Finding(Status.FAIL, f"{present[0]} is there, but torch {torch.__version__} sees no GPU", fix)
        return passed(f"no GPU; {cpu_count()} CPU cores")
    busy, lines = [], []
    for index in range(here.device_count()):
        free, total = here.free_memory_bytes(index), here.memory_bytes(index)
        lines.append(f"{index}: {here.device_name(index)} {free / GIB:.0f} of {total / GIB:.0f} GiB free")
        busy += [index] if free < 0.9 * total else []
    if busy:
        fix = "end the other processes there (nvidia-smi, amd-smi), or hide these devices"
        return Finding(Status.WARN, f"{'; '.join(lines)}; something else uses {busy}", fix)
    return passed("; ".join(lines))


def visibility(options: Options) -> Finding:
    """What the visibility variables leave to a run, as it will decide itself."""
    try:
        shown = adopt_visibility()
    except ValueError as error:
        return Finding(Status.FAIL, str(error), "set or unset what the message names, in the shell that starts runs")
    return passed(f"{len(shown.devices)} devices to use; every process gets {shown.env() or 'no variable'}")


def rocm_hazards(options: Options) -> Finding:
    """The rows of the hazard table that apply to this machine and its engines."""
    here = platform()
    engines = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package.module)]
    families = frozenset(FAMILIES) if here.has_aiter else frozenset()
    findings = [
        examine(Situation(arch=here.arch, hip=here.hip, env=exported(), engine=engine, families=families))
        for engine in engines or ["hf"]
    ]
    rows = sorted({row.name for finding in findings for row in finding.rows})
    for status, texts in (
        (Status.FAIL, [text for finding in findings for text in finding.refusals]),
        (Status.WARN, [text for finding in findings for text in finding.warnings]),
    ):
        if texts:
            return Finding(status, "; ".join(dict.fromkeys(texts)), "see docs/rocm.md for each of them")
    return passed(f"{here.arch}, ROCm {'.'.join(map(str, here.hip))}; taken care of: {', '.join(rows) or 'nothing'}")


def aiter(options: Options) -> Finding:
    """AITER's kernels against torch."""
    try:
        import aiter as kernels
    except ImportError as error:
        fix = "install AITER (docker/Dockerfile.rocm builds it)"
        return Finding(Status.FAIL, f"AITER does not import: {error}", fix)
    return judge_aiter(aiter_differences(kernels, platform().device()))


def aiter_differences(kernels: Any, device: torch.device) -> dict[str, float]:
    """Largest difference between AITER and torch by kernel family, in bfloat16 on normal numbers.

    Args:
        kernels: the module `aiter`; the calls are those that vLLM makes (vllm/kernels/aiter_ops.py,
            vllm/v1/attention/backends/mla/prefill/aiter_flash_attn.py).
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    x, weight = normal(64, 2048), normal(2048)
    q, k, v = normal(3, 200, 8, 128).unbind(0)
    lengths = torch.tensor([0, 72, 200], dtype=torch.int32, device=device)
    attended = kernels.flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=128, max_seqlen_k=128, causal=True
    )
    rows = [causal_attention(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 72), (72, 200))]
    pairs = {
        "rmsnorm": (kernels.rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (2048,), weight.float(), 1e-6)),
        "attention": (attended, torch.cat(rows)),
    }
    return {name: float(((a.float() - b).abs() / (1 + b.abs())).max()) for name, (a, b) in pairs.items()}


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's answer in float32; all `[N, heads, dim]`, one sequence."""
    q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def judge_aiter(differences: dict[str, float]) -> Finding:
    """Differences by kernel family, relative where the reference is larger than 1."""
    found = ", ".join(f"{family} differs by {value:.1e}" for family, value in differences.items())
    wrong = [family for family, value in differences.items() if not value <= AITER_TOLERANCE]
    if wrong:
        fix = f"switch off AITER's {' and '.join(wrong)} kernels (docs/rocm.md), or rebuild AITER for this GPU"
        return Finding(Status.FAIL, found, fix)
    return passed(found)
