"""Replay bundles: one training step as files, enough to run it again elsewhere (`python -m rlpost.tools.replay`).

`<run folder>/replay/<name>/`: `bundle.json` (what happened, config, versions, seeds, recorded metrics), written last;
`batch.safetensors` (every column of the step's batch); `weights/` (what a checkpoint holds of the trained roles: their
weights, optimizer and random states, as they were when the step, or the update that failed, began).
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from rlpost import config
from rlpost.algos.algorithm import Algorithm
from rlpost.batch import Batch
from rlpost.config import Config
from rlpost.trainer.about import about
from rlpost.trainer.nonfinite import Fault
from rlpost.workers.model import ModelInfo, ModelShape
from rlpost.workers.model_worker import WorkerSetup

BUNDLE, BATCH, WEIGHTS = "bundle.json", "batch.safetensors", "weights"
REPLAY = "replay"  # the folder of all bundles, in the run folder
FORMAT = 2
# of the config, what a step depends on
SECTIONS = {name: config.SECTIONS[name] for name in ("algo", "model", "actor", "critic", "ref")}

Save = Callable[[Path], Awaitable[Any]]


def describe(cfg: Config, model: ModelInfo, total_updates: Mapping[str, int]) -> dict[str, Any]:
    """What all bundles of a run say, without secrets; paths of models must be local folders by now."""
    return {
        **about(cfg),
        "model": dataclasses.asdict(model),
        "temperature": cfg.rollout.temperature,
        "total_updates": dict(total_updates),
        "seed": cfg.seed,
        "algorithm": {
            "max_response_length": cfg.data.max_response_length,
            "critic_warmup": cfg.trainer.critic_warmup,
            "cliprange_value": cfg.critic.cliprange_value,
        },
    }


class ReplayStore:
    """The bundles of one run.

    Args:
        root: their folder.
        about: see `describe`.
        keep: how many bundles of steps that were not finite are kept, the newest; None: all. Bundles that were asked
            for are never removed.
    """

    def __init__(self, root: Path, about: Mapping[str, Any], keep: int | None = None):
        self._root, self._about, self._keep = root, about, keep

    async def begin(self, name: str, save: Save) -> None:
        """Start bundle `name`: `save(folder)` writes the weights as they are now."""
        partial = self._partial(name)
        shutil.rmtree(partial, ignore_errors=True)
        (partial / WEIGHTS).mkdir(parents=True)
        await save(partial / WEIGHTS)

    def finish(
        self,
        name: str,
        step: int,
        batch: Batch,
        roles: Sequence[str],
        metrics: Mapping[str, float],
        fault: Fault | None = None,
    ) -> Path:
        """Complete what `begin` started; returns the bundle's folder.

        Args:
            name: of the bundle.
            step: of the trainer.
            batch: as it was trained.
            roles: that the step trains, in order.
            metrics: that training reported.
            fault: what was not finite.
        """
        partial, final = self._partial(name), self._root / name
        save_file({"cu_seqlens": batch.cu_seqlens} | _contiguous(batch.columns()), partial / BATCH)
        facts = {"roles": list(roles), "metrics": dict(metrics), "fault": fault and dataclasses.asdict(fault)}
        (partial / BUNDLE).write_text(json.dumps({"format": FORMAT, "step": step, **facts, **self._about}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        return final

    async def keep_faulty(
        self, step: int, batch: Batch, roles: Sequence[str], metrics: Mapping[str, float], fault: Fault, save: Save
    ) -> Path:
        """The bundle of a step that was not finite; the oldest beyond `keep` of them are removed."""
        name = f"nonfinite_step_{step}"
        await self.begin(name, save)
        folder = self.finish(name, step, batch, roles, metrics, fault)
        if self._keep is not None:
            complete = [path.parent for path in self._root.glob(f"nonfinite_step_*/{BUNDLE}")]
            for old in sorted(complete, key=lambda path: int(path.name.rpartition("_")[2]))[: -self._keep]:
                shutil.rmtree(old)
        return folder

    def _partial(self, name: str) -> Path:
        return self._root / f"{name}.tmp"


@dataclasses.dataclass(slots=True, frozen=True)
class Bundle:
    """A bundle as read: `facts` is its JSON."""

    folder: Path
    facts: Mapping[str, Any]

    @staticmethod
    def read(folder: Path) -> "Bundle":
        """Of the folder that a run names.

        Raises:
            ValueError: it is none, or of another format.
        """
        if not (folder / BUNDLE).is_file():
            raise ValueError(f"{folder}: no replay bundle (no {BUNDLE} in it); they lie in <run folder>/replay/")
        facts = json.loads((folder / BUNDLE).read_text())
        if facts["format"] != FORMAT:
            raise ValueError(f"{folder}: a bundle of format {facts['format']}, this version reads {FORMAT}")
        return Bundle(folder, facts)

    @property
    def step(self) -> int:
        """Of the trainer."""
        return self.facts["step"]

    @property
    def fault(self) -> Fault | None:
        """What was not finite; None: nothing, the bundle was asked for."""
        return None if self.facts["fault"] is None else Fault(**self.facts["fault"])

    @property
    def roles(self) -> list[str]:
        """Whose updates are to be run."""
        fault = self.fault
        return self.facts["roles"] if fault is None or fault.role is None else [fault.role]

    def batch(self) -> Batch:
        """Of the step."""
        columns = load_file(self.folder / BATCH)
        return Batch(columns.pop("cu_seqlens"), columns)

    def algorithm(self) -> Algorithm:
        """The learning rule."""
        return Algorithm(self.section("algo"), **self.facts["algorithm"])

    def section(self, name: str) -> Any:
        """A section of the config."""
        saved = OmegaConf.create(self.facts["config"][name])
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SECTIONS[name]), saved))

    def setup(self) -> WorkerSetup:
        """Of one trainer rank with every role that trains."""
        model = self.facts["model"]
        info = ModelInfo(
            **model | {"shape": ModelShape(**model["shape"]), "stop_token_ids": tuple(model["stop_token_ids"])}
        )
        return WorkerSetup(
            model=info,
            model_cfg=self.section("model"),
            actor=self.section("actor"),
            ref=self.section("ref"),
            critic=self.section("critic") if "critic" in self.facts["roles"] else None,
            temperature=self.facts["temperature"],
            total_updates=self.facts["total_updates"],
            seed=self.facts["seed"],
        )


def _contiguous(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values.contiguous() for name, values in columns.items()}
