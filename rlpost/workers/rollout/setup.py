"""What one engine process starts with: its environment, with every AITER switch decided, at the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlpost import aiter
from rlpost.hazards import Situation, examine
from rlpost.platform import Platform
from rlpost.workers.config import AiterKernelsConfig, RolloutConfig
from rlpost.workers.model import ModelInfo


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineSetup:
    """Attributes:
    cfg: the `rollout` section with each AITER switch at on or off.
    env: complete before the engine is imported, devices aside.
    warnings: for the user.
    hazards: names of the rows of `rlpost.hazards` that apply.
    """

    cfg: RolloutConfig
    env: dict[str, str]
    warnings: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()


def engine_setup(cfg: RolloutConfig, model: ModelInfo, here: Platform, environ: Mapping[str, str]) -> EngineSetup:
    """Decide about AITER and its hazards for the engine of `cfg` on `here`; `environ` is the driver's.

    Raises:
        ValueError: a switch that cannot be had, or a hazard that must be refused; says what to change.
    """
    wanted, warnings = _wanted(cfg, here)
    if here.kind != "rocm":
        return EngineSetup(cfg=with_families(cfg, frozenset()), env=here.engine_env(cfg.name))
    findings = examine(_situation(cfg, model, here, environ, wanted))
    if findings.refusals:
        raise ValueError("\n".join(findings.refusals))
    families = aiter.closure(cfg.name, findings.families) if findings.families else frozenset()
    switches = aiter.environment(cfg.name, families)
    warnings += [
        f"{name}={environ[name]} was exported, but rollout.aiter decides: {name}={value}"
        for name, value in switches.items()
        if environ.get(name, value) != value
    ]
    return EngineSetup(
        cfg=with_families(cfg, families),
        env=here.engine_env(cfg.name) | switches | findings.env,
        warnings=(*warnings, *findings.warnings),
        hazards=tuple(row.name for row in findings.rows),
    )


def with_families(cfg: RolloutConfig, families: frozenset[str]) -> RolloutConfig:
    """`cfg` with exactly these AITER families on."""
    switches = {family: "on" if family in families else "off" for family in aiter.FAMILIES}
    return replace(cfg, aiter="on" if families else "off", aiter_kernels=AiterKernelsConfig(**switches))


def _wanted(cfg: RolloutConfig, here: Platform) -> tuple[frozenset[str], list[str]]:
    """The families that the config asks for, and what the user should know."""
    keys = ["aiter=on"] if cfg.aiter == "on" else [f"aiter_kernels.{f}=on" for f in cfg.aiter_kernels.set_to("on")]
    if keys and (here.kind != "rocm" or cfg.name not in aiter.ENGINES):
        raise ValueError(
            f"rollout.{keys[0]} with rollout={cfg.name} on {here.kind}: AITER is for {' and '.join(aiter.ENGINES)} "
            "under ROCm; leave it at auto"
        )
    if keys and not here.has_aiter:
        raise ValueError(
            f"rollout.{keys[0]}: the package aiter is not installed (docs/rocm.md says how), or leave it at auto"
        )
    if here.kind != "rocm" or cfg.aiter == "off" or cfg.name not in aiter.ENGINES:
        return frozenset(), []
    if not here.has_aiter:
        return frozenset(), ["AITER is off: the package aiter is not installed (docs/rocm.md says how)"]
    families = frozenset(aiter.FAMILIES) - cfg.aiter_kernels.set_to("off")
    governed = frozenset(aiter.FAMILIES) - frozenset(aiter.ENGINES[cfg.name].families)
    if families and not governed <= families:
        off = sorted(governed - families)[0]
        raise ValueError(
            f"rollout.aiter_kernels.{off}=off: {cfg.name} has no switch for {off} alone, only for "
            f"{', '.join(sorted(aiter.ENGINES[cfg.name].families))}; set rollout.aiter=off to turn all off"
        )
    return families, []


def _situation(
    cfg: RolloutConfig, model: ModelInfo, here: Platform, environ: Mapping[str, str], families: frozenset[str]
) -> Situation:
    shape, extra = model.shape, cfg.engine_kwargs
    return Situation(
        arch=here.arch,
        hip=here.hip,
        env=environ,
        engine=cfg.name,
        families=families,
        insisted=cfg.aiter_kernels.set_to("on"),
        dtype=str(here.dtype(cfg.dtype)).removeprefix("torch."),
        sleep=cfg.free_cache_engine,
        head_dim=shape.head_dim,
        num_kv_heads=shape.num_kv_heads // cfg.tensor_model_parallel_size,
        num_experts=shape.num_experts,
        latent_attention=shape.latent_attention,
        quantized=bool(extra.get("quantization")),
        expert_parallel=_spreads_experts(extra),
    )


def _spreads_experts(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether the engine's own arguments ask for expert parallelism: vLLM's name for it, and SGLang's."""
    return bool(engine_kwargs.get("enable_expert_parallel")) or engine_kwargs.get("ep_size", 1) > 1
