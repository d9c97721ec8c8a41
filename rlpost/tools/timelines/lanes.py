"""Phases of a run's processes, as pieces of lanes: what each was in, when, and how often at once."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpost.heartbeat import DRIVER, FOLDER, SPANS_SUFFIX, STEP, Span
from rlpost.tracking.jsonl import read_jsonl

KINDS = (DRIVER, "rank", "engine", "workflow", "reward model", "reward")  # of processes, in the order of their lanes
BETWEEN = STEP[0]  # the phase in which the driver is between all others

_NUMBER = re.compile(r" (\d+)(@.*)?$")  # of a process: "rank 0", or its pid and host


@dataclass(slots=True, frozen=True, kw_only=True)
class Window:
    """Successive steps, each with its begin and end, in seconds since 1970 by the driver's clock."""

    steps: dict[int, tuple[float, float]]

    @property
    def begin(self) -> float:
        """Of the first step."""
        return min(begin for begin, _ in self.steps.values())

    @property
    def end(self) -> float:
        """Of the last step."""
        return max(end for _, end in self.steps.values())

    @property
    def length_s(self) -> float:
        """From begin to end."""
        return self.end - self.begin


@dataclass(slots=True, frozen=True, kw_only=True)
class Piece:
    """From `begin` to `end` (seconds since 1970) a lane was in phase `name`, `count` times at once."""

    name: str
    begin: float
    end: float
    count: int = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Lane:
    """What `num_processes` processes did: pieces in the order of time, which do not overlap."""

    name: str
    pieces: list[Piece]
    num_processes: int = 1

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds in which it was shown, however often at once."""
        totals: dict[str, float] = {}
        for piece in self.pieces:
            totals[piece.name] = totals.get(piece.name, 0.0) + piece.end - piece.begin
        return totals

    @property
    def busy_s(self) -> float:
        """Seconds in any phase."""
        return sum(self.seconds().values())

    @property
    def peak(self) -> int:
        """How often a phase was open at once, at most."""
        return max((piece.count for piece in self.pieces), default=0)


def read_spans(run_dir: Path) -> list[Span]:
    """All phases that the processes of a run wrote down.

    Raises:
        ValueError: there are none, or a file is damaged.
    """
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such folder; give that of a run")
    spans = []
    for path in sorted((run_dir / FOLDER).glob(f"*{SPANS_SUFFIX}")):
        try:
            spans += [Span(**row) for row in read_jsonl(path)]
        except TypeError as error:
            raise ValueError(f"{path}: not a file of phases ({error})") from error
    if not spans:
        raise ValueError(f"{run_dir}: no phases; a run with trainer.timeline=true writes them into its run folder")
    return spans


def find_window(spans: Iterable[Span], first: int | None, last: int | None, num_steps: int) -> Window:
    """Steps `first` to `last`; without `first` the newest `num_steps`, without `last` only `first`.

    Raises:
        ValueError: one of them did not run to its end; names those that did.
    """
    steps = {s.step: (s.begin, s.end) for s in spans if (s.name, s.doing) == STEP and s.step is not None}
    if not steps:
        raise ValueError("no step has ended yet: there is nothing to show")
    there = sorted(steps)
    wanted = there[-num_steps:] if first is None else list(range(first, (first if last is None else last) + 1))
    missing = [step for step in wanted if step not in steps]
    if missing or not wanted:
        what = f"step {missing[0]} did not run" if missing else f"--steps {first} {last} is no range"
        raise ValueError(f"{what}: there are steps {there[0]} to {there[-1]}")
    return Window(steps={step: steps[step] for step in wanted})


def find_lanes(spans: Iterable[Span], window: Window, most: int) -> list[Lane]:
    """A lane for each process that was in a phase within the window; one for all of a kind with more than `most`."""
    by_process: dict[str, list[Span]] = {}
    for span in spans:
        if span.name != BETWEEN and span.begin < window.end and span.end > window.begin:
            by_process.setdefault(span.process, []).append(span)
    kinds: dict[str, list[str]] = {}
    for process in sorted(by_process, key=lambda name: _place(name, by_process[name])):
        kinds.setdefault(_NUMBER.sub("", process), []).append(process)
    lanes = []
    for kind, processes in kinds.items():
        if len(processes) > most:
            together = [span for process in processes for span in by_process[process]]
            lanes.append(Lane(name=kind, pieces=pieces(together, window), num_processes=len(processes)))
            continue
        for number, process in enumerate(processes):
            name = f"{kind} {number}" if "@" in process else process  # pids say little
            lanes.append(Lane(name=name, pieces=pieces(by_process[process], window)))
    return lanes


def _place(process: str, spans: Sequence[Span]) -> tuple[int, str, float, str]:
    """What processes are sorted by: kind, then number, or for those that have only a pid when they began."""
    kind, number = _NUMBER.sub("", process), _NUMBER.search(process)
    rank = KINDS.index(kind) if kind in KINDS else len(KINDS)
    if number is None or number[2]:
        return rank, kind, min(span.begin for span in spans), process
    return rank, kind, float(number[1]), process


def pieces(spans: Sequence[Span], window: Window) -> list[Piece]:
    """The phase that is shown at each moment of the window, and how often it is open then.

    Of several that are open it is the one of which none was open for the shortest time: the innermost of those that
    nest, and a short one of a concurrent task before what goes on all the time.
    """
    changes: dict[float, Counter[str]] = {}
    for span in spans:
        begin, end = max(span.begin, window.begin), min(span.end, window.end)
        if begin < end:
            changes.setdefault(begin, Counter())[span.name] += 1
            changes.setdefault(end, Counter())[span.name] -= 1
    shown: list[Piece] = []
    open_now: Counter[str] = Counter()
    opened: dict[str, float] = {}  # when the first of those that are open began
    times = sorted(changes)
    for now, later in zip(times, times[1:], strict=False):
        for name, change in changes[now].items():
            before, open_now[name] = open_now[name], open_now[name] + change
            if not before:
                opened[name] = now
        present = [name for name, count in open_now.items() if count]
        if present:
            name = max(present, key=lambda name: opened[name])
            _append(shown, Piece(name=name, begin=now, end=later, count=open_now[name]))
    return shown


def _append(shown: list[Piece], piece: Piece) -> None:
    if shown and (shown[-1].name, shown[-1].end, shown[-1].count) == (piece.name, piece.begin, piece.count):
        piece = Piece(name=piece.name, begin=shown.pop().begin, end=piece.end, count=piece.count)
    shown.append(piece)


def accounted(lanes: Iterable[Lane], window: Window) -> float:
    """Share of the window in which the driver was in a phase, rather than between two."""
    return sum(lane.busy_s for lane in lanes if lane.name == DRIVER) / window.length_s
