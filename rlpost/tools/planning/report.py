"""A plan as text and as JSON."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.tools.planning.advice import Advice, Faster
from rlpost.tools.planning.hardware import GIB
from rlpost.tools.planning.memory import Memory, Phase
from rlpost.tools.planning.run import Run
from rlpost.tools.planning.steps import StepTime

QUICKSTART_TOKENS = 64  # what its model is made for


@dataclass(slots=True, kw_only=True)
class Plan:
    """All that is predicted of a run."""

    run: Run
    memory: Memory
    advice: list[Advice]
    step: StepTime | None
    faster: list[Faster]

    @property
    def fits(self) -> bool:
        """Whether every phase does."""
        return self.memory.fits


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything in bytes and seconds."""
    run = plan.run
    return {
        "fits": plan.fits,
        "run": _facts(run),
        "phases": [_phase_json(phase) for phase in plan.memory.phases],
        "host_bytes": plan.memory.host,
        "engine": dataclasses.asdict(plan.memory.engine),
        "step": None if plan.step is None else dataclasses.asdict(plan.step),
        "advice": [dataclasses.asdict(advice) for advice in plan.advice],
        "faster": [dataclasses.asdict(change) for change in plan.faster],
        "hardware": dataclasses.asdict(run.device),
        "efficiency": dataclasses.asdict(run.efficiency),
    }


def as_text(plan: Plan) -> str:
    """Tables in Markdown, and what was assumed."""
    parts = [_headline(plan.run), _memory_table(plan.memory), _problems(plan), _host(plan), _step(plan)]
    return "\n\n".join([part for part in parts if part] + [_assumptions(plan)])


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "devices": phase.devices,
        "verdict": phase.verdict,
        "problem": phase.problem,
        "total_bytes": phase.total_bytes,
        "trainer_bytes": phase.trainer_bytes,
        "capacity_bytes": phase.capacity_bytes,
        "parts": phase.parts,
    }


def _facts(run: Run) -> dict[str, Any]:
    pools = run.pools
    return {
        "model": run.shape.name,
        "parameters": run.shape.parameters,
        "active_parameters": run.shape.active_parameters,
        "hardware": run.device.name,
        "gpus": pools.total,
        "train_gpus": pools.train,
        "rollout_gpus": pools.rollout,
        "shared": pools.shared,
        "shards": run.shards,
        "tensor_parallel": run.tensor_parallel,
        "engines_per_device": run.engines_per_device,
        "answers": run.rows,
        "updates": run.updates,
        "prompt_tokens": run.prompt_tokens,
        "mean_length": run.mean_length,
        "tokens": run.tokens,
    }


def _headline(run: Run) -> str:
    pools, shape, cfg = run.pools, run.shape, run.cfg
    size = f"{shape.parameters / 1e9:.3g}e9 parameters"
    if shape.experts:
        size += f", {shape.active_parameters / 1e9:.3g}e9 active"
    where = "shared" if pools.shared else f"{pools.train} train, {pools.rollout} roll out"
    sharing = f", {run.engines_per_device} on each GPU" if run.engines_per_device > 1 else ""
    return "\n".join(
        [
            f"{shape.name} ({size}) on {pools.total} {run.device.name} ({where}; {run.shards} shards, engines of "
            f"{run.tensor_parallel}{sharing}), trainer={cfg.trainer.name} algo={cfg.algo.name} "
            f"rollout={cfg.rollout.name}",
            f"{cfg.data.train_batch_size} prompts x {cfg.rollout.n} answers a step, {run.prompt_tokens} + "
            f"{run.mean_length:g} tokens each, at most {run.longest}; {run.updates} updates",
        ]
    )


def _memory_table(memory: Memory) -> str:
    """Components by phase, GiB a device."""
    phases = memory.phases
    names = list(dict.fromkeys(name for phase in phases for name in phase.parts))
    title = [p.name if p.devices == "all" else f"{p.name} ({p.devices})" for p in phases]
    rows = [[name, *(_gib(phase.parts.get(name)) for phase in phases)] for name in names]
    rows.append(["**sum**", *(f"**{_gib(phase.total_bytes)}**" for phase in phases)])
    rows.append(["trainer's own", *(_gib(phase.trainer_bytes or None) for phase in phases)])
    rows.append([f"of {_gib(phases[0].capacity_bytes)}", *(f"{p.verdict}, {p.share:.0%}" for p in phases)])
    return _table(["GiB a device, peak", *title], rows)


def _problems(plan: Plan) -> str:
    lines = [f"- {phase.name}: {phase.problem}" for phase in plan.memory.phases if phase.problem]
    if not plan.fits:
        lines += ["To make it fit, one of a phase's lines:", *(f"- {advice}" for advice in plan.advice)]
        named = {advice.phase for advice in plan.advice}
        missing = [p.name for p in plan.memory.phases if not p.fits and p.name not in named]
        lines += [f"- {name}: no key makes it fit; take a smaller model or larger devices" for name in missing]
    return "\n".join(lines)


def _host(plan: Plan) -> str:
    parts = plan.memory.host
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    return f"Host memory, each of {plan.run.cfg.cluster.nnodes}: {_gib(sum(parts.values()))} GiB ({listed})"


def _step(plan: Plan) -> str:
    step = plan.step
    if step is None:
        return ""
    rows = [[name, f"{seconds:.3g}", f"{seconds / step.step_s:.0%}"] for name, seconds in step.phases.items()]
    rows.append(["**step**", f"**{step.step_s:.3g}**", ""])
    title = "waits for rollout" if step.trainer_idle is not None else "generate"
    rows[0][0] = title
    text = _table(["phase", "seconds", "share"], rows)
    text += (
        f"\n\n{step.tokens_per_s:,.0f} tokens/s ({step.tokens_per_s_per_device:,.0f} a GPU), update at MFU "
        f"{step.mfu:.2f}; engines decode up to {step.slots} sequences each, bound by the {step.bound}"
    )
    if step.trainer_idle is not None and step.rollout_idle is not None:
        text += f"; trainer idle {step.trainer_idle:.0%}, rollout idle {step.rollout_idle:.0%}"
    if plan.faster:
        text += "\n\nFaster, each by itself:\n" + "\n".join(f"- {change}" for change in plan.faster)
    return text


def _assumptions(plan: Plan) -> str:
    run = plan.run
    device, constants = run.device, dataclasses.asdict(run.efficiency)
    values = " ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in
                      constants.items())  # fmt: skip
    lengths = []
    if run.workload.mean_length is None:
        lengths.append(f"mean_length={run.mean_length:g} (half of data.max_response_length)")
    if run.workload.prompt_tokens is None:
        lengths.append(f"prompt_tokens={run.prompt_tokens} (half of data.max_prompt_length)")
    lines = [
        f"Assumed: {device.name} {device.memory_bytes / GIB:.0f} GiB, {device.memory_bytes_s / 1e12:.2f} TB/s, "
        f"{device.flops_s / 1e12:.0f} TFLOP/s bf16, link {device.link_bytes_s / 1e9:.0f} GB/s, network "
        f"{device.network_bytes_s / 1e9:.0f} GB/s [{device.source}]",
        f"Lengths: {'; '.join([*lengths, f'tail={run.workload.tail:g}', f'keep_rate={run.workload.keep_rate:g}'])}",
        f"Constants: {values}",
        *(f"Note: {note}" for note in _notes(run)),
    ]
    return "\n".join(lines)


def _notes(run: Run) -> list[str]:
    notes = []
    if run.longest <= QUICKSTART_TOKENS:
        notes.append(
            f"sequences of at most {run.longest} tokens and {run.cfg.data.train_batch_size} prompts a step are the "
            "quickstart's: set data.max_prompt_length, data.max_response_length and data.train_batch_size to yours"
        )
    if run.shape.linear_layers:
        notes.append("what linear attention keeps is an estimate; no measurement stands behind it")
    if run.shape.experts:
        notes.append("experts are taken to be equally loaded, on every rank")
    if run.is_async and run.pools.shared:
        notes.append("two pools on the same GPUs are timed as if they took turns")
    return notes


def _table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [title, *rows]) for i in range(len(title))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = cells
        padded = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(title), rule, *(line(row) for row in rows)])


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"
