"""Files that must survive."""

import errno

import pytest

from rlpost.files import below, file_digest, file_digests, is_disk_full, set_aside, write_synced


def test_digest_tells_one_changed_byte(tmp_path):
    content = bytes(range(256)) * 8192  # two blocks
    write_synced(tmp_path / "a", content)
    write_synced(tmp_path / "b", content[:-1] + b"\0")
    write_synced(tmp_path / "c", content)
    a, b, c = file_digests(tmp_path, ["a", "b", "c"]).values()
    assert a == c != b and a == file_digest(tmp_path / "a") and len(a) == 32


def test_full_disk_is_seen_behind_other_errors():
    def wrapped(inner):
        try:
            try:
                raise inner
            except Exception as error:
                raise RuntimeError("rank 3 failed") from error
        except RuntimeError as outer:
            return outer

    assert is_disk_full(OSError(errno.ENOSPC, "x")) and is_disk_full(wrapped(OSError(errno.EDQUOT, "x")))
    assert is_disk_full(RuntimeError("OSError: [Errno 28] No space left on device"))
    assert not is_disk_full(wrapped(OSError(errno.EIO, "x")))


def test_paths_below_a_folder_stay_there(tmp_path):
    assert below(tmp_path, "rollouts", "key") == tmp_path / "rollouts"
    assert below(tmp_path, "a/../b", "key") == tmp_path / "b"
    assert below(tmp_path, "/elsewhere", "key").as_posix() == "/elsewhere"
    for outside in ("..", "../x", "a/../../x"):
        with pytest.raises(ValueError, match=f"trainer.rollout_data_dir={outside}: leads out of {tmp_path}"):
            below(tmp_path, outside, "trainer.rollout_data_dir")


def test_set_aside_replaces_what_was_set_aside_before(tmp_path):
    file, folder = tmp_path / "a.txt", tmp_path / "b"
    set_aside(file)  # not there
    for text in ("1", "2"):
        file.write_text(text)
        folder.mkdir()
        (folder / text).touch()
        set_aside(file)
        set_aside(folder)
    assert not file.exists() and not folder.exists()
    assert (tmp_path / "a.txt.old").read_text() == "2"
    assert [path.name for path in (tmp_path / "b.old").iterdir()] == ["2"]
