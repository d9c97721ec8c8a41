"""The jobs of `benchmarks.session`: the file that lists them, and which of them may start."""

import re
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from typing import Any

import yaml

from rlpost.registry import near


@dataclass(slots=True, frozen=True, kw_only=True)
class Job:
    """One measurement.

    Attributes:
        name: of its log.
        command: a line or a script of bash.
        limit_s: after which it is ended.
        gpus: how many, whichever are free; or which, by index.
        after: names of jobs that end before it starts.
        env: variables besides the session's own.
    """

    name: str
    command: str
    limit_s: float
    gpus: int | frozenset[int]
    after: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Choice:
    """Jobs that start now, each with its GPUs, and jobs that never will."""

    start: list[tuple[Job, tuple[int, ...]]]
    no_time: list[Job]


def choose(waiting: Sequence[Job], ended: AbstractSet[str], free: Collection[int], left_s: float) -> Choice:
    """Which jobs may start.

    A job that waits for GPUs keeps later ones off those it would take; one that waits for other jobs keeps nobody. So
    the first of `waiting` always starts when nothing runs, and none is overtaken for ever.

    Args:
        waiting: in the order in which they should have their GPUs.
        ended: names of jobs that are over, in whatever way.
        free: indexes of GPUs that no job has.
        left_s: of the session.
    """
    no_time = [job for job in waiting if job.limit_s > left_s]
    over, left = ended | {job.name for job in no_time}, set(free)
    start = []
    for job in waiting:
        if job.name in over or not over.issuperset(job.after):
            continue
        if isinstance(job.gpus, int):
            wanted = frozenset(sorted(left)[: job.gpus])
            fits = len(wanted) == job.gpus
        else:
            wanted = job.gpus
            fits = wanted <= left
        if fits:
            start.append((job, tuple(sorted(wanted))))
        left -= wanted
    return Choice(start, no_time)


def read_jobs(text: str, num_gpus: int) -> list[Job]:
    """The jobs that a YAML file lists, for a session that has `num_gpus`.

    Raises:
        ValueError: names the job, the key and what it may be.
    """
    entries = yaml.safe_load(text)
    if not isinstance(entries, list):
        raise ValueError("a file of jobs is a list of them, each with name, command, limit_s and gpus")
    jobs: list[Job] = []
    for number, entry in enumerate(entries, start=1):
        jobs.append(_job(entry, f"job {number}", num_gpus, [job.name for job in jobs]))
    return jobs


def select(jobs: Sequence[Job], names: Collection[str]) -> list[Job]:
    """Those that are named, in the file's order; they wait for none that is left out.

    Raises:
        ValueError: there is no job of a name.
    """
    there = [job.name for job in jobs]
    for name in names:
        if name not in there:
            raise ValueError(f"--only {name}: no such job; {near(name, there)}")
    chosen = [job for job in jobs if job.name in names]
    return [replace(job, after=tuple(name for name in job.after if name in names)) for job in chosen]


def _job(entry: Any, where: str, num_gpus: int, earlier: Sequence[str]) -> Job:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be a mapping, is {entry!r}")
    where = f"{where} '{entry.get('name', '')}'"
    known = [f.name for f in fields(Job)]
    for key in entry:
        if key not in known:
            raise ValueError(f"{where}: no key '{key}'; {near(str(key), known)}")
    if missing := [key for key in ("name", "command", "limit_s", "gpus") if key not in entry]:
        raise ValueError(f"{where}: lacks {', '.join(missing)}")
    if not re.fullmatch(r"[\w.-]+", str(entry["name"])) or entry["name"] in earlier:
        raise ValueError(f"{where}: name must be letters, digits, '_', '.' and '-', and no other job's")
    if not isinstance(entry["limit_s"], int | float) or not entry["limit_s"] > 0:
        raise ValueError(f"{where}: limit_s={entry['limit_s']} must be > 0 seconds")
    after = entry.get("after") or []
    for name in [after] if isinstance(after, str) else after:
        if name not in earlier:
            raise ValueError(f"{where}: after={name} is no job further up; {near(str(name), earlier)}")
    return Job(
        name=str(entry["name"]),
        command=str(entry["command"]),
        limit_s=entry["limit_s"],
        gpus=_gpus(entry["gpus"], where, num_gpus),
        after=(after,) if isinstance(after, str) else tuple(after),
        env={str(key): str(value) for key, value in (entry.get("env") or {}).items()},
    )


def _gpus(value: Any, where: str, num_gpus: int) -> int | frozenset[int]:
    if value == "all":
        return frozenset(range(num_gpus))
    if isinstance(value, list) and value and set(value) <= set(range(num_gpus)):
        return frozenset(value)
    if type(value) is int and 0 <= value <= num_gpus:
        return value
    raise ValueError(f"{where}: gpus={value} must be a number up to {num_gpus} (--gpus), a list of indexes, or all")
