"""Runs a bundle's step again, in this process, on one device; `python -m rlpost.tools.replay` starts it as a child."""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlpost.algos.algorithm import Algorithm
from rlpost.batch import Batch
from rlpost.metrics import Metrics, merge, scalars
from rlpost.platform import platform
from rlpost.tools.replays.probe import Finding, Probe
from rlpost.trainer.nonfinite import faults
from rlpost.trainer.replay import WEIGHTS, Bundle
from rlpost.workers.dispatch import InferWork, TrainWork, plan_train
from rlpost.workers.engine.base import MicroLoss, Output
from rlpost.workers.engine.fsdp import FSDPEngine
from rlpost.workers.engine.optim import local
from rlpost.workers.group import ROLE_OF_COLUMN, shuffle_seed
from rlpost.workers.model_worker import ModelWorker, WorkerSetup

RESULT, GRADIENTS = "result.json", "gradients.safetensors"


@dataclass(slots=True, frozen=True, kw_only=True)
class Changes:
    """What differs from the run; None: as it was.

    Attributes:
        dtype: `actor.dtype`, `critic.dtype`.
        attention: `model.attn_implementation`.
        model: folder of the checkpoint that the run started from, where it lies elsewhere here.
    """

    dtype: str | None = None
    attention: str | None = None
    model: str | None = None


def changed(setup: WorkerSetup, changes: Changes) -> WorkerSetup:
    """`setup` for one rank, with the changes; nothing is offloaded, since nothing shares its device."""
    for cfg in (setup.actor, setup.critic):
        if cfg is not None:
            cfg.ppo_max_token_len_per_gpu *= cfg.ulysses_sequence_parallel_size
            cfg.ulysses_sequence_parallel_size, cfg.fsdp.fsdp_size = 1, -1
            cfg.dtype = changes.dtype or cfg.dtype
    setup.model_cfg.compile = "off"  # a compiled layer runs none of the probe's hooks
    setup.model_cfg.attn_implementation = changes.attention or setup.model_cfg.attn_implementation
    if changes.model is not None:
        setup.model = dataclasses.replace(setup.model, path=changes.model, tokenizer_path=changes.model)
    return setup


def rerun(bundle: Bundle, changes: Changes, out: Path) -> None:
    """Run the step's updates from the saved weights; `out` gets findings and metrics, and each role's first gradient.

    Where a column of the batch was not finite there is nothing to train: if a role computed it, that is done again.
    """
    batch, fault = bundle.batch(), bundle.fault
    findings = [Finding("column", found.column or "", found.what) for found in faults(batch)]
    again = ROLE_OF_COLUMN.get(findings[0].name) if findings else None
    if findings and again is None:
        _write(out, findings, {}, {})
        return
    worker = _start(bundle, changes, needs_ref=again == "ref")
    metrics = Metrics()
    gradients: dict[str, Tensor] = {}
    if again is not None:
        findings += infer(worker, again, batch)
    else:
        for role in bundle.roles:
            work = _plan(worker, role, bundle.algorithm(), batch, bundle.step)
            if fault is not None:
                work = TrainWork(work.rows, work.steps[fault.update : fault.update + 1])
            found, reported, first = train(worker, role, work, bundle.algorithm())
            findings, metrics, gradients = findings + found, merge([metrics, reported]), gradients | first
    worker.shutdown()
    _write(out, findings, scalars(metrics), gradients)


def infer(worker: ModelWorker, role: str, batch: Batch) -> list[Finding]:
    """Compute a role's column again, row by row, up to the first row in which something is not finite."""
    name = "actor" if role == "ref" and not worker.setup.has_own_ref else role
    with closing(Probe(worker.engines[name].model)) as probe:
        for row in range(len(batch)):
            one = batch.select([row])
            worker.infer(role, InferWork(probe.begin(one), [[0]]))
            if probe.findings:
                break
    return probe.findings


def train(
    worker: ModelWorker, role: str, work: TrainWork, algorithm: Algorithm
) -> tuple[list[Finding], Metrics, dict[str, Tensor]]:
    """The updates of `work`: findings and gradients (before clipping) of the first, metrics of all as the run has them.

    Gradients are float32 on the host, by `<role>/<parameter>`.
    """
    engine = worker.engines[role]
    loss: MicroLoss = algorithm.value_loss if role == "critic" else algorithm.policy_loss
    first, *others = work.steps
    findings, metrics, gradients = _watch(engine, work.micro_batches(first), loss)
    parts = [metrics]
    for step in others:
        if engine.skipped:
            break
        parts.append(engine.train_step(work.micro_batches(step), loss))
    named = {name if "/" in name else f"{role}/{name}": metric for name, metric in merge(parts).items()}
    return findings, named, {f"{role}/{name}": gradient for name, gradient in gradients.items()}


def _watch(
    engine: FSDPEngine, micro_batches: list[Batch], loss: MicroLoss
) -> tuple[list[Finding], Metrics, dict[str, Tensor]]:
    """An update like `FSDPEngine.train_step`, with what its last try finds and its gradient, unscaled, by parameter."""
    own = None
    while own is None:
        with closing(Probe(engine.model)) as probe:
            parts = engine.accumulate(micro_batches, _watched(loss, probe), begin=probe.begin)
            probe.gradients()
        gradients = {
            name.removeprefix("model."): local(parameter.grad).to("cpu", torch.float32, copy=True) / engine.scaler.scale
            for name, parameter in engine.model.named_parameters()
            if parameter.grad is not None
        }
        own = engine.update()
    return probe.findings, merge([*parts, own]), gradients


def _watched(loss: MicroLoss, probe: Probe) -> MicroLoss:
    def watched(micro: Batch, output: Output) -> tuple[Tensor, Metrics]:
        share, metrics = loss(micro, output)
        probe.loss(micro, output, share)
        return share, metrics

    return watched


def _start(bundle: Bundle, changes: Changes, needs_ref: bool) -> ModelWorker:
    setup = changed(bundle.setup(), changes)
    if not needs_ref:
        setup.ref = None
    torch.manual_seed(setup.seed)
    worker = ModelWorker(0, 1)
    worker.connect(f"file://{tempfile.mkdtemp()}/store", 600.0)
    worker.build(setup)
    worker.load(bundle.folder / WEIGHTS)
    return worker


def _plan(worker: ModelWorker, role: str, algorithm: Algorithm, batch: Batch, step: int) -> TrainWork:
    """The mini-batches of the run, for one rank."""
    max_tokens, key = worker.setup.budget(role)
    (work,) = plan_train(
        batch,
        worker.setup.role_config(role),
        lambda mask, cu_seqlens: algorithm.loss_weights(role, mask, cu_seqlens),
        dp_size=1,
        max_tokens=max_tokens,
        key=key,
        seed=shuffle_seed(worker.setup.seed, step),
    )
    return work


def _write(out: Path, findings: Sequence[Finding], metrics: dict[str, float], gradients: dict[str, Tensor]) -> None:
    save_file(gradients, out / GRADIENTS)
    result: dict[str, Any] = {"findings": [dataclasses.asdict(found) for found in findings], "metrics": metrics}
    result["device"] = platform().device_name()
    (out / RESULT).write_text(json.dumps(result))


def main() -> None:
    """`rerun BUNDLE OUT` with changes as options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    for field in dataclasses.fields(Changes):
        parser.add_argument(f"--{field.name}")
    options = vars(parser.parse_args())
    bundle, out = Bundle.read(options.pop("bundle")), options.pop("out")
    rerun(bundle, Changes(**options), out)


if __name__ == "__main__":
    main()
