"""Warnings of a run's other processes reach the driver's log."""

import logging
import subprocess
import sys

import pytest

from rlpost import heartbeat
from rlpost.notices import NoticeReader

WARNS = """
import logging, sys
from rlpost import heartbeat
heartbeat.start(sys.argv[1], sys.argv[2])
log = logging.getLogger("rlpost.workers.somewhere")
log.warning("the disk of %s is slow", "node 3")
log.error("two\\nlines")
log.info("not told")
logging.getLogger("vllm").warning("not ours")
"""


def run(folder, name):
    subprocess.run([sys.executable, "-c", WARNS, str(folder), name], check=True)


def test_driver_tells_each_warning_once_and_who_said_it(tmp_path, caplog):
    reader = NoticeReader(tmp_path)
    reader.tell()
    assert not caplog.records
    run(tmp_path, "rank 0")
    run(tmp_path, "rank 1")
    reader.tell()
    reader.tell()
    assert [r.getMessage() for r in caplog.records] == ["rank 0: the disk of node 3 is slow", "rank 0: two\nlines"]
    assert {r.levelno for r in caplog.records} == {logging.WARNING}


def test_half_a_line_waits_for_the_rest(tmp_path, caplog):
    reader, path = NoticeReader(tmp_path), tmp_path / "rank_0.warnings.jsonl"
    line = '{"process": "rank 0", "message": "late"}\n'
    path.write_text(line[:20])
    reader.tell()
    assert not caplog.records
    path.write_text(line)
    reader.tell()
    assert [r.getMessage() for r in caplog.records] == ["rank 0: late"]


@pytest.fixture
def no_heartbeat():
    yield
    heartbeat.start(None, "")


@pytest.mark.parametrize("name, written", [("rank 2", 1), (heartbeat.DRIVER, 0)])
def test_only_others_write_theirs_and_only_while_they_run(tmp_path, no_heartbeat, name, written):
    heartbeat.start(tmp_path, name)
    logging.getLogger("rlpost.x").warning("first")
    heartbeat.start(None, "")
    logging.getLogger("rlpost.x").warning("second")
    assert len(list(tmp_path.glob("*.warnings.jsonl"))) == written
    assert all("first" in p.read_text() and "second" not in p.read_text() for p in tmp_path.glob("*.warnings.jsonl"))
