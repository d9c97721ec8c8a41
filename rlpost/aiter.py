"""AITER's kernel families and the switches that each engine has for them. Pure: no torch, no `os.environ`.

Engines read these variables while they are imported, so they belong to the environment that an engine's process starts
with. Every switch is always stated, on or off: what the image or the shell exported must not decide.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

FAMILIES = ("attention", "rmsnorm", "rope", "moe", "linear", "quantization")

_VLLM = "https://github.com/vllm-project/vllm/blob/v0.24.0/vllm"
_SGLANG = "https://github.com/sgl-project/sglang/blob/v0.5.12/python/sglang/srt"


@dataclass(slots=True, frozen=True, kw_only=True)
class Switch:
    """How an engine is told about one family; arguments are the engine's own, by name."""

    source: str
    on: Mapping[str, str] = field(default_factory=dict)
    off: Mapping[str, str] = field(default_factory=dict)
    arguments_on: Mapping[str, Any] = field(default_factory=dict)
    arguments_off: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineTable:
    """One engine: the switch over all of AITER, and one for each family that it can turn off alone.

    A family without a switch of its own follows `master`. `never` are kernels that no family stands for: they lay out
    weights or the KV cache anew, or compute in less precision than was asked for, so they stay off whatever is on.
    """

    master: Switch
    families: Mapping[str, Switch]
    never: Mapping[str, str] = field(default_factory=dict)


def _flags(*names: str) -> tuple[dict[str, str], dict[str, str]]:
    return dict.fromkeys(names, "1"), dict.fromkeys(names, "0")


def _vllm(*names: str, **arguments: Mapping[str, Any]) -> Switch:
    on, off = _flags(*(f"VLLM_ROCM_{name}" for name in names))
    return Switch(source=f"{_VLLM}/envs.py", on=on, off=off, **arguments)


ENGINES: dict[str, EngineTable] = {
    "vllm": EngineTable(
        master=_vllm("USE_AITER"),
        families={
            # Without the argument vLLM would prefer ROCM_ATTN (platforms/rocm.py, _get_backend_priorities).
            "attention": _vllm(
                "USE_AITER_MHA",
                "USE_AITER_MLA",
                arguments_on={"attention_backend": "ROCM_AITER_FA"},
                arguments_off={"attention_backend": "TRITON_ATTN"},
            ),
            "rmsnorm": _vllm("USE_AITER_RMSNORM"),
            "rope": _vllm("USE_AITER_TRITON_ROPE"),
            "moe": _vllm("USE_AITER_MOE"),
            "linear": _vllm("USE_AITER_LINEAR", "USE_AITER_TRITON_GEMM"),
            "quantization": _vllm("USE_AITER_FP8BMM", "USE_AITER_FP4BMM"),
        },
        never=_vllm(
            "USE_AITER_LINEAR_HIPBMM",
            "USE_AITER_FP4_ASM_GEMM",
            "USE_AITER_UNIFIED_ATTENTION",
            "USE_AITER_FUSION_SHARED_EXPERTS",
            "SHUFFLE_KV_CACHE_LAYOUT",
        ).off,
    ),
    "sglang": EngineTable(
        master=Switch(source=f"{_SGLANG}/environ.py", on={"SGLANG_USE_AITER": "1"}, off={"SGLANG_USE_AITER": "0"}),
        families={  # RMSNorm, RoPE and linear layers ask SGLANG_USE_AITER itself
            "attention": Switch(
                source=f"{_SGLANG}/server_args.py",
                arguments_on={"attention_backend": "aiter"},
                arguments_off={"attention_backend": "triton"},
            ),
            "moe": Switch(
                source=f"{_SGLANG}/layers/quantization/unquant.py",
                arguments_on={"moe_runner_backend": "auto"},
                arguments_off={"moe_runner_backend": "triton"},
            ),
            "quantization": Switch(
                source=f"{_SGLANG}/layers/quantization/fp8_utils.py",
                arguments_on={"fp8_gemm_runner_backend": "auto"},
                arguments_off={"fp8_gemm_runner_backend": "triton"},
            ),
        },
    ),
}


def units(engine: str) -> tuple[frozenset[str], ...]:
    """What can be turned off at once, in the order in which a search adds it: first what only `master` governs."""
    own = ENGINES[engine].families
    together = frozenset(FAMILIES) - frozenset(own)
    return (*([together] if together else []), *(frozenset([family]) for family in FAMILIES if family in own))


def closure(engine: str, families: Collection[str]) -> frozenset[str]:
    """Of `families` those that can be on: where one that only `master` governs is to be off, all of AITER is."""
    governed = frozenset(FAMILIES) - frozenset(ENGINES[engine].families)
    return frozenset(families) if governed <= frozenset(families) else frozenset()


def environment(engine: str, families: Collection[str]) -> dict[str, str]:
    """The variables that turn exactly `families` on in `engine`; none for an engine without AITER."""
    if engine not in ENGINES:
        return {}
    table = ENGINES[engine]
    env = {**(table.master.on if families else table.master.off), **table.never}
    for family, switch in table.families.items():
        env |= switch.on if family in families else switch.off
    return env


def arguments(engine: str, families: Collection[str], latent_attention: bool = False) -> dict[str, Any]:
    """The engine's arguments that go with `environment`. The backend of latent attention vLLM takes from there."""
    if engine not in ENGINES:
        return {}
    chosen: dict[str, Any] = {}
    for family, switch in ENGINES[engine].families.items():
        chosen |= switch.arguments_on if family in families else switch.arguments_off
    if engine == "vllm" and latent_attention:
        del chosen["attention_backend"]
    return chosen
