"""The ledger's file, read: its records, those that still hold, and what became of every group.

A line is `<checksum> <record as JSON>`; a record of groups lists them in `groups` as `[id, index, ...]`. The checksum
(CRC-32) continues that of the line before, so that a changed, a missing and a displaced line are all told. A line
without its end is what a killed process leaves behind; it is dropped.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

LEDGER = "ledger.jsonl"

Record = dict[str, Any]


class State(StrEnum):
    """What became of a group so far."""

    HELD = "held"  # its prompt was drawn, and a checkpoint holds it
    ISSUED = "issued"
    GENERATED = "generated"  # none of its answers could be scored (yet)
    SCORED = "scored"
    TRAINED = "trained"
    DROPPED = "dropped"

    @property
    def is_open(self) -> bool:
        """Whether something must still become of it."""
        return self not in (State.TRAINED, State.DROPPED)


def encode(record: Record, checksum: int) -> tuple[bytes, int]:
    """A line, and its checksum; `checksum` is that of the line before (the first: 0)."""
    payload = json.dumps(record, separators=(",", ":")).encode()
    checksum = zlib.crc32(payload, checksum)
    return b"%08x %s\n" % (checksum, payload), checksum


def encode_all(records: Iterable[Record]) -> tuple[bytes, int]:
    """A whole file, and the checksum of its last line."""
    lines, checksum = [], 0
    for record in records:
        line, checksum = encode(record, checksum)
        lines.append(line)
    return b"".join(lines), checksum


@dataclass(slots=True, kw_only=True)
class Log:
    """A file's whole records, the checksum of the last, and how many bytes they and the torn rest after them take."""

    records: list[Record]
    checksum: int
    num_bytes: int
    torn_bytes: int


def read_log(path: Path) -> Log:
    """Records of a ledger; a torn last line is left out. No file: no records.

    Raises:
        ValueError: damage; names file, line and what to do.
    """
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    torn = lines.pop()
    records: list[Record] = []
    checksum = num_bytes = 0
    for number, line in enumerate(lines, start=1):
        written, payload = line[:9], line[9:]
        checksum = zlib.crc32(payload, checksum)
        if written != b"%08x " % checksum:
            raise ValueError(
                f"{path}:{number}: the ledger is damaged here (of {len(lines)} lines, this one does not have the "
                f"checksum that it was written with). Move it away, as in `mv {path} {path}.damaged`, and start the "
                "run again: it takes the ledger that its newest checkpoint holds"
            )
        records.append(json.loads(payload))
        num_bytes += len(line) + 1
    return Log(records=records, checksum=checksum, num_bytes=num_bytes, torn_bytes=len(torn))


def holding(records: Iterable[Record]) -> list[Record]:
    """Records without those that a later `resumed` voids: what came after the checkpoint that it goes on from."""
    kept: list[Record] = []
    for record in records:
        if record["at"] == "resumed":
            end = end_of(kept, record["mark"])
            if not end:
                raise ValueError(f"the ledger resumes from step {record['step']}, of whose checkpoint it does not know")
            del kept[end:]
        kept.append(record)
    return kept


def end_of(records: Sequence[Record], mark: str | None) -> int:
    """Number of records up to the checkpoint `mark`, its own included; None: the very beginning; 0: there is none."""
    if mark is None:
        return 1
    return next((i + 1 for i, record in enumerate(records) if record.get("mark") == mark and _is_save(record)), 0)


def _is_save(record: Record) -> bool:
    return record["at"] == "saved"


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """One group, by the id and index of its prompt.

    Attributes:
        state: the latest.
        steps: that trained it; more than one is a fault.
        reason: why it was dropped.
    """

    id: str
    index: int
    state: State = State.HELD
    steps: list[int] = field(default_factory=list)
    reason: str | None = None


class History:
    """What a ledger says, without what was undone.

    Attributes:
        groups: by id.
        steps: ids of the groups that each step trained, in order.
        resumes: `resumed` records: step, and in `voided` what it undid.
        saved: step of the last checkpoint, 0 without one.
        torn_bytes: dropped at the end of the file.
    """

    def __init__(self, records: Iterable[Record], torn_bytes: int = 0):
        self.groups: dict[str, GroupHistory] = {}
        self.steps: dict[int, list[str]] = {}
        self.resumes: list[Record] = []
        self.saved = 0
        self.torn_bytes = torn_bytes
        self._open: set[str] = set()
        self._lost: set[str] = set()  # open at the last checkpoint, which does not hold them
        self._num_saved = 0  # of `groups`, the first so many were known at the last checkpoint
        self._faults: list[str] = []
        for record in holding(records):
            getattr(self, f"_{record['at']}")(record)

    @staticmethod
    def read(path: Path) -> "History":
        """Of a ledger's file, or of the one in a run folder.

        Raises:
            ValueError: it is damaged, or there is none.
        """
        path = path / LEDGER if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"{path}: no ledger; give a run folder, or the {LEDGER} in it")
        log = read_log(path)
        return History(log.records, log.torn_bytes)

    @property
    def trained(self) -> Counter[str]:
        """How often each group was trained."""
        return Counter(id for ids in self.steps.values() for id in ids)

    def counts(self) -> Counter[str]:
        """Groups by state; dropped ones by reason as well."""
        counts = Counter(str(group.state) for group in self.groups.values())
        counts.update(f"dropped_{g.reason}" for g in self.groups.values() if g.state is State.DROPPED)
        return counts

    def problems(self) -> list[str]:
        """What should not be: groups trained twice, lost or skipped, steps that are not there; empty: all is well."""
        twice = [
            f"group '{group.id}' (index {group.index}) was trained {len(group.steps)} times, in steps {group.steps}"
            for group in self.groups.values()
            if len(group.steps) > 1
        ]
        lost = [
            f"group '{group.id}' (index {group.index}) is lost: {group.state}, neither trained nor dropped, and the "
            f"checkpoint of step {self.saved} does not hold it"
            for group in self.groups.values()
            if group.id in self._lost
        ]
        indices = {group.index for group in islice(self.groups.values(), self._num_saved)}  # added prompts': below 0
        gaps = sorted(set(range(max(indices, default=-1) + 1)) - indices)
        skipped = [f"the prompts of index {_ranges(gaps)} were skipped"] if gaps else []
        missing = sorted(set(range(1, max(self.steps, default=0) + 1)) - set(self.steps))
        steps = [f"steps {_ranges(missing)} are missing"] if missing else []
        return self._faults + twice + lost + skipped + steps

    # --- one method a record ---

    def _begun(self, record: Record) -> None:
        pass

    def _repaired(self, record: Record) -> None:
        pass

    def _issued(self, record: Record) -> None:
        for id, index in record["groups"]:
            self._set(id, index, State.ISSUED)
            self._lost.discard(id)

    def _generated(self, record: Record) -> None:
        for id, index, _ in record["groups"]:
            self._set(id, index, State.GENERATED)

    def _scored(self, record: Record) -> None:
        for id, index, _ in record["groups"]:
            self._set(id, index, State.SCORED)

    def _dropped(self, record: Record) -> None:
        for id, index in record["groups"]:
            self._set(id, index, State.DROPPED).reason = record["reason"]

    def _trained(self, record: Record) -> None:
        step = record["step"]
        if step in self.steps:
            self._faults.append(f"step {step} was trained twice")
        self.steps.setdefault(step, []).extend(id for id, _ in record["groups"])
        for id, index in record["groups"]:
            self._set(id, index, State.TRAINED).steps.append(step)

    def _saved(self, record: Record) -> None:
        self.saved = record["step"]
        for id, index in record["held"]:
            if id not in self.groups:
                self._set(id, index, State.HELD)
        self._lost = self._open - {id for id, _ in record["held"]}
        self._num_saved = len(self.groups)

    def _resumed(self, record: Record) -> None:
        self.resumes.append(record)

    def _set(self, id: str, index: int, state: State) -> GroupHistory:
        group = self.groups.setdefault(id, GroupHistory(id=id, index=index))
        group.state, group.reason = state, None
        if state.is_open:
            self._open.add(id)
        else:
            self._open.discard(id)
            self._lost.discard(id)
        return group


def compacted(records: Iterable[Record]) -> list[Record]:
    """Fewer records that say the same: of groups that are done, only what became of them, in which interval.

    An interval ends at a checkpoint, any of which a later `resumed` may name: what holds there does not change, save
    that open groups are known only as those that the checkpoint holds.
    """
    kept = holding(records)
    still_open: set[str] = set()
    for record in kept:
        ids = [group[0] for group in record.get("groups", ())]
        if record["at"] in (State.TRAINED, State.DROPPED):
            still_open.difference_update(ids)
        else:
            still_open.update(ids)
    result: list[Record] = []
    dropped: dict[str, tuple[str, int]] = {}  # of this interval

    def flush() -> None:
        for reason in dict.fromkeys(reason for reason, _ in dropped.values()):
            of_reason = [[id, index] for id, (why, index) in dropped.items() if why == reason]
            result.append({"at": "dropped", "reason": reason, "groups": of_reason})
        dropped.clear()

    for record in kept:
        if record["at"] == "dropped":
            dropped |= {id: (record["reason"], index) for id, index in record["groups"]}
            continue
        for id, *_ in record.get("groups", ()):
            dropped.pop(id, None)
        if record["at"] in (State.ISSUED, State.GENERATED, State.SCORED):
            of_open = [group for group in record["groups"] if group[0] in still_open]
            if of_open:
                result.append(record | {"groups": of_open})
            continue
        if _is_save(record):
            flush()
        result.append(record)
    flush()
    return result


def _ranges(numbers: Sequence[int], most: int = 10) -> str:
    """`3-5, 8` for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join(shown) + (", ..." if len(runs) > most else "")
