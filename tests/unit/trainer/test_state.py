import asyncio
import json
import os
import pickle
from pathlib import Path

import pytest

from rlpost.trainer.state import CheckpointStore
from tests.unit.trainer.rollouts import group, prompt


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


def test_what_json_cannot_hold_comes_back_as_the_objects_they_were(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    asked = prompt(3)
    finished = group(asked, [1.0, 0.0])
    state = {"slots": [(asked, 2, finished), (asked, 3, None)], "nested": {"prompts": [asked]}, "n": 1}
    folder = asyncio.run(store.save(4, state, write))
    back = store.read(folder)
    (first, version, again), second = back["slots"]
    assert (back["step"], back["n"], version, second[1:]) == (4, 1, 2, [3, None])
    assert again.trajectories[0].rewards.tolist() == finished.trajectories[0].rewards.tolist()
    assert again.prompt is first is second[0] is back["nested"]["prompts"][0]  # one object still
    assert json.loads((folder / "manifest.json").read_text())["n"] == 1


def test_plain_state_is_all_in_the_manifest(tmp_path):
    folder = save(CheckpointStore(tmp_path, keep=None), 1)
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "weights"]


def test_objects_are_on_disk_before_the_checkpoint_is_complete(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def noted_replace(source, target):
        done.append("complete")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    asyncio.run(CheckpointStore(tmp_path, None).save(1, {"prompt": prompt(0)}, write))
    assert done == ["objects.pkl", "manifest.json", "complete"]


def test_a_state_that_cannot_be_stored_leaves_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, None)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        asyncio.run(store.save(1, {"unpicklable": lambda: None}, write))
    assert store.find("auto") is None
