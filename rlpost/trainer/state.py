"""Checkpoints: one folder a step, complete if and only if its manifest is there; written beside and renamed.

The manifest, written last, names every other file with its size and digest, and holds the driver's own state, the
config, the versions of the software and the ledger's mark. Nothing in a checkpoint is pickled.
"""

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from rlpost.files import DiskFull, file_digests, is_disk_full, sync, write_synced
from rlpost.trainer.objects import Packer, Unpacker

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "global_step_"
FORMAT = 1

Write = Callable[[Path], Awaitable[Mapping[str, str]]]  # folder -> digests by file name, of the files that have one


class CheckpointStore:
    """`<root>/global_step_<N>/`: what the workers wrote, `manifest.json`, and the prompts and groups it refers to.

    Args:
        root: the folder of all checkpoints.
        keep: how many complete ones are kept, the newest; None: all.
        about: more to say in each manifest: config, versions.
    """

    def __init__(self, root: Path, keep: int | None, about: Mapping[str, Any] | None = None):
        self.root, self._keep, self._about = root, keep, about or {}

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
                _set_aside(folder)

    async def save(self, step: int, state: dict[str, Any], write: Write) -> Path:
        """Write checkpoint `step`: `write(folder)` stores the workers' part, then the manifest makes it complete.

        Files of which `write` gives no digest are read for it. Older checkpoints are removed only afterwards.

        Raises:
            DiskFull: before anything is written if there is not room for as much as the last checkpoint took, or on
                the way; what was written is removed, and no other checkpoint is touched.
            ValueError: a state that cannot be stored.
        """
        final = self.root / f"{PREFIX}{step}"
        partial = final.with_suffix(".tmp")
        for left in self.root.glob(f"{PREFIX}*.tmp"):  # of a run that was killed
            shutil.rmtree(left)
        self._check_room()
        partial.mkdir(parents=True)
        try:
            digests = await write(partial)
            self._finish(partial, {"format": FORMAT, "step": step, **self._about, **state}, digests)
        except Exception as error:
            written = _size(partial)
            shutil.rmtree(partial, ignore_errors=True)
            if is_disk_full(error):
                raise self._disk_full(f"of which {written} bytes were written, and removed again") from error
            raise
        if final.exists():
            _set_aside(final)
        os.replace(partial, final)
        sync(self.root)
        if self._keep is not None:
            for old in self.complete()[: -self._keep]:
                _remove(old)
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

    async def load(self, folder: Path) -> dict[str, Any]:
        """As `read`, after every file was compared with the digest that it was written with.

        Raises:
            ValueError: files that are damaged or missing, by name.
        """
        files = _manifest(folder)["files"]
        there = [name for name in files if (folder / name).is_file()]
        found = await asyncio.to_thread(file_digests, folder, there)
        wrong = sorted(name for name in files if found.get(name) != files[name]["digest"])
        if wrong:
            shown = ", ".join(wrong[:5])
            raise ValueError(f"{folder}: {len(wrong)} files are damaged or missing: {shown}; {_instead()}")
        state = self.read(folder)
        for what, name in (("software", "versions"), ("settings", "config")):
            if changed := _changes(state.get(name, {}), self._about.get(name, {})):
                logger.warning("%s was written with other %s: %s", folder, what, ", ".join(changed))
        return state

    @staticmethod
    def read(folder: Path) -> dict[str, Any]:
        """The driver's state in a checkpoint, and the rest of its manifest; tuples come back as lists.

        Raises:
            ValueError: a manifest that is damaged or of another format.
        """
        return _manifest(folder, Unpacker(folder).put_back)

    def _finish(self, folder: Path, state: dict[str, Any], digests: Mapping[str, str]) -> None:
        """Store `state`, and the names of all files with it."""
        packer = Packer()
        body = json.loads(json.dumps(state, default=packer.pack))
        packer.write(folder)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        own = file_digests(folder, [name for name in names if name not in digests])
        every = {**digests, **own}
        body["files"] = {n: {"bytes": (folder / n).stat().st_size, "digest": every[n]} for n in sorted(names)}
        body["digest"] = _digest(body)
        write_synced(folder / MANIFEST, json.dumps(body, indent=1).encode())
        sync(folder)

    def _check_room(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.root).free < self._needed_bytes():
            raise self._disk_full("which was not begun")

    def _needed_bytes(self) -> int:
        """What the last checkpoint took; 0 if there is none."""
        before = self.complete()
        return sum(file["bytes"] for file in _manifest(before[-1])["files"].values()) if before else 0

    def _disk_full(self, when: str) -> DiskFull:
        free, needed, kept = shutil.disk_usage(self.root).free, self._needed_bytes(), self.complete()
        return DiskFull(
            f"{self.root}: no room for a checkpoint, {when}: {free} bytes are free"
            + (f", the last one took {needed}" if needed else "")
            + f". Free some space (or lower trainer.max_ckpt_to_keep={self._keep}) and start the run again; it resumes "
            + (f"from {kept[-1]}" if kept else "from its beginning, since it has no checkpoint yet")
        )


def _manifest(folder: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The manifest without its own digest, which is checked."""
    path = folder / MANIFEST
    try:
        plain = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: damaged, not JSON any more ({error}); {_instead()}") from error
    if plain.get("format") != FORMAT:
        raise ValueError(
            f"{path}: format {plain.get('format')}, this version of rlpost reads {FORMAT}; resume it with the version "
            "that wrote it, or start anew from its weights (model.path=<run folder>/hf)"
        )
    if plain.pop("digest", None) != _digest(plain):
        raise ValueError(f"{path}: damaged, it does not have the digest that it was written with; {_instead()}")
    outside = [name for name in plain["files"] if not (folder / name).resolve().is_relative_to(folder.resolve())]
    if outside:
        raise ValueError(f"{path}: names {outside[0]}, which is not in the checkpoint; {_instead()}")
    return plain if object_hook is None else json.loads(json.dumps(plain), object_hook=object_hook)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key old -> new` of everything in which two nested mappings differ, but for which checkpoint was meant."""
    old, new = _flat(before), _flat(now)
    keys = sorted((old.keys() | new.keys()) - {"trainer.resume"})
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> the value as text; tuples are lists, as in a manifest."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _instead() -> str:
    return "resume from an earlier checkpoint with trainer.resume=<its folder>, or start anew with trainer.resume=never"


def _set_aside(folder: Path) -> None:
    old = folder.with_suffix(".old")
    _remove(old)
    os.replace(folder, old)


def _remove(folder: Path) -> None:
    """The manifest first: should the run die meanwhile, what is left of the folder is no checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _step(folder: Path) -> str:
    return folder.name.removeprefix(PREFIX)
