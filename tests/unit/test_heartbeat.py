"""What a process says about itself, and how it is asked for its stacks."""

import json
import subprocess
import sys
import time

import pytest

from rlpost import heartbeat
from rlpost.heartbeat import SPANS_SUFFIX, Heartbeat, read_pulses, stacks_path

HANGS = """
import sys, time
from rlpost import heartbeat

def sits_here():
    print("ready", flush=True)
    time.sleep(600)

heartbeat.start(sys.argv[1], "rank 3")
with heartbeat.phase("train", "actor", step=7):
    sits_here()
"""


@pytest.fixture
def beating(tmp_path):
    made = Heartbeat(tmp_path, "rank 0")
    yield made
    made.close()


def until(condition):
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_last_phase_that_has_not_ended_is_shown():
    mine = Heartbeat()
    with mine.phase("train", "actor", step=3):
        assert (mine.pulse().phase, mine.pulse().doing, mine.pulse().step) == ("train", "actor", 3)
        with mine.phase("save"):
            assert mine.pulse().phase == "save"
        assert mine.pulse().phase == "train"
    assert mine.pulse().phase == ""


def test_phases_of_concurrent_tasks_may_end_in_any_order():
    mine = Heartbeat()
    first, second = mine.phase("generate", "a"), mine.phase("generate", "b")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert mine.pulse().doing == "b"
    second.__exit__(None, None, None)
    assert mine.pulse().phase == ""


def test_entering_leaving_and_beating_are_progress():
    mine = Heartbeat()
    seen = [mine.pulse().beats]
    with mine.phase("train"):
        seen.append(mine.pulse().beats)
        mine.beat()
        seen.append(mine.pulse().beats)
    seen.append(mine.pulse().beats)
    assert seen == sorted(set(seen))


def test_phase_ends_with_an_error():
    mine = Heartbeat()
    with pytest.raises(RuntimeError), mine.phase("train"):
        raise RuntimeError
    assert mine.pulse().phase == ""


def test_method_as_a_phase_says_which_and_for_whom():
    class Worker:
        @heartbeat.during("train")
        def train(self, role, work):
            return heartbeat.current().pulse()

    pulse = Worker().train("critic", [1, 2])
    assert (pulse.phase, pulse.doing) == ("train", "train critic")


def test_file_follows_the_process(tmp_path, beating):
    (first,) = read_pulses(tmp_path)
    with beating.phase("infer", "ref"):
        until(lambda: read_pulses(tmp_path)[0].phase == "infer")
        (now,) = read_pulses(tmp_path)
    assert now.name == "rank 0" and now.doing == "ref" and now.written > first.written and now.beats > first.beats


def spans(folder, name):
    path = folder / f"{name}{SPANS_SUFFIX}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_ended_phases_are_written_down_where_that_was_asked_for(tmp_path):
    driver = Heartbeat(tmp_path, "driver", keep_phases=True)
    rank = Heartbeat(tmp_path, "rank 0")  # is not told, except by the folder
    with driver.phase("train", step=7), rank.phase("train", "train actor"), rank.phase("", "ping"):
        pass
    with driver.phase("publish"):
        driver.close()
        rank.close()
    (train,), (of_rank,) = spans(tmp_path, "driver"), spans(tmp_path, "rank_0")
    begin, end = train.pop("begin"), train.pop("end")
    assert train == {"process": "driver", "name": "train", "doing": "", "step": 7}
    assert (of_rank["process"], of_rank["doing"], of_rank["step"]) == ("rank 0", "train actor", None)
    assert begin <= of_rank["begin"] <= of_rank["end"] <= end


def test_ended_phases_are_written_while_the_process_lives(tmp_path):
    mine = Heartbeat(tmp_path, "rank 0", keep_phases=True)
    try:
        for number in range(3):
            with mine.phase("infer", str(number)):
                pass
            until(lambda written=number + 1: len(spans(tmp_path, "rank_0")) == written)
        with mine.phase("train"), pytest.raises(KeyError), mine.phase("save"):
            raise KeyError
    finally:
        mine.close()
    assert [(one["name"], one["doing"]) for one in spans(tmp_path, "rank_0")] == [
        *(("infer", str(number)) for number in range(3)),
        ("save", ""),
        ("train", ""),
    ]


def test_no_phase_is_kept_unless_it_was_asked_for(tmp_path, beating):
    with beating.phase("train"):
        pass
    beating.close()
    assert not list(tmp_path.glob(f"*{SPANS_SUFFIX}"))


def test_broken_and_foreign_files_are_left_out(tmp_path, beating):
    (tmp_path / "half.json").write_text('{"name": "ra')
    (tmp_path / "other.json").write_text('{"color": "red"}')
    assert [pulse.name for pulse in read_pulses(tmp_path)] == ["rank 0"]


def test_process_goes_on_where_there_can_be_no_folder(tmp_path):
    (tmp_path / "file").touch()
    mine = heartbeat.start(tmp_path / "file" / "folder", "rank 0")
    with heartbeat.phase("train"):
        assert mine.folder is None and mine.pulse().phase == "train"


def test_stacks_are_written_for_a_request_in_the_shared_folder(tmp_path, beating):
    (tmp_path / heartbeat.DUMP_REQUEST).touch()
    until(lambda: "most recent call first" in stacks_path(tmp_path, "rank 0").read_text())
    assert "test_stacks_are_written_for_a_request" in stacks_path(tmp_path, "rank 0").read_text()


def test_stacks_of_another_process_are_written_on_a_signal(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HANGS, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(heartbeat.DUMP_SIGNAL)
        until(lambda: "sits_here" in stacks_path(tmp_path, "rank 3").read_text())
        assert process.poll() is None  # it lives on
        until(lambda: read_pulses(tmp_path)[0].step == 7)
    finally:
        process.kill()
        process.wait()
