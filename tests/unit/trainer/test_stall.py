"""The report of a stall."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpost import heartbeat
from rlpost.heartbeat import Pulse
from rlpost.trainer import stacks
from rlpost.trainer.stall import Report, write_report
from rlpost.trainer.watchdog import Stall, Watchdog

IN_COLLECTIVE = """\
Thread 0x00007f01 (most recent call first):
  File "/site/rlpost/heartbeat.py", line 140 in _keep_writing
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "/site/torch/distributed/distributed_c10d.py", line 3014 in all_reduce
  File "/site/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/site/rlpost/workers/engine/optim.py", line 30 in gradient_norm
  File "/site/rlpost/workers/model_worker.py", line 220 in train
"""
ASLEEP = """\
Thread 0x00007f02 (most recent call first):
  File "/home/me/losses.py", line 12 in slow_loss
  File "/site/rlpost/workers/engine/fsdp.py", line 110 in train_step
  File "/site/rlpost/workers/model_worker.py", line 220 in train
"""
IDLE = """\
Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/asyncio/base_events.py", line 1884 in _run_once
"""


HANGS = """
import ctypes, sys, time
from rlpost import heartbeat

def hang():
    time.sleep({wait_s})
    open(sys.argv[1] + "/hangs", "w").close()
    {hang}

heartbeat.start(sys.argv[1], "rank 1")
with heartbeat.phase("train", "train actor"):
    hang()
"""
ROOT = str(Path(__file__).parents[3])
WAITING = IDLE + '  File "/site/rlpost/trainer/build.py", line 74 in execute\n'
WATCHING = IN_COLLECTIVE.partition("\n\n")[0]


def stall(name, phase="train", doing="train actor"):
    pulse = Pulse(name=name, host="here", pid=1, phase=phase, doing=doing)
    return Stall(pulse=pulse, stuck_s=61.0, limit_s=60.0)


def test_dump_is_read_thread_by_thread():
    threads = stacks.parse(IN_COLLECTIVE)
    assert [len(thread) for thread in threads] == [2, 4]
    assert str(threads[1][0]) == "all_reduce (torch/distributed/distributed_c10d.py:3014)"


def test_collective_is_named_and_whoever_works_is_in_none():
    assert stacks.collective(stacks.parse(IN_COLLECTIVE)).function == "all_reduce"
    assert stacks.collective(stacks.parse(ASLEEP)) is None


def report(*stalls, **texts):
    """Of these stalls and dumps, `rank_0` for "rank 0", in step 4."""
    driver = Pulse(name="driver", host="here", pid=2, phase="train", step=4)
    reward = Pulse(name="reward 7@here", host="here", pid=7, phase="reward", doing="my.slow_reward")
    ranks = [stall(name.replace("_", " ")).pulse for name in texts if name.startswith("rank")]
    pulses = [driver, *ranks, *([reward] if "reward" in texts else [])]
    dog = Watchdog({"train": 60.0}, lambda: pulses, clock=lambda: 0.0)
    dog.look()
    dog.looked = 20.0  # nobody has moved since
    names = {"reward": "reward 7@here"}
    return Report(stalls, dog, {names.get(n, n.replace("_", " ")): stacks.parse(text) for n, text in texts.items()})


def test_place_is_the_innermost_line_and_ours_that_led_there():
    said = report(rank_0=ASLEEP, rank_1=IDLE, driver=WAITING, rank_3=WATCHING, rank_4=IN_COLLECTIVE)
    assert said.where("rank 0") == (
        "slow_loss (home/me/losses.py:12), called from train_step (workers/engine/fsdp.py:110)"
    )
    assert said.where("rank 1") == said.where("rank 3") == "no code of rlpost's: it waits for work"
    assert said.where("driver") == "its event loop: it waits for others"
    assert said.where("rank 4") == "the collective all_reduce (torch/distributed/distributed_c10d.py:3014)"
    assert said.where("rank 9") == "an unknown place: its stacks could not be had"


def test_file_in_a_folder_that_is_called_like_the_package_is_not_ours():
    assert not stacks.Frame("/home/me/rlpost/.venv/lib/threading.py", 3, "wait").is_ours
    assert stacks.Frame("/home/me/rlpost/rlpost/heartbeat.py", 3, "wait").is_ours


def test_rank_outside_the_collective_is_to_blame_and_not_those_that_wait_for_it():
    stalls = stall("rank 0"), stall("rank 1"), stall("driver", doing="")
    first, second = report(*stalls, rank_0=IN_COLLECTIVE, rank_1=ASLEEP, driver=WAITING).headline()
    assert first.startswith("rank 1 made no progress in phase 'train' (train actor) of step 4 for 61 s ")
    assert "trainer.timeouts.train_s=60" in first and "slow_loss" in first
    assert second == "rank 0 waits for other ranks in all_reduce (torch/distributed/distributed_c10d.py:3014)"


def test_rank_that_is_awaited_is_to_blame_though_it_moved_a_moment_later():
    stalls = stall("rank 0"), stall("driver", doing="")
    first, second = report(*stalls, rank_0=IN_COLLECTIVE, rank_1=ASLEEP, driver=WAITING).headline()
    assert first.startswith("rank 1 made no progress in phase 'train' (train actor) of step 4 for 20 s ")
    assert "slow_loss" in first and second.startswith("rank 0 waits for other ranks in all_reduce")


def test_ranks_that_all_wait_are_all_named():
    lines = report(stall("rank 0"), stall("rank 1"), rank_0=IN_COLLECTIVE, rank_1=IN_COLLECTIVE).headline()
    assert lines[0].startswith("rank 0 made") and "it is in the collective all_reduce" in lines[0]
    assert lines[1].startswith("rank 1 made")


def test_driver_is_to_blame_where_nobody_else_is():
    (line,) = report(stall("driver", doing=""), driver=WAITING).headline()
    assert line.startswith("driver made no progress in phase 'train' of step 4 for 61 s")


def test_reward_that_runs_is_named():
    lines = report(stall("workflow 3@here", "generate", "rewards of prompt 5"), reward=ASLEEP).headline()
    assert lines[0].startswith("workflow 3@here made no progress in phase 'generate' (rewards of prompt 5)")
    assert lines[1].startswith("reward 7@here runs my.slow_reward; it is in slow_loss (home/me/losses.py:12)")


@pytest.fixture(params=["time.sleep(600)", "ctypes.PyDLL(None).sleep(600)"], ids=["sleeps", "holds the lock"])
def hanging(request, tmp_path, monkeypatch):
    """A process with a heartbeat that hangs in a function of its own; PyDLL keeps the interpreter's lock."""
    monkeypatch.setattr(stacks, "ANSWER_S", 4.0)
    script = tmp_path / "hangs.py"
    script.write_text(HANGS.format(wait_s=2 * heartbeat.WRITE_S, hang=request.param))
    folder = tmp_path / "heartbeats"
    process = subprocess.Popen([sys.executable, script, folder], env=os.environ | {"PYTHONPATH": ROOT})
    deadline = time.monotonic() + 30.0
    while not (folder / "hangs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield folder
    process.kill()
    process.wait()


def seen(folder):
    dog = Watchdog({"train": 1.0}, lambda: heartbeat.read_pulses(folder), clock=iter([0.0, 1.0, 3.0]).__next__)
    assert dog.look() == []
    return dog.look(), dog


def test_report_holds_every_process_and_a_file_of_its_stacks(tmp_path, hanging):
    stalls, dog = seen(hanging)
    said = write_report(stalls, dog, hanging, tmp_path / "stall")
    written = (tmp_path / "stall" / "report.txt").read_text()
    assert said.startswith("rank 1 made no progress in phase 'train' (train actor) for 2 s")
    assert str(tmp_path / "stall") in said.splitlines()[-1]
    assert f"{socket.gethostname()}:" in written and "every process" in written
    assert "in hang" in (tmp_path / "stall" / "rank_1.txt").read_text()


def test_py_spy_is_asked_where_it_is_installed(tmp_path, hanging, monkeypatch):
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "native stack of $3, $4"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    stalls, dog = seen(hanging)
    write_report(stalls, dog, hanging, tmp_path / "stall")
    text = (tmp_path / "stall" / "rank_1.txt").read_text()
    assert "in hang" in text and f"native stack of {stalls[0].pulse.pid}, --native" in text


def test_process_without_a_handler_is_not_signalled(tmp_path, monkeypatch):
    process = subprocess.Popen(["sleep", "60"])
    try:
        pulse = Pulse(name="gone", host="here", pid=process.pid)  # its number was given to another
        monkeypatch.setattr(stacks, "ANSWER_S", 0.0)
        assert stacks.collect([pulse], tmp_path, "here") == {}
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
