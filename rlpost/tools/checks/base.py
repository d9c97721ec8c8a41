"""What a check of `rlpost.tools.doctor` is and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

GIB = 2**30


class Status(StrEnum):
    """How a check ended; only FAIL makes the command fail."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(slots=True, frozen=True)
class Finding:
    """What a check found, in a sentence, and what to do about it."""

    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status in (Status.WARN, Status.FAIL)), "a problem, and no other, names its fix"


def passed(found: str) -> Finding:
    """All is well."""
    return Finding(Status.PASS, found)


def skipped(reason: str) -> Finding:
    """Nothing to check here."""
    return Finding(Status.SKIP, reason)


@dataclass(slots=True, frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        engine: rollout engine whose sleep is tried; None: not tried.
        model: `model.path` of the checkpoint that it loads.
    """

    engine: str | None = None
    model: str = "maker:rlpost.tasks.quickstart.make_quickstart"


@dataclass(slots=True, frozen=True, kw_only=True)
class Check:
    """One question about this machine.

    Attributes:
        name: how it is called in the table and on the command line.
        run: answers it.
        timeout_s: of the child process that asks it; None: it is harmless and asked in this process.
        skip: why there is nothing to ask here; "" where there is. It is asked first, in this process, and cheap.
        fix: what to do when that process crashes or hangs.
        alone: nothing else may run meanwhile, because it measures the device's memory.
    """

    name: str
    run: Callable[[Options], Finding]
    timeout_s: float | None = None
    skip: Callable[[Options], str] = lambda options: ""
    fix: str = "run this check alone (--only) and read the whole error"
    alone: bool = False
