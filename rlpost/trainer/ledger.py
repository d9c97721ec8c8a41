"""The ledger: what became of every prompt group, in an append-only file that survives the run's death at any byte.

Trainer and source of groups write it as things happen; `rlpost.trainer.history` says what the lines mean. A record of
a group is with the operating system at once, and on the disk from the next `trained` or `saved` on. What a run did
after the checkpoint that it is resumed from is voided by a `resumed` record, which says how much that was. Every
checkpoint compacts the file, and holds a copy of it.
"""

import logging
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlpost.files import MAKE_ROOM, DiskFull, is_disk_full, set_aside, sync, write_synced
from rlpost.trainer.history import History, Record, compacted, encode, encode_all, end_of, holding, read_log
from rlpost.trajectory import Group, Prompt, Status

logger = logging.getLogger(__name__)

FORMAT = 1


class Ledger:
    """Writes `path`; None: nothing is kept. A torn end, which a killed run left, is cut off with a note.

    Raises:
        ValueError: the file is damaged.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._file = -1
        self._checksum = self._saved_bytes = 0  # of the last line; length of the file when `saved` was called
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open(path)

    @staticmethod
    def read(path: Path) -> History:
        """What the ledger of a run folder, or a ledger's file, says. See `History.read`."""
        return History.read(path)

    # --- groups, as the source sees them ---

    def issued(self, prompts: Iterable[Prompt]) -> None:
        """Their groups are begun; once more where they were before."""
        self._append("issued", groups=_pairs(prompts))

    def arrived(self, groups: Iterable[Group]) -> None:
        """They are generated, and scored unless that failed for all of their answers."""
        generated, scored = [], []
        for group in groups:
            generated.append([group.id, group.index, sum(len(t.response_ids) for t in group.trajectories)])
            rewards = [t.reward for t in group.trajectories if t.status is not Status.REWARD_ERROR]
            if rewards:
                scored.append([group.id, group.index, sum(rewards) / len(rewards)])
        self._append("generated", groups=generated)
        if scored:
            self._append("scored", groups=scored)

    def dropped(self, groups: Sequence[Group | Prompt], reason: str) -> None:
        """They will not be trained."""
        if groups:
            self._append("dropped", reason=reason, groups=_pairs(groups))

    # --- steps and checkpoints, as the trainer sees them ---

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """`step` trained them."""
        self._append("trained", to_disk=True, step=step, groups=_pairs(groups), time_s=_now_s())

    def saved(self, step: int, held: Iterable[Prompt]) -> str:
        """The checkpoint of `step` is about to be written, and holds these unfinished prompts; returns its mark.

        The mark belongs into the checkpoint. If that is never completed, no run will name it. The file is compacted.
        """
        mark = secrets.token_hex(8)
        held = list({prompt.id: prompt for prompt in held}.values())
        self._append("saved", to_disk=True, step=step, mark=mark, held=_pairs(held), time_s=_now_s())
        self.compact()
        return mark

    def copy(self, to: Path) -> None:
        """Write the ledger as it was at the last `saved`, for that checkpoint to hold."""
        if self._path is not None:
            write_synced(to, self._path.read_bytes()[: self._saved_bytes])

    def compact(self) -> None:
        """Replace the file by a shorter one that says the same, atomically."""
        if self._path is not None:
            self._saved_bytes = self._replace(self._path, compacted(read_log(self._path).records))

    def resumed(self, step: int, mark: str | None = None, copy: Path | None = None) -> None:
        """The run goes on after `step`: what was recorded after that checkpoint is void.

        Args:
            step: 0 for a new run.
            mark: of the checkpoint; None: none, everything is void.
            copy: the ledger that the checkpoint holds. It takes the place of a file that knows no such checkpoint:
                that of a new run folder, or one that was lost.
        """
        if self._path is None:
            return
        kept = holding(read_log(self._path).records)
        if mark is not None and not end_of(kept, mark):
            kept = self._adopt(self._path, mark, copy)
        void = kept[end_of(kept, mark) :]
        if mark is None and not void:
            return  # a new run, of which there is nothing to say
        groups = {group[0] for record in void for group in record.get("groups", ())}
        steps = [record["step"] for record in void if record["at"] == "trained"]
        voided = {"groups": len(groups), "steps": steps}
        self._append("resumed", to_disk=True, step=step, mark=mark, voided=voided, time_s=_now_s())
        if void:
            undone = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
            logger.warning("the run goes on after step %d; undone: work on %d groups, %s", step, len(groups), undone)
        else:
            logger.info("the run goes on after step %d", step)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # --- the file ---

    def _open(self, path: Path) -> None:
        log = read_log(path)
        self._reopen(path, log.checksum)
        if log.torn_bytes:
            os.ftruncate(self._file, log.num_bytes)
            logger.warning("%s: the last %d bytes are half a record, and dropped", path, log.torn_bytes)
            self._append("repaired", torn_bytes=log.torn_bytes)
        if not log.records:
            self._append("begun", to_disk=True, format=FORMAT, time_s=_now_s())
            sync(path.parent)

    def _adopt(self, path: Path, mark: str, copy: Path | None) -> list[Record]:
        """Take the checkpoint's own ledger; the present one, if it says anything, is kept as `*.old`."""
        kept = holding(read_log(copy).records) if copy is not None else []
        if not end_of(kept, mark):
            raise ValueError(f"{copy}: not the ledger of this checkpoint (mark {mark}); is the folder complete?")
        if len(read_log(path).records) > 1:
            set_aside(path)
        self._replace(path, kept)
        return kept

    def _reopen(self, path: Path, checksum: int) -> None:
        self.close()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._checksum = checksum

    def _replace(self, path: Path, records: Sequence[Record]) -> int:
        """Make `records` the file's; its length in bytes."""
        content, checksum = encode_all(records)
        partial = path.with_name(f"{path.name}.tmp")
        self._guarded(lambda: write_synced(partial, content))
        os.replace(partial, path)
        sync(path.parent)
        self._reopen(path, checksum)
        return len(content)

    def _append(self, at: str, to_disk: bool = False, **fields: Any) -> None:
        if self._path is None:
            return
        line, self._checksum = encode({"at": at, **fields}, self._checksum)

        def write() -> None:
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
            if to_disk:
                os.fsync(self._file)

        self._guarded(write)

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise DiskFull(f"{self._path}: the disk is full ({error.strerror}). {MAKE_ROOM}") from error


def _pairs(items: Iterable[Group | Prompt]) -> list[list[Any]]:
    return [[item.id, item.index] for item in items]


def _now_s() -> float:
    return round(time.time(), 3)
