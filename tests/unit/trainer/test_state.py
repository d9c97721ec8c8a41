import asyncio

import pytest

from rlpost.trainer.state import CheckpointStore


async def write(folder):
    (folder / "weights").write_text("w")


def save(store, step, writer=write):
    return asyncio.run(store.save(step, {"cursor": step * 10}, writer))


def test_store_keeps_the_newest_and_reads_back_the_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
    assert [p.name for p in store.complete()] == ["global_step_2", "global_step_10"]
    newest = store.find("auto")
    assert store.read(newest) == {"step": 10, "cursor": 100} and (newest / "weights").read_text() == "w"


def test_half_written_checkpoint_is_ignored_and_replaced(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)

    async def dies(folder):
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        save(store, 2, dies)
    assert store.find("auto").name == "global_step_1"
    save(store, 2)
    assert store.find("auto").name == "global_step_2"


def test_find_takes_a_run_folder_a_checkpoint_or_refuses(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    folder = save(store, 3)
    assert store.find("never") is None
    assert store.find(str(folder)) == folder
    assert store.find(str(tmp_path)) == folder
    with pytest.raises(ValueError, match="trainer.resume=.*neither 'auto' nor 'never'.*complete checkpoint"):
        store.find(str(tmp_path / "elsewhere"))
    assert CheckpointStore(tmp_path / "new", None).find("auto") is None


def test_checkpoints_of_an_abandoned_future_are_set_aside(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (20, 40):
        save(store, step)
    store.set_aside(20)  # resumed from 20
    assert store.find("auto").name == "global_step_20" and (tmp_path / "global_step_40.old").is_dir()
    store.set_aside(0)  # started anew in the same folder
    assert store.find("auto") is None
    save(store, 5)
    assert [p.name for p in store.complete()] == ["global_step_5"]  # not deleted as the oldest
