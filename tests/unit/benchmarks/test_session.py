"""Jobs in lanes: which may start, what the file may say, and that a session ends what it started."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import session
from benchmarks.jobs import Job, choose, read_jobs, select
from benchmarks.session import Record, run

ROOT = Path(__file__).parents[3]


def job(name: str, gpus: int | set[int] = 0, command: str = "true", limit_s: float = 60, *after: str) -> Job:
    which = gpus if isinstance(gpus, int) else frozenset(gpus)
    return Job(name=name, command=command, limit_s=limit_s, gpus=which, after=after)


def started(waiting: list[Job], free: set[int], ended: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    return {job.name: gpus for job, gpus in choose(waiting, set(ended), free, left_s=100).start}


def sessions(jobs: list[Job], out: Path, num_gpus: int = 2, limit_s: float = 300) -> dict[str, Record]:
    return {record.name: record for record in asyncio.run(run(jobs, out, num_gpus, limit_s))}


def alive(pid: int) -> bool:
    """Whether a process runs; what nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_jobs_take_the_free_gpus_in_the_files_order() -> None:
    jobs = [job("a", 1), job("b", {1}), job("c", 1), job("d", 0)]
    assert started(jobs, {0, 1}) == {"a": (0,), "b": (1,), "d": ()}
    assert started(jobs, {1}) == {"a": (1,), "d": ()}
    assert started(jobs[1:], {0}) == {"c": (0,), "d": ()}
    assert started([job("two", 2), job("one", 1)], {0, 1, 3}) == {"two": (0, 1), "one": (3,)}


def test_a_job_that_waits_for_all_gpus_is_not_overtaken_on_any() -> None:
    jobs = [job("all", {0, 1}), job("one", 1), job("this", {1}), job("none", 0)]
    assert started(jobs, {1}) == {"none": ()}
    assert started([job("two", 2), job("one", 1)], {1}) == {}
    assert started(jobs, {0, 1}) == {"all": (0, 1), "none": ()}


def test_a_job_that_waits_for_others_leaves_them_its_gpus() -> None:
    jobs = [job("later", {0, 1}, "true", 60, "first", "second"), job("one", 1)]
    assert started(jobs, {0, 1}, ended=("first",)) == {"one": (0,)}
    assert started(jobs, {0, 1}, ended=("first", "second")) == {"later": (0, 1)}


def test_jobs_that_no_longer_fit_keep_nobody() -> None:
    jobs = [job("long", {0}, "true", 101), job("exact", 1, "true", 100), job("then", 0, "true", 1, "long")]
    choice = choose(jobs, set(), {0}, 100)
    assert [j.name for j in choice.no_time] == ["long"]
    assert [(j.name, gpus) for j, gpus in choice.start] == [("exact", (0,)), ("then", ())]


def test_read_jobs_understands_every_form_of_gpus() -> None:
    text = """
    - {name: a, command: echo 1, limit_s: 5, gpus: 0}
    - {name: b, command: echo 2, limit_s: 5.5, gpus: all, after: a}
    - {name: c, command: echo 3, limit_s: 5, gpus: [1], after: [a, b], env: {X: 1}}
    """
    first, second, third = read_jobs(text, 2)
    assert first == Job(name="a", command="echo 1", limit_s=5, gpus=0)
    assert (second.gpus, second.after, second.limit_s) == (frozenset({0, 1}), ("a",), 5.5)
    assert (third.gpus, third.after, third.env) == (frozenset({1}), ("a", "b"), {"X": "1"})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{name: b, command: x, limit_s: 5, gpu: 1}", "no key 'gpu'; did you mean 'gpus'"),
        ("{name: b, command: x, gpus: 1}", "lacks limit_s"),
        ("{name: a, command: x, limit_s: 5, gpus: 1}", "no other job's"),
        ("{name: b/c, command: x, limit_s: 5, gpus: 1}", "name must be"),
        ("{name: b, command: x, limit_s: 0, gpus: 1}", "limit_s=0"),
        ("{name: b, command: x, limit_s: 5, gpus: 3}", "gpus=3"),
        ("{name: b, command: x, limit_s: 5, gpus: [2]}", r"gpus=\[2\]"),
        ("{name: b, command: x, limit_s: 5, gpus: true}", "gpus=True"),
        ("{name: b, command: x, limit_s: 5, gpus: 1, after: [b]}", "after=b is no job further up"),
        ("command", "must be a mapping"),
    ],
)
def test_read_jobs_refuses_by_name(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"job 2.*{said}"):
        read_jobs(f"- {{name: a, command: x, limit_s: 5, gpus: 1}}\n- {entry}", 2)


def test_jobs_that_are_selected_wait_for_none_that_is_not() -> None:
    jobs = [job("a"), job("b", 0, "true", 60, "a"), job("c", 0, "true", 60, "a", "b")]
    assert [(j.name, j.after) for j in select(jobs, ["c", "b"])] == [("b", ()), ("c", ("b",))]
    with pytest.raises(ValueError, match="--only bb: no such job.*b"):
        select(jobs, ["a", "bb"])


def test_the_h200s_jobs_name_modules_and_tests_that_exist() -> None:
    jobs = read_jobs((ROOT / "benchmarks" / "h200.yaml").read_text(), num_gpus=2)
    modules = {module for job in jobs for module in re.findall(r"-m ((?:benchmarks|rlpost)[.\w]*)", job.command)}
    assert {"benchmarks.peers", "rlpost.main"} < modules and all(map(find_spec, modules))
    files = [Path(path) for job in jobs for path in re.findall(r"tests/\S+", job.command)]
    assert files and all((ROOT / path).is_file() for path in files)


def test_jobs_of_one_gpu_run_in_turn_and_see_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-x,7")
    monkeypatch.setenv("GREETING", "hello")
    hold = 'mkdir "$OUT/held" && sleep 0.3 && rmdir "$OUT/held" && echo $GREETING $CUDA_VISIBLE_DEVICES'
    jobs = [job(name, {1}, hold) for name in "abc"] + [job("both", {0, 1}, hold), job("none", 0, "env")]
    records = sessions(jobs, tmp_path)
    assert {r.state for r in records.values()} == {"done"}
    assert [(tmp_path / f"{name}.log").read_text() for name in "abc"] == ["hello GPU-x\n"] * 3
    assert (tmp_path / "both.log").read_text() == "hello 4,GPU-x\n"
    assert "CUDA_VISIBLE_DEVICES=\n" in (tmp_path / "none.log").read_text()
    starts = [records[name].start for name in ("a", "b", "c", "both")]
    assert starts == sorted(starts)
    status = json.loads((tmp_path / "status.json").read_text())
    assert [(j["name"], j["state"], j["rc"]) for j in status["jobs"]] == [(j.name, "done", 0) for j in jobs]


def test_a_job_starts_when_those_before_it_have_ended_in_whatever_way(tmp_path: Path) -> None:
    jobs = [job("first", 1, "sleep 0.3; touch $OUT/x; exit 3"), job("second", 0, "ls $OUT/x", 60, "first")]
    records = sessions(jobs, tmp_path)
    assert (records["first"].state, records["first"].rc) == ("failed", 3)
    assert (records["second"].state, records["second"].rc) == ("done", 0)


def test_a_job_has_its_own_environment(tmp_path: Path) -> None:
    own = Job(name="a", command="echo $WORD; echo wrong >&2", limit_s=60, gpus=0, env={"WORD": "mine"})
    assert sessions([own], tmp_path)["a"].state == "done"
    assert (tmp_path / "a.log").read_text() == "mine\nwrong\n"


def test_a_job_at_its_limit_is_interrupted(tmp_path: Path) -> None:
    trap = "trap 'echo bye; exit 7' INT; while :; do sleep 0.1; done"
    record = sessions([job("a", 1, trap, limit_s=2)], tmp_path)["a"]
    assert (record.state, record.rc) == ("limit", 7)
    assert (tmp_path / "a.log").read_text() == "bye\n"


def test_a_job_that_ignores_its_interrupt_dies_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GRACE_S", 0.5)
    deaf = "trap '' INT; sleep 600 & echo $!; setsid sleep 600 & echo $!; wait"
    record = sessions([job("a", 1, deaf, limit_s=2)], tmp_path)["a"]
    assert (record.state, record.rc) == ("limit", -signal.SIGKILL)
    pids = [int(line) for line in (tmp_path / "a.log").read_text().split()]
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_what_a_job_leaves_running_ends_with_it(tmp_path: Path) -> None:
    record = sessions([job("a", 1, "setsid sleep 600 & echo $!")], tmp_path)["a"]
    assert (record.state, record.rc) == ("done", 0)
    assert not alive(int((tmp_path / "a.log").read_text()))


def test_jobs_that_do_not_fit_are_not_started_though_later_ones_are(tmp_path: Path) -> None:
    jobs = [job("short", {0}, "sleep 1.1", 19), job("late", {0}, "true", 19), job("last", {0}, "true", 5)]
    records = sessions(jobs, tmp_path, limit_s=20)
    assert [records[name].state for name in ("short", "late", "last")] == ["done", "no time", "done"]
    assert (records["late"].start, records["late"].rc) == (None, None)
    assert not (tmp_path / "late.log").exists()


def test_more_gpus_than_are_visible_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="--gpus 2: CUDA_VISIBLE_DEVICES=3"):
        asyncio.run(run([], tmp_path, 2, 60))


def command(folder: Path, jobs: str) -> list[str]:
    (folder / "jobs.yaml").write_text(jobs)
    return [sys.executable, "-m", "benchmarks.session", str(folder / "jobs.yaml"), "--out", str(folder / "out")]


def test_exit_status_and_table_tell_of_a_failure(tmp_path: Path) -> None:
    good = "- {name: good, command: 'true', limit_s: 60, gpus: 1}\n"
    ended = subprocess.run(command(tmp_path, good), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    bad = "- {name: bad, command: exit 5, limit_s: 60, gpus: 1}\n"
    ended = subprocess.run(command(tmp_path, good + bad), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    table = (tmp_path / "out/session.md").read_text()
    assert ended.stdout.endswith(table)
    assert "| bad | failed | 5 |" in table


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_jobs_and_is_written_down(tmp_path: Path, number: signal.Signals) -> None:
    jobs = "- {name: a, command: echo $$; sleep 600, limit_s: 60, gpus: 1}\n"
    jobs += "- {name: b, command: 'true', limit_s: 60, gpus: all}\n"
    log, status = tmp_path / "out/a.log", tmp_path / "out/status.json"
    with subprocess.Popen(command(tmp_path, jobs), cwd=ROOT, stdout=subprocess.PIPE) as process:
        while not (log.is_file() and log.read_text().strip()):
            assert process.poll() is None
            time.sleep(0.05)
        states = [(j["name"], j["state"]) for j in json.loads(status.read_text())["jobs"]]
        assert states == [("a", "running"), ("b", "waiting")]
        os.kill(process.pid, number)
        process.communicate(timeout=60)
    assert process.returncode == 1
    assert not alive(int(log.read_text()))
    a, b = json.loads(status.read_text())["jobs"]
    assert (a["state"], a["rc"], b["state"], b["start"]) == ("stopped", -signal.SIGINT, "stopped", None)
