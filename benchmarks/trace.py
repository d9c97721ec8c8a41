"""Where the wall time of one traced step went: device work by phase and kernel, and the device's idle time."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.common import markdown
from rlpost.platform import platform

STEP = "rlpost.step"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CLASSES = {  # the first whose pattern is found in a kernel's name
    "collective": r"nccl|rccl",
    "attention": r"flash|fmha|attention",
    "matrix product": r"gemm|cutlass|nvjet|xmma|cublas|Cijk|splitK|aten::mm$",
    "optimizer, foreach": r"multi_tensor|adam",
    "compiled (triton)": r"^triton",
    "copy": r"Memcpy|Memset|copy",
    "reduction": r"reduce|softmax|norm",
    "elementwise": r"elementwise|index|gather|scatter|cat|fill",
}


@dataclass(slots=True)
class Span:
    """One event of a trace, microseconds."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """Its duration."""
        return self.end - self.start


def record(step: Callable[[], Any], path: Path) -> None:
    """Run `step` under the profiler and write its Chrome trace."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if platform().kind != "cpu" else [])
    with torch.profiler.profile(activities=activities) as profiler:
        platform().synchronize()
        with torch.profiler.record_function(STEP):
            step()
            platform().synchronize()
    profiler.export_chrome_trace(str(path))


def summarize(path: Path, num_top: int = 30) -> str:
    """Markdown: the account of the wall time by phase, by kind of kernel, and the kernels that took most."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    phases = [_span(e) for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("rlpost.")]
    whole = next(p for p in phases if p.name == STEP)
    launches = {e["args"]["correlation"]: e["ts"] for e in events if "correlation" in e.get("args", {}) and _host(e)}
    work = [(_span(e), launches.get(e["args"].get("correlation"))) for e in events if e.get("cat") in DEVICE_WORK]
    if not work:  # a CPU: every operator counts for the time that its own operators do not take
        work = [(span, span.start) for span in _self_times([_span(e) for e in events if e.get("cat") == "cpu_op"])]
    work = sorted(((s, at) for s, at in work if whole.start <= s.start < whole.end), key=lambda pair: pair[0].start)
    by_phase, by_class, by_name, idle = _account(work, phases, whole)
    waits = [_span(e) for e in events if re.search(r"Synchronize|cudaMemcpy$|hipMemcpy$", e["name"]) and _host(e)]
    blocked = sum(s.length for s in waits)
    lines = [
        f"Wall time {whole.length / 1e3:.1f} ms under the profiler: device busy "
        f"{(whole.length - idle) / whole.length:.1%}, idle {idle / whole.length:.1%}. {len(work)} pieces of device "
        f"work; {len(waits)} waits of the host, {blocked / 1e3:.1f} ms in all.",
        markdown(by_phase),
        markdown(by_class[:num_top]),
        markdown(by_name[:num_top]),
    ]
    return "\n\n".join(lines)


def _account(work: list[tuple[Span, float | None]], phases: list[Span], whole: Span) -> tuple[list, list, list, float]:
    """Rows by phase, by class and by name, and the device's idle time, us.

    Work belongs to the innermost phase that its launch lies in; a gap to the phase of the work that ended it.
    """
    busy: dict[str, float] = defaultdict(float)
    gaps: dict[str, float] = defaultdict(float)
    classes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    reached, idle = whole.start, 0.0
    nested = sorted(phases, key=lambda p: p.length)
    for span, launched in work:
        at = span.start if launched is None else launched
        phase = next((p.name for p in nested if p.start <= at < p.end), STEP)
        if span.start > reached:
            gaps[phase] += span.start - reached
            idle += span.start - reached
        fresh = max(0.0, min(span.end, whole.end) - max(span.start, reached))  # streams overlap: counted once
        reached = max(reached, span.end)
        busy[phase] += fresh
        kind = f"{phase.removeprefix('rlpost.')}: {_class(span.name)}"
        for table, key in ((classes, kind), (names, span.name)):
            table[key][0] += span.length
            table[key][1] += 1
    rest = max(0.0, whole.end - reached)
    gaps["(end)"] += rest
    host = _host_times(phases)
    rows = [
        {
            "phase": name.removeprefix("rlpost."),
            "host_ms": host.get(name, 0.0) / 1e3,
            "device_ms": busy[name] / 1e3,
            "device_idle_ms": gaps[name] / 1e3,
            "share_of_wall": f"{(busy[name] + gaps[name]) / whole.length:.1%}",
        }
        for name in dict.fromkeys([*host, *busy, *gaps])
    ]
    return rows, _table(classes, whole, "kind"), _table(names, whole, "kernel"), idle + rest


def _table(found: dict[str, list[float]], whole: Span, title: str) -> list[dict[str, Any]]:
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [
        {
            title: name[:90].replace("|", "/"),
            "device_ms": total / 1e3,
            "calls": int(calls),
            "share_of_wall": f"{total / whole.length:.1%}",
        }
        for name, (total, calls) in ordered
    ]


def _host_times(phases: list[Span]) -> dict[str, float]:
    """Time of each phase on the host without the phases inside it, us."""
    times: dict[str, float] = defaultdict(float)
    for phase in phases:
        inside = [p for p in phases if p is not phase and phase.start <= p.start and p.end <= phase.end]
        direct = [p for p in inside if not any(q is not p and q.start <= p.start and p.end <= q.end for q in inside)]
        times[phase.name] += phase.length - sum(p.length for p in direct)
    return dict(times)


def _self_times(spans: list[Span]) -> list[Span]:
    """Leaves of nested spans: the pieces of time in which no inner span runs, under the name of the innermost."""
    pieces: list[Span] = []
    stack: list[Span] = []
    reached = 0.0

    def close(until: float) -> None:
        nonlocal reached
        while stack and stack[-1].end <= until:
            top = stack.pop()
            if top.end > reached:
                pieces.append(Span(top.name, max(reached, top.start), top.end))
                reached = top.end

    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        close(span.start)
        if stack and span.start > reached:
            pieces.append(Span(stack[-1].name, reached, span.start))
        reached = max(reached, span.start)
        stack.append(span)
    close(float("inf"))
    return pieces


def _class(name: str) -> str:
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def _span(event: dict[str, Any]) -> Span:
    return Span(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))


def _host(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver", "hip_runtime")
