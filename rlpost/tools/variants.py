"""What to change when engine and trainer disagree, one thing at a time, until they agree."""

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.aiter import FAMILIES
from rlpost.config import Config
from rlpost.tools.agreement import LOADED, STALE, SYNCED, SYNCED_AGAIN, WOKEN, Stage, worst


@dataclass(slots=True, frozen=True, kw_only=True)
class Variant:
    """One suspect and the settings that clear it.

    Attributes:
        name: of the suspect.
        changes: dotted config key -> value.
        engines: to which it applies; empty: all.
        kinds: of platforms to which it applies.
        parts: when this one clears it, more particular suspects to try.
    """

    name: str
    changes: Mapping[str, Any]
    engines: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("cpu", "cuda", "rocm")
    parts: "tuple[Variant, ...]" = ()

    @property
    def settings(self) -> str:
        """The changes as they are typed."""
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


@dataclass(slots=True, frozen=True, kw_only=True)
class Trial:
    """A variant that was run: the worst mean difference, and whether every stage passed; or why it did not run."""

    variant: Variant
    mean: float | None = None
    agrees: bool = False
    error: str = ""


# Precision comes last: in float32 other kernels run throughout, so that it clears several suspects at once.
VARIANTS = [
    Variant(name="sampling settings", changes={"rollout.temperature": 1.0}),
    Variant(name="prefix cache", changes={"rollout.engine_kwargs.enable_prefix_caching": False}, engines=("vllm",)),
    Variant(name="prefix cache", changes={"rollout.engine_kwargs.disable_radix_cache": True}, engines=("sglang",)),
    Variant(
        name="AITER",
        changes={"rollout.aiter": "off"},
        kinds=("rocm",),
        parts=tuple(
            Variant(name=f"AITER {family}", changes={f"rollout.aiter_kernels.{family}": "off"}) for family in FAMILIES
        ),
    ),
    Variant(
        name="captured graphs and compilation of the engine",
        changes={"rollout.enforce_eager": True},
        engines=("vllm", "sglang"),
        kinds=("cuda", "rocm"),
    ),
    Variant(
        name="attention of the engine",
        changes={"rollout.engine_kwargs.attention_backend": "TRITON_ATTN"},
        engines=("vllm",),
        kinds=("cuda",),
    ),
    Variant(
        name="attention of the engine",
        changes={"rollout.engine_kwargs.attention_backend": "triton"},
        engines=("sglang",),
        kinds=("cuda",),
    ),
    Variant(name="attention of the trainer", changes={"model.attn_implementation": "sdpa"}, kinds=("cuda", "rocm")),
    Variant(name="compilation of the trainer", changes={"model.compile": "off"}, kinds=("cuda", "rocm")),
    Variant(name="precision", changes={"rollout.dtype": "float32", "actor.dtype": "float32"}),
]


def changed(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of `cfg` with these keys set."""
    cfg = copy.deepcopy(cfg)
    for key, value in changes.items():
        *path, last = key.split(".")
        node: Any = cfg
        for name in path:
            node = node[name] if isinstance(node, dict) else getattr(node, name)
        if isinstance(node, dict):
            node[last] = value
        else:
            setattr(node, last, value)
    return cfg


def suspects(cfg: Config, kind: str, variants: Sequence[Variant] = VARIANTS) -> list[Variant]:
    """The variants that fit this engine and platform and would change something."""
    return [
        v
        for v in variants
        if kind in v.kinds and cfg.rollout.name in (v.engines or (cfg.rollout.name,)) and changed(cfg, v.changes) != cfg
    ]


Run = Callable[[Config], Awaitable[list[Stage]]]


async def narrow(cfg: Config, variants: Sequence[Variant], run: Run) -> list[Trial]:
    """Run one variant after the other, with engine and trainer anew, until one agrees; then its parts."""
    trials: list[Trial] = []
    for variant in variants:
        trials.append(await attempt(cfg, variant, run))
        if trials[-1].agrees:
            return trials + await narrow(cfg, variant.parts, run)
    return trials


async def attempt(cfg: Config, variant: Variant, run: Run) -> Trial:
    """Run one variant; what this engine refuses is no reason not to try the next."""
    try:
        stages = await run(changed(cfg, variant.changes))
    except Exception as error:  # engines raise many kinds
        return Trial(variant=variant, error=f"{type(error).__name__}: {error}")
    return Trial(variant=variant, mean=worst(stages), agrees=all(stage.passed for stage in stages))


def needs_trials(stages: Sequence[Stage]) -> bool:
    """Whether engine and trainer disagree for a reason that the gate's own trials do not prove."""
    return any(not stage.passed and stage.expected and not stage.proven for stage in stages)


def conclude(stages: Sequence[Stage], trials: Sequence[Trial]) -> str:
    """What is wrong, in a sentence; "" where nothing is."""
    wrong = [stage for stage in stages if not stage.passed]
    if not wrong:
        return ""
    cleared = [trial for trial in trials if trial.agrees]
    if cleared:
        last = cleared[-1]  # the most particular
        return f"{last.variant.name}: with {last.variant.settings} it is {last.mean:.2e} and every stage passes"
    first = wrong[0]
    if first.name == STALE:
        return (
            f"weights that were scaled went unnoticed: a mean of {first.parity.mean:.2e} over "
            f"{first.parity.num_tokens} tokens is below {first.limit:.2e}. Compare more tokens "
            "(trainer.parity_probe_size), or lower trainer.logprob_diff_limit"
        )
    if first.cause.startswith("stale weights:"):
        return f"{WHERE[first.name]} ({first.cause})"
    return first.cause


WHERE = {
    LOADED: "the engine loaded other weights than the trainer; a sync cures it, and training syncs before it samples",
    SYNCED: "the weight sync: it leaves the engine with other weights than the trainer's",
    WOKEN: "sleep: the engine wakes with other weights than it had. Set rollout.free_cache_engine=false",
    SYNCED_AGAIN: "the weight sync: changed weights do not all reach the engine",
}
