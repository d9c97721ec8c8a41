"""Checkpoints: one folder a step, complete if and only if its manifest is there; written beside and renamed."""

import json
import os
import pickle
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
OBJECTS = "objects.pkl"
OBJECT = "__object__"  # stands in the manifest for an object, with its position in OBJECTS
PREFIX = "global_step_"


class CheckpointStore:
    """`<root>/global_step_<N>/`: what the workers wrote, and `manifest.json` with the driver's own state.

    What JSON cannot hold (groups, prompts) is in `objects.pkl`.
    """

    def __init__(self, root: Path, keep: int | None):
        self.root, self._keep = root, keep

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        folders = [p for p in self.root.glob(f"{PREFIX}*") if (p / MANIFEST).is_file() and _step(p).isdigit()]
        return sorted(folders, key=lambda p: int(_step(p)))

    def set_aside(self, step: int) -> None:
        """Rename checkpoints beyond `step` to `*.old`: a run that starts from there writes another future.

        Kept in place they would count as the newest, both for `keep` and for the next resume.
        """
        for folder in self.complete():
            if int(_step(folder)) > step:
                old = folder.with_suffix(".old")
                shutil.rmtree(old, ignore_errors=True)
                os.replace(folder, old)

    async def save(self, step: int, state: dict[str, Any], write: Callable[[Path], Awaitable[None]]) -> Path:
        """Write checkpoint `step`: `write(folder)` stores the workers' part, then the manifest makes it complete."""
        final = self.root / f"{PREFIX}{step}"
        partial = final.with_suffix(".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        await write(partial)
        objects: list[Any] = []

        def put_aside(value: Any) -> dict[str, int]:
            objects.append(value)
            return {OBJECT: len(objects) - 1}

        manifest = json.dumps({"step": step, **state}, indent=1, default=put_aside)
        if objects:
            _write(partial / OBJECTS, pickle.dumps(objects))
        _write(partial / MANIFEST, manifest.encode())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        if self._keep is not None:
            for old in self.complete()[: -self._keep]:
                shutil.rmtree(old)
        return final

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `trainer.resume` means: None for a fresh start.

        Raises:
            ValueError: a path that holds no complete checkpoint.
        """
        if resume == "never":
            return None
        if resume == "auto":
            found = self.complete()
            return found[-1] if found else None
        folder = Path(resume).expanduser()
        if (folder / MANIFEST).is_file():
            return folder
        inside = CheckpointStore(folder, None).complete() or CheckpointStore(folder / "checkpoints", None).complete()
        if not inside:
            raise ValueError(
                f"trainer.resume={resume}: neither 'auto' nor 'never', and no folder that "
                f"holds a complete checkpoint (one with {MANIFEST})"
            )
        return inside[-1]

    @staticmethod
    def read(folder: Path) -> dict[str, Any]:
        """The driver's state in a checkpoint; tuples come back as lists."""
        path = folder / OBJECTS
        objects = pickle.loads(path.read_bytes()) if path.is_file() else []

        def put_back(value: dict[str, Any]) -> Any:
            return objects[value[OBJECT]] if value.keys() == {OBJECT} else value

        return json.loads((folder / MANIFEST).read_text(), object_hook=put_back)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _step(folder: Path) -> str:
    return folder.name.removeprefix(PREFIX)
