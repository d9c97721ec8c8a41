"""Measurements as jobs in lanes, one a GPU, on a machine that is lent for a short time.

    python -m benchmarks.session JOBS.yaml --out FOLDER [--gpus 2] [--limit 1500] [--only NAME ...]

JOBS.yaml is a list, in the order in which the jobs should have their GPUs:

    - name: models                     # FOLDER/models.log has its output
      command: cp -r $MODELS /dev/shm
      limit_s: 120                     # then Ctrl-C, and 8 s later death
      gpus: 0                          # so many, whichever are free; "all"; or a list of indexes such as [1]
    - name: sleep
      command: python -m benchmarks.sleep --model /dev/shm/models/0.6b --level 1 2 --out $OUT
      limit_s: 240
      gpus: 1
      after: [models]                  # starts when these have ended, however they did; they stand further up
      env: {VLLM_LOGGING_LEVEL: INFO}

A job starts as soon as its GPUs are free, in the file's order: one that waits for GPUs keeps later ones off them, one
that waits for other jobs keeps nobody. It sees its GPUs as `CUDA_VISIBLE_DEVICES`. Commands are bash's, run in the
present folder, where $OUT is FOLDER. Whatever a job leaves running ends with it. One whose `limit_s` is longer than
what is left of `--limit` is marked `no time` and not started. FOLDER/status.json is rewritten at every change, and
FOLDER/session.md has the table in the end. Ctrl-C or SIGTERM ends the jobs. Exit status 1: one failed, reached its
limit or was stopped.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL

from benchmarks.common import markdown
from benchmarks.jobs import Job, choose, read_jobs, select
from benchmarks.peers.process import end_family, family

MARK = "BENCHMARK_SESSION_JOB"  # in the environment of everything that a job starts
GRACE_S = 8.0  # from Ctrl-C to death
POLL_S = 0.2


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of a job: waiting, running, done, failed, limit (reached), no time, or stopped with the session.

    Attributes:
        rc: exit status, negative for a signal.
        start: seconds since the session began; None where it did not start.
    """

    name: str
    state: str = "waiting"
    rc: int | None = None
    gpus: str = ""
    start: float | None = None
    seconds: float | None = None


class Session:
    """Jobs under way in the folder `out`; `devices` are the GPUs by index, as CUDA_VISIBLE_DEVICES calls them."""

    def __init__(self, jobs: Sequence[Job], out: Path, devices: Sequence[str], limit_s: float):
        self.stop = asyncio.Event()  # set: end them all
        self._jobs, self._out, self._devices, self._limit_s = jobs, out, devices, limit_s
        self._begin = time.monotonic()
        self._records = {job.name: Record(name=job.name) for job in jobs}

    async def run(self) -> list[Record]:
        """Run them all; returns what became of each."""
        free, under_way = set(range(len(self._devices))), set[asyncio.Task[tuple[int, ...]]]()
        while (waiting := [job for job in self._jobs if self._records[job.name].state == "waiting"]) or under_way:
            left_s = 0.0 if self.stop.is_set() else self._limit_s - self._now()
            ended = {name for name, r in self._records.items() if r.state not in ("waiting", "running")}
            choice = choose(waiting, ended, free, left_s)
            for job in choice.no_time:
                self._tell(job.name, "stopped" if self.stop.is_set() else "no time")
            for job, gpus in choice.start:
                free -= set(gpus)
                under_way.add(asyncio.create_task(self._run(job, gpus)))
                self._records[job.name].gpus = " ".join(map(str, gpus))
                self._records[job.name].start = round(self._now(), 1)
                self._tell(job.name, "running")
            if under_way:
                finished, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                free.update(*(task.result() for task in finished))
        return list(self._records.values())

    async def _run(self, job: Job, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """From a job's start to the end of everything that it started; the GPUs that are free again."""
        token, begin = uuid.uuid4().hex, time.monotonic()
        own = {"OUT": str(self._out), "CUDA_VISIBLE_DEVICES": ",".join(self._devices[i] for i in gpus)}
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **own, **job.env, MARK: token}
        with open(self._out / f"{job.name}.log", "wb") as log:
            process = await asyncio.create_subprocess_exec(
                "bash", "-c", job.command, stdin=DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        exit_, stop = asyncio.create_task(process.wait()), asyncio.create_task(self.stop.wait())
        await asyncio.wait({exit_, stop}, timeout=job.limit_s, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        cut = "" if exit_.done() else "stopped" if self.stop.is_set() else "limit"
        if cut:
            await interrupt(process.pid, token)
        with suppress(RuntimeError):  # what no signal ends must not end the session
            await asyncio.to_thread(end_family, token, MARK)
        await asyncio.wait({exit_}, timeout=1)
        record = self._records[job.name]
        record.rc, record.seconds = process.returncode, round(time.monotonic() - begin, 1)
        self._tell(job.name, cut or ("failed" if record.rc else "done"))
        return gpus

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _tell(self, name: str, state: str) -> None:
        self._records[name].state = state
        print(f"{self._now():7.1f} s  {state:8} {name}", flush=True)
        status = {"limit_s": self._limit_s, "now": round(self._now(), 1)}
        status["jobs"] = [asdict(record) for record in self._records.values()]
        new = self._out / "status.json.new"
        new.write_text(json.dumps(status, indent=1))
        new.replace(self._out / "status.json")


async def interrupt(group: int, token: str) -> None:
    """Ctrl-C to the process group, and `GRACE_S` for all of the job to end."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGINT)
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and await asyncio.to_thread(family, token, MARK):
        await asyncio.sleep(POLL_S)


async def run(jobs: Sequence[Job], out: Path, num_gpus: int, limit_s: float) -> list[Record]:
    """Run `jobs` on the first GPUs that this process sees; a signal stops them.

    Raises:
        ValueError: it sees fewer.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
    devices = [name for name in mask.split(",") if name][:num_gpus]
    if len(devices) < num_gpus:
        raise ValueError(f"--gpus {num_gpus}: CUDA_VISIBLE_DEVICES={mask} shows fewer")
    session = Session(jobs, out, devices, limit_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, session.stop.set)
    return await session.run()


def main() -> int:
    """Run a file of jobs; prints what becomes of each, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1500, help="seconds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these jobs; default: all")
    args = parser.parse_args()
    jobs = read_jobs(args.jobs.read_text(), args.gpus)
    jobs = jobs if args.only is None else select(jobs, args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    records = asyncio.run(run(jobs, args.out.resolve(), args.gpus, args.limit))
    table = markdown([asdict(record) for record in records])
    (args.out / "session.md").write_text(table + "\n")
    print(table)
    return int(any(record.state in ("failed", "limit", "stopped") for record in records))


if __name__ == "__main__":
    sys.exit(main())
