import asyncio
import contextlib
import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.files import DiskFull, file_digest
from rlpost.trainer import state
from rlpost.trainer.state import CheckpointStore
from tests.unit.trainer.rollouts import group, prompt


async def write(folder):
    (folder / "weights").write_text("w")
    return {}


def save(store, step, writer=write):
    return asyncio.run(store.save(step, {"cursor": step * 10}, writer))


def test_store_keeps_the_newest_and_reads_back_the_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
    assert [p.name for p in store.complete()] == ["global_step_2", "global_step_10"]
    newest = store.find("auto")
    read = store.read(newest)
    assert (read["step"], read["cursor"], (newest / "weights").read_text()) == (10, 100, "w")


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


def test_everything_is_on_disk_before_the_checkpoint_is_complete(tmp_path, monkeypatch):
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
    store = CheckpointStore(tmp_path / "all", None)
    asyncio.run(store.save(1, {"prompt": prompt(0)}, write))
    assert done == ["columns.safetensors", "objects.json", "manifest.json", "global_step_1.tmp", "complete", "all"]


def test_a_state_that_cannot_be_stored_leaves_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, None)
    with pytest.raises(ValueError, match="holds a function"):
        asyncio.run(store.save(1, {"odd": lambda: None}, write))
    assert list(tmp_path.iterdir()) == []


# --- digests ---


async def write_two(folder):
    """The digest of one file comes with it, as from a rank that wrote it; the other's is made by the store."""
    (folder / "actor").mkdir()
    (folder / "actor" / "shard").write_bytes(bytes(range(256)))
    (folder / "weights").write_text("w")
    return {"actor/shard": file_digest(folder / "actor" / "shard")}


def test_manifest_names_every_file_and_what_the_store_was_told(tmp_path):
    store = CheckpointStore(tmp_path, None, {"versions": {"torch": "2"}, "config": {"seed": 1}})
    folder = save(store, 3, write_two)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {"actor/shard": 256, "weights": 1}
    assert (manifest["versions"], manifest["config"]) == ({"torch": "2"}, {"seed": 1})
    assert asyncio.run(store.load(folder))["cursor"] == 30


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_damage_to_any_file_is_found_before_anything_is_loaded(data):
    with tempfile.TemporaryDirectory() as root:
        store = CheckpointStore(Path(root), None)
        asked = prompt(1)
        folder = asyncio.run(store.save(1, {"slots": [(asked, 0, group(asked, [1.0]))]}, write_two))
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        name = data.draw(st.sampled_from(names))
        content = bytearray((folder / name).read_bytes())
        at = data.draw(st.integers(0, 2000)) % len(content)
        if data.draw(st.booleans()):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[at:]
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=name if name == "manifest.json" else f"1 files are damaged.*{name}"):
            asyncio.run(store.load(folder))


def test_other_software_than_that_of_the_checkpoint_is_logged(tmp_path, caplog):
    folder = save(CheckpointStore(tmp_path, None, {"versions": {"torch": "2", "ray": "1"}}), 1)
    asyncio.run(CheckpointStore(tmp_path, None, {"versions": {"torch": "2", "ray": "1"}}).load(folder))
    assert caplog.text == ""
    asyncio.run(CheckpointStore(tmp_path, None, {"versions": {"torch": "3", "vllm": "1", "ray": "1"}}).load(folder))
    assert "written with other software: torch 2 -> 3, vllm None -> 1" in caplog.text


def test_other_settings_than_those_of_the_checkpoint_are_logged(tmp_path, caplog):
    actor, rollout = {"lr": 1e-5, "betas": (0.9, 0.95)}, {"n": 4, "extra": {}}
    before = {"actor": actor, "rollout": rollout, "trainer": {"resume": "auto"}}
    folder = save(CheckpointStore(tmp_path, None, {"config": before}), 1)
    same = before | {"trainer": {"resume": str(folder)}}
    asyncio.run(CheckpointStore(tmp_path, None, {"config": same}).load(folder))
    assert caplog.text == ""
    now = same | {"actor": actor | {"lr": 2e-5}, "rollout": {"n": 8, "extra": {"a": "b"}}}
    asyncio.run(CheckpointStore(tmp_path, None, {"config": now}).load(folder))
    told = "actor.lr 1e-05 -> 2e-05, rollout.extra {} -> None, rollout.extra.a None -> b, rollout.n 4 -> 8"
    assert f"written with other settings: {told}" in caplog.text


def test_a_missing_file_is_named(tmp_path):
    store = CheckpointStore(tmp_path, None)
    folder = save(store, 1, write_two)
    (folder / "actor" / "shard").unlink()
    with pytest.raises(ValueError, match="1 files are damaged or missing: actor/shard; resume from an earlier"):
        asyncio.run(store.load(folder))


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, name):
    store = CheckpointStore(tmp_path / "store", None)
    folder = save(store, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["digest"]
    manifest["files"] = {name: {"bytes": 1, "digest": ""}}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "digest": state._digest(manifest)}))
    with pytest.raises(ValueError, match="which is not in the checkpoint"):
        store.read(folder)


def test_a_manifest_of_another_format_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"step": 3}))
    with pytest.raises(ValueError, match="format None, this version of rlpost reads 1; resume it with the version"):
        CheckpointStore.read(tmp_path)


# --- retention and a full disk ---


def test_a_checkpoint_whose_removal_was_cut_short_does_not_count(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda folder, ignore_errors=False: None)  # the run dies here
    save(store, 2)
    assert (tmp_path / "global_step_1" / "weights").exists()
    assert [path.name for path in store.complete()] == ["global_step_2"]


def test_leftovers_of_killed_saves_are_removed_by_the_next(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    (tmp_path / "global_step_7.tmp").mkdir()
    save(store, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_8"]


def test_no_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1, write_two)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=256))
    called = []
    said = rf"{tmp_path}: no room .* not begun: 256 bytes are free, the last one took 257\..*from .*global_step_1"
    with pytest.raises(DiskFull, match=said):
        save(store, 2, called.append)
    assert called == [] and [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("rank 1: OSError: No space left on device (28)")],
)
def test_a_disk_that_fills_up_leaves_the_checkpoint_before_and_nothing_half_written(tmp_path, error):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    async def fills(folder):
        (folder / "weights").write_text("half")
        raise error

    with pytest.raises(DiskFull, match="no room for a checkpoint, of which 4 bytes were written.*from .*global_step_1"):
        save(store, 2, fills)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    assert asyncio.run(store.load(tmp_path / "global_step_1"))["step"] == 1


class Died(BaseException):
    """Stands for `kill -9`: nothing is cleaned up."""


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(st.tuples(st.sampled_from(["whole", "dies", "full"]), st.integers(0, 6)), min_size=1, max_size=8),
    keep=st.one_of(st.none(), st.integers(1, 3)),
)
def test_the_newest_whole_checkpoint_is_always_there_and_good(plan, keep):
    """Saves that succeed, die at any change of the folder, or fill the disk, in any order."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        done = []
        for step, (how, at) in enumerate(plan, start=1):
            store = CheckpointStore(Path(root), keep)
            if how == "full":
                with pytest.raises(DiskFull):
                    asyncio.run(store.save(step, {"cursor": step}, _full))
            elif how == "dies":
                with patch.context() as inner:
                    _die_after(inner, at)
                    with contextlib.suppress(Died):
                        save(store, step, write_two)
                        done.append(step)
            else:
                save(store, step, write_two)
                done.append(step)
            found = store.find("auto")
            if found is not None:
                state = asyncio.run(store.load(found))
                assert state["step"] == step or state["step"] == max(done), "a half-written one counts"
                done.append(state["step"])  # one that was complete when its run died
            assert found is not None or not done


async def _full(folder):
    raise OSError(errno.ENOSPC, "No space left on device")


def _die_after(patch, count):
    """Let `count` changes of the folder happen, then none."""
    left = [count]

    def limited(real):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Died
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for module, name in ((os, "replace"), (os, "fsync"), (os, "unlink"), (Path, "unlink"), (Path, "mkdir")):
        patch.setattr(module, name, limited(getattr(module, name)))
