"""Warnings of a run's other processes reach the driver's log."""

import logging
import logging.config
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


@pytest.mark.parametrize("torn", [b'{"process": "rank 0", "mess', b"\0\0\xff", b"[1]", b'{"process": "rank 0"}'])
def test_a_line_that_was_cut_costs_only_itself(tmp_path, caplog, torn):
    path = tmp_path / "rank_0.warnings.jsonl"
    path.write_bytes(torn)
    reader = NoticeReader(tmp_path)
    reader.tell()
    run(tmp_path, "rank 0")  # which goes on in the same file
    reader.tell()
    assert [r.getMessage() for r in caplog.records] == ["rank 0: the disk of node 3 is slow", "rank 0: two\nlines"]


def test_a_file_that_cannot_be_read_and_a_folder_that_is_gone_are_passed_over(tmp_path, caplog):
    (tmp_path / "rank_0.warnings.jsonl").mkdir()
    NoticeReader(tmp_path).tell()
    NoticeReader(tmp_path / "gone").tell()
    assert not caplog.records


def test_what_the_driver_has_said_itself_is_not_told_again(tmp_path, caplog):
    reader = NoticeReader(tmp_path)
    reader.attach()
    logging.getLogger("rlpost.rewards").warning("the disk of %s is slow", "node 3")
    reader.detach()
    caplog.clear()
    run(tmp_path, "rank 0")
    reader.tell()
    assert [r.getMessage() for r in caplog.records] == ["rank 0: two\nlines"]


@pytest.fixture
def no_heartbeat():
    yield
    heartbeat.start(None, "")


def test_warnings_are_written_after_a_library_has_configured_logging(tmp_path, no_heartbeat):
    heartbeat.start(tmp_path, "rank 0")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    logging.getLogger("rlpost.x").warning("still here")
    assert "still here" in (tmp_path / "rank_0.warnings.jsonl").read_text()


def test_warnings_reach_standard_error_as_well_and_a_wrong_log_call_hurts_nobody(tmp_path):
    code = WARNS + 'log.warning("%d", "a")\nlog.warning("last")'
    done = subprocess.run([sys.executable, "-c", code, tmp_path, "rank 0"], check=True, capture_output=True, text=True)
    assert "the disk of node 3 is slow" in done.stderr and done.stderr.endswith("last\n")
    assert "last" in (tmp_path / "rank_0.warnings.jsonl").read_text()


@pytest.mark.parametrize("name, written", [("rank 2", 1), (heartbeat.DRIVER, 0)])
def test_only_others_write_theirs_and_only_while_they_run(tmp_path, no_heartbeat, name, written):
    heartbeat.start(tmp_path, name)
    logging.getLogger("rlpost.x").warning("first")
    heartbeat.start(None, "")
    logging.getLogger("rlpost.x").warning("second")
    assert len(list(tmp_path.glob("*.warnings.jsonl"))) == written
    assert all("first" in p.read_text() and "second" not in p.read_text() for p in tmp_path.glob("*.warnings.jsonl"))
