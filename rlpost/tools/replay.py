"""Run one training step again: `python -m rlpost.tools.replay BUNDLE`. Where does it first go wrong; is it the same?

A bundle is what a run keeps of a step that was not finite, or of one that it was told to keep
(`trainer.save_replay_steps`). Exit status 0: every number is finite; 1: one is not; 2: it could not be run.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlpost.host import exported
from rlpost.platform import platform
from rlpost.tools.replays.compare import Difference, compare
from rlpost.tools.replays.rerun import GRADIENTS, RESULT
from rlpost.trainer.replay import Bundle

KEYS = ("device", "dtype", "attention", "model")
NUM_SHOWN = 3  # places of one kind
MEANING = {
    "column": "column of the batch",
    "weight": "weight",
    "forward": "output of",
    "loss": "value of",
    "backward": "gradient by the output of",
    "gradient": "gradient of",
}


@dataclass(slots=True, frozen=True)
class Result:
    """Of one rerun: what was not finite in the order of events, metrics as the run names them, the first gradients."""

    backend: str
    device: str
    findings: list[dict[str, str]]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


def parse_backend(text: str) -> dict[str, str]:
    """`device=cpu,dtype=float32` as a mapping; "" is the run's own.

    Raises:
        ValueError: an unknown key or value.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    for key, _, value in pairs:
        if key not in KEYS or not value or (key == "device" and value not in ("cpu", "gpu")):
            raise ValueError(
                f"'{key}={value}': expected device=cpu or gpu, dtype=float32, bfloat16 or float16, "
                "attention=sdpa or another of model.attn_implementation, or model=FOLDER; several with commas between "
                "them"
            )
    return {key: value for key, _, value in pairs}


def rerun(bundle: Path, backend: str) -> Result:
    """Run the bundle in a process of its own, which sees only the devices that it may use.

    Raises:
        ValueError: it cannot be run so; the message is what the process said last.
    """
    changes = parse_backend(backend)
    device = changes.pop("device", None)
    here = platform()
    if device == "gpu" and here.kind == "cpu":
        raise ValueError("device=gpu: torch sees no GPU here")
    env = dict(exported()) | {"GLOO_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        env |= here.visibility_env([])
    with tempfile.TemporaryDirectory() as out:
        options = [f"--{key}={value}" for key, value in changes.items()]
        command = [sys.executable, "-m", "rlpost.tools.replays.rerun", str(bundle), out, *options]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"'{backend}' did not run: {done.stderr.strip()[-2000:]}")
        result = json.loads((Path(out) / RESULT).read_text())
        return Result(backend or "as the run", gradients=load_file(Path(out) / GRADIENTS), **result)


def report(bundle: Bundle, result: Result) -> list[str]:
    """What was found, first things first; of a step that was finite its metrics beside those of the run."""
    fault = bundle.fault
    lines = [f"step {bundle.step}, {'kept on request' if fault is None else fault.what}"]
    lines.append(f"again {result.backend} on {result.device}:")
    for kind, places in groupby(result.findings, key=lambda item: item["where"]):
        of_kind = list(places)
        word = "then" if len(lines) > 2 else "first"
        lines += [f"{word:<6} {MEANING[kind]} {item['name']}: {item['what']}" for item in of_kind[:NUM_SHOWN]]
        lines += [f"{'':<6} and {len(of_kind) - NUM_SHOWN} more of these"] if len(of_kind) > NUM_SHOWN else []
    if not result.findings:
        lines.append("every number is finite" + (" here" if fault else ""))
    if fault is None:
        for name, was in bundle.facts["metrics"].items():
            if name in result.metrics:
                lines.append(f"{name:<40} {result.metrics[name]:< 14.6g} run {was:< 14.6g}")
    return lines


def table(differences: Sequence[Difference], other: str, top: int) -> list[str]:
    """The most different parameters."""
    lines = [f"gradients beside those of {other}:", f"{'relative':>10} {'cosine':>11} {'norm':>10} {'other':>10}"]
    for d in differences[: top + 1]:
        lines.append(f"{d.relative:10.2e} {d.cosine:11.8f} {d.norm:10.3e} {d.other_norm:10.3e}  {d.name}")
    return lines


def main(args: Sequence[str] | None = None) -> int:
    """Rerun, report, compare; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.tools.replay", description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path, help="a folder in <run folder>/replay")
    parser.add_argument("--with", dest="backend", default="", help="such as device=cpu,dtype=float32,attention=sdpa")
    parser.add_argument("--against", help="another backend, or a file of gradients, to compare gradients with")
    parser.add_argument("--save-gradients", type=Path, help="file to write them to, for --against elsewhere")
    parser.add_argument("--top", type=int, default=15, help="parameters shown in a comparison")
    parser.add_argument("--json", action="store_true", help="findings, metrics and differences as JSON")
    options = parser.parse_args(args)
    try:
        bundle = Bundle.read(options.bundle)
        result = rerun(options.bundle, options.backend)
        differences: list[Difference] = []
        if options.against is not None:
            is_file = Path(options.against).is_file()
            others = load_file(options.against) if is_file else rerun(options.bundle, options.against).gradients
            differences = compare(result.gradients, others)
    except ValueError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    if options.save_gradients is not None:
        save_file(result.gradients, options.save_gradients)
    _show(options, bundle, result, differences)
    return 1 if result.findings else 0


def _show(options: argparse.Namespace, bundle: Bundle, result: Result, differences: Sequence[Difference]) -> None:
    if options.json:
        shown: dict[str, Any] = {"findings": result.findings, "metrics": result.metrics, "device": result.device}
        print(json.dumps(shown | {"differences": [dataclasses.asdict(d) for d in differences]}))
        return
    print("\n".join(report(bundle, result)))
    if differences:
        print("\n".join(table(differences, options.against or "the run", options.top)))


if __name__ == "__main__":
    sys.exit(main())
