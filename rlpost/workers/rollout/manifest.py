"""What an engine expects of a weight update, and the check that an update brings exactly that."""

import json
from collections.abc import Iterable
from pathlib import Path

from rlpost.registry import near
from rlpost.workers.rollout.base import WeightManifest

Shapes = dict[str, tuple[int, ...]]
_HEAD = "lm_head.weight"


def checkpoint_shapes(folder: str | Path) -> Shapes:
    """Name -> shape of every tensor in a folder of safetensors files, read from their headers.

    Raises:
        ValueError: the folder has no safetensors file.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.path={folder}: holds no *.safetensors file; save the checkpoint as safetensors")
    shapes: Shapes = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def check_manifest(manifest: WeightManifest, expected: Shapes) -> None:
    """Refuse an update that would not write every parameter, or would write one that the engine does not have.

    A head tied to the embedding may be stored in the checkpoint though the trainer sends the shared tensor once.

    Raises:
        ValueError: lists missing and unknown names and wrong shapes.
    """
    missing = sorted(expected.keys() - manifest.tensors.keys() - {_HEAD})
    unknown = sorted(manifest.tensors.keys() - expected.keys() - {_HEAD})
    wrong = [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, (shape, _) in manifest.tensors.items()
        if name in expected and tuple(shape) != tuple(expected[name])
    ]
    problems = [
        *(f"missing: {_some(missing)}" for _ in missing[:1]),
        *(f"unknown: {_some(unknown)} ({near(unknown[0], missing)})" for _ in unknown[:1]),
        *(f"wrong shape: {_some(wrong)}" for _ in wrong[:1]),
    ]
    if problems:
        raise ValueError(
            f"weight update {manifest.version} does not fit the engine's checkpoint; " + "; ".join(problems)
        )


class UpdateLedger:
    """Counts names in one update: each of the manifest's exactly once."""

    def __init__(self, manifest: WeightManifest):
        self._open = set(manifest.tensors)
        self._version = manifest.version

    def take(self, names: Iterable[str]) -> None:
        """Account for one bucket, before it is written.

        Raises:
            ValueError: a name that is not in the manifest or came before.
        """
        names = list(names)
        surplus = [name for name in names if name not in self._open]
        if surplus or len(set(names)) != len(names):
            raise ValueError(
                f"weight update {self._version}: sent twice or not announced: {_some(surplus or sorted(names))}"
            )
        self._open.difference_update(names)

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            ValueError: parameters that never came.
        """
        if self._open:
            raise ValueError(f"weight update {self._version}: never sent: {_some(sorted(self._open))}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
