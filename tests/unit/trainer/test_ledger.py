"""The ledger's file: what it says of every group, after any death, damage, resume or compaction."""

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.files import DiskFull
from rlpost.tools import ledger as tool
from rlpost.trainer.history import History, compacted, encode_all, holding, read_log
from rlpost.trainer.ledger import Ledger
from rlpost.trajectory import Status
from tests.unit.trainer.rollouts import group, prompt

PROMPTS = [prompt(i) for i in range(12)]
GROUPS = [group(p, [1.0, 0.0]) for p in PROMPTS]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def step(ledger, number, indices, held=()):
    """A whole step: groups issued, back, trained; returns the mark of a checkpoint after it."""
    ledger.issued(PROMPTS[i] for i in indices)
    ledger.arrived(GROUPS[i] for i in indices)
    ledger.trained(number, [GROUPS[i] for i in indices])
    return ledger.saved(number, [PROMPTS[i] for i in held])


def states(history):
    return {group.index: str(group.state) for group in history.groups.values()}


def trained(history):
    return {number: [int(id.rpartition("/")[2]) for id in ids] for number, ids in history.steps.items()}


# --- what it says ---


def test_every_group_has_the_state_that_was_written_last(path):
    ledger = Ledger(path)
    ledger.issued(PROMPTS[:6])
    failed = group(PROMPTS[2], [0.0], Status.REWARD_ERROR)
    ledger.arrived([*GROUPS[:2], failed, *GROUPS[3:5]])
    ledger.dropped([GROUPS[3], PROMPTS[4]], "all_1")
    ledger.trained(1, GROUPS[:1])
    history = Ledger.read(path)
    assert states(history) == {0: "trained", 1: "scored", 2: "generated", 3: "dropped", 4: "dropped", 5: "issued"}
    assert history.counts()["dropped_all_1"] == 2 and history.steps == {1: ["d/0/0"]}
    assert history.problems() == []


def test_a_group_that_is_begun_again_counts_once(path):
    """Too old, or sampled by engines that had to be mended: its prompt is issued once more."""
    ledger = Ledger(path)
    ledger.issued(PROMPTS[:2])
    ledger.arrived(GROUPS[:2])
    ledger.dropped([GROUPS[1]], "all_1")
    ledger.issued(PROMPTS[:2])
    assert states(Ledger.read(path)) == {0: "issued", 1: "issued"}
    step(ledger, 1, [0, 1])
    assert states(Ledger.read(path)) == {0: "trained", 1: "trained"} and Ledger.read(path).problems() == []


def test_a_group_that_was_trained_twice_is_a_problem(path):
    ledger = Ledger(path)
    step(ledger, 1, [0, 1])
    step(ledger, 2, [1, 2])
    assert Ledger.read(path).problems() == ["group 'd/0/1' (index 1) was trained 2 times, in steps [1, 2]"]
    assert Ledger.read(path).trained["d/0/1"] == 2


def test_a_group_that_no_checkpoint_holds_is_lost(path):
    ledger = Ledger(path)
    ledger.issued(PROMPTS[2:5])
    step(ledger, 1, [0, 1], held=[2, 3])
    (problem,) = Ledger.read(path).problems()
    assert problem.startswith("group 'd/0/4' (index 4) is lost: issued, neither trained nor dropped")
    step(ledger, 2, [2, 4])  # found again; 3 was held, and is not any more
    (problem,) = Ledger.read(path).problems()
    assert problem.startswith("group 'd/0/3' (index 3) is lost") and "checkpoint of step 2 does not hold it" in problem


def test_prompts_that_were_never_issued_and_steps_that_never_were_are_problems(path):
    ledger = Ledger(path)
    step(ledger, 1, [0])
    step(ledger, 3, [3, 5], held=[6])  # 6: drawn, but not begun
    assert Ledger.read(path).problems() == ["the prompts of index 1-2, 4 were skipped", "steps 2 are missing"]


def test_a_step_that_was_trained_twice_is_a_problem(path):
    ledger = Ledger(path)
    step(ledger, 1, [0])
    step(ledger, 1, [1])
    assert Ledger.read(path).problems() == ["step 1 was trained twice"]


# --- resumes ---


def test_what_came_after_the_checkpoint_is_void_and_the_ledger_says_so(path):
    ledger = Ledger(path)
    marks = [step(ledger, number, [2 * number - 2, 2 * number - 1]) for number in (1, 2)]
    ledger.issued(PROMPTS[4:6])
    ledger.arrived(GROUPS[4:6])
    ledger.trained(3, GROUPS[4:6])
    ledger.close()
    ledger = Ledger(path)
    ledger.resumed(2, marks[1])
    history = Ledger.read(path)
    assert trained(history) == {1: [0, 1], 2: [2, 3]} and set(states(history)) == {0, 1, 2, 3}
    assert [record["voided"] for record in history.resumes] == [{"groups": 2, "steps": [3]}]
    step(ledger, 3, [4, 5])
    ledger.resumed(1, marks[0])  # from an earlier one
    step(ledger, 2, [2, 3])
    history = Ledger.read(path)
    assert trained(history) == {1: [0, 1], 2: [2, 3]} and history.problems() == []
    ledger.resumed(0)  # all anew
    assert trained(Ledger.read(path)) == {} and b'"step":2' in path.read_bytes(), "nothing is erased"


def test_a_new_run_begins_without_a_resume(path):
    Ledger(path).resumed(0)
    assert [record["at"] for record in read_log(path).records] == ["begun"]


def test_a_checkpoint_of_another_run_brings_its_ledger(path, tmp_path):
    other = Ledger(tmp_path / "other.jsonl")
    mark = step(other, 1, [0, 1], held=[2])
    copy = tmp_path / "copy.jsonl"
    other.issued(PROMPTS[2:4])  # async rollout goes on while the checkpoint is written
    other.copy(copy)
    assert trained(Ledger.read(copy)) == {1: [0, 1]}

    ledger = Ledger(path)
    step(ledger, 1, [7])  # something else was here
    ledger.resumed(1, mark, copy)
    step(ledger, 2, [2, 3])
    history = Ledger.read(path)
    assert trained(history) == {1: [0, 1], 2: [2, 3]} and history.problems() == []
    assert trained(Ledger.read(path.with_name("ledger.jsonl.old"))) == {1: [7]}


def test_a_copy_of_another_checkpoint_is_refused(path, tmp_path):
    other = Ledger(tmp_path / "other.jsonl")
    step(other, 1, [0, 1])
    other.copy(tmp_path / "copy.jsonl")
    with pytest.raises(ValueError, match="copy.jsonl: not the ledger of this checkpoint"):
        Ledger(path).resumed(1, "another", tmp_path / "copy.jsonl")


def test_a_ledger_without_a_file_keeps_nothing(tmp_path):
    ledger = Ledger(None)
    mark = step(ledger, 1, [0])
    ledger.copy(tmp_path / "copy")
    ledger.compact()
    ledger.resumed(1, mark)
    assert list(tmp_path.iterdir()) == []


# --- death and damage ---


def written(folder):
    """A ledger with a bit of everything, and its records."""
    path = Path(folder) / "ledger.jsonl"
    ledger = Ledger(path)
    mark = step(ledger, 1, [0, 1], held=[2])
    ledger.dropped([GROUPS[3]], "surplus")
    ledger.resumed(1, mark)
    ledger.issued(PROMPTS[2:4])
    ledger.close()
    return path, read_log(path).records


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_ledger_that_is_cut_off_at_any_byte_keeps_its_whole_lines_and_goes_on(data):
    with tempfile.TemporaryDirectory() as folder:
        path, records = written(folder)
        content = path.read_bytes()
        cut = data.draw(st.integers(0, 2000)) % (len(content) + 1)
        path.write_bytes(content[:cut])
        num_whole = content[:cut].count(b"\n")
        assert read_log(path).records == records[:num_whole]
        ledger = Ledger(path)
        ledger.dropped([GROUPS[9]], "after")
        after = [record["at"] for record in read_log(path).records[num_whole:]]
        torn = cut > 0 and content[cut - 1 : cut] != b"\n"
        assert after == ["repaired"] * torn + ["begun"] * (num_whole == 0) + ["dropped"]
        ledger.close()


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_told_with_file_and_line(data):
    with tempfile.TemporaryDirectory() as folder:
        path, records = written(folder)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, 2000)) % len(content)
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        if at == len(content) - 1:  # the end of the last line: as if it were torn
            assert read_log(path).records == records[:-1]
            return
        line = bytes(content[:at]).count(b"\n") + 1
        with pytest.raises(ValueError, match=rf"{path}:{line}: the ledger is damaged here .*mv .*newest checkpoint"):
            Ledger(path)
        assert path.read_bytes() == content, "evidence is left alone"


@pytest.mark.parametrize("change", ["lost", "repeated", "swapped"])
def test_lines_that_are_whole_but_not_in_place_are_damage(path, change):
    path, _ = written(path.parent)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2:4] = {"lost": lines[2:3], "repeated": [lines[2], lines[2]], "swapped": lines[3:1:-1]}[change]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"ledger.jsonl:[34]: the ledger is damaged here"):
        read_log(path)


def test_a_damaged_ledger_that_was_moved_away_comes_back_from_the_checkpoint(path, tmp_path):
    ledger = Ledger(path)
    mark = step(ledger, 1, [0, 1])
    ledger.copy(tmp_path / "copy.jsonl")
    path.rename(tmp_path / "ledger.jsonl.damaged")
    ledger = Ledger(path)
    ledger.resumed(1, mark, tmp_path / "copy.jsonl")
    assert trained(Ledger.read(path)) == {1: [0, 1]}
    assert not path.with_name("ledger.jsonl.old").exists(), "the empty one says nothing"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(path, monkeypatch, number):
    ledger = Ledger(path)

    def write(descriptor, content):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFull, match=f"{path}: the disk is full .*resumes from its last checkpoint"):
        ledger.issued(PROMPTS[:1])


def test_steps_and_checkpoints_are_on_the_disk_and_groups_with_the_system(path, monkeypatch):
    ledger, synced = Ledger(path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(len(read_log(path).records)))
    ledger.issued(PROMPTS[:1])
    ledger.arrived(GROUPS[:1])
    assert synced == [] and len(read_log(path).records) == 4  # with the first line
    ledger.trained(1, GROUPS[:1])
    ledger.saved(1, [])
    assert synced == [5, 6, 6, 3]  # at last compacted, into another file first


# --- compaction ---

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["issued", "arrived", "dropped", "step", "saved", "compact", "resume", "die"]),
        st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True),
    ),
    max_size=25,
)


def summary(history):
    """What must not change: open groups of before the last resume are known as held only."""
    done = {group.id: (group.state, group.reason) for group in history.groups.values() if not group.state.is_open}
    still = {group.id for group in history.groups.values() if group.state.is_open}
    return done, still, history.steps, history.saved


@settings(max_examples=400, deadline=None)
@given(events=EVENTS, data=st.data())
def test_compaction_changes_nothing_that_a_later_resume_may_come_back_to(events, data):
    """Beside the file, which is compacted and reopened at any time, all records are kept in a list."""
    with tempfile.TemporaryDirectory() as folder:
        rig, marks, number = Rig(Path(folder) / "ledger.jsonl"), [], 0
        for kind, indices in events:
            groups = [GROUPS[i] for i in indices]
            if kind == "issued":  # a group that is done is never begun anew
                done = summary(rig.history())[0]
                rig.note("issued", [group.prompt for group in groups if group.id not in done])
            elif kind == "arrived":
                rig.note("arrived", [group for group in groups if group.id in rig.history().groups])
            elif kind == "dropped":
                rig.note("dropped", groups, f"reason_{indices[0] % 2}")
            elif kind == "step":
                number += 1
                rig.note("trained", number, groups)
            elif kind == "saved":
                still = [group.index for group in rig.history().groups.values() if group.state.is_open]
                marks.append((number, rig.note("saved", number, [PROMPTS[i] for i in {*still, *indices}])))
            elif kind == "compact":
                rig.ledger.compact()
            elif kind == "resume" and marks:
                del marks[data.draw(st.integers(1, len(marks))) :]
                number, mark = marks[-1]
                rig.note("resumed", number, mark)
            elif kind == "die":
                rig.ledger.close()
                rig.ledger = Ledger(rig.path)
            assert summary(History.read(rig.path)) == summary(rig.history())
        assert len(read_log(rig.path).records) <= len(rig.everything)
        assert compacted(compacted(rig.everything)) == compacted(rig.everything)
        rig.ledger.close()


class Rig:
    """A ledger, and every record that it ever wrote."""

    def __init__(self, path):
        self.path, self.ledger = path, Ledger(path)
        self.everything = read_log(path).records

    def note(self, method, *args):
        before = len(read_log(self.path).records)
        result = getattr(self.ledger, method)(*args)
        records = read_log(self.path).records  # which `saved` has compacted; its own is the last
        self.everything += records[-1:] if method == "saved" else records[before:]
        return result

    def history(self):
        return History(self.everything)


def test_compaction_leaves_steps_checkpoints_and_open_groups(path):
    ledger = Ledger(path)
    step(ledger, 1, [0, 1])
    ledger.issued(PROMPTS[2:6])
    ledger.arrived(GROUPS[2:6])
    ledger.dropped(GROUPS[2:3], "all_1")
    ledger.dropped(GROUPS[3:4], "all_1")
    ledger.trained(2, GROUPS[4:5])
    ledger.compact()
    kinds = [record["at"] for record in read_log(path).records]
    assert kinds == ["begun", "trained", "saved", "issued", "generated", "scored", "trained", "dropped"]
    ledger.issued(PROMPTS[6:7])
    assert states(Ledger.read(path))[6] == "issued", "the file goes on"


def test_a_compaction_that_is_cut_short_leaves_the_ledger_as_it_was(path, monkeypatch):
    ledger = Ledger(path)
    step(ledger, 1, [0, 1])
    before = path.read_bytes()

    def dies(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        ledger.compact()
    assert path.read_bytes() == before
    ledger.issued(PROMPTS[2:3])
    assert states(Ledger.read(path))[2] == "issued"


def test_void_records_go_with_a_compaction_and_their_number_stays(path):
    ledger = Ledger(path)
    mark = step(ledger, 1, [0])
    step(ledger, 2, [1])
    ledger.resumed(1, mark)
    ledger.compact()
    assert b'"step":2' not in path.read_bytes()
    assert Ledger.read(path).resumes[0]["voided"] == {"groups": 1, "steps": [2]}


def test_an_unknown_checkpoint_in_a_ledger_is_an_error(path):
    records = [{"at": "begun", "format": 1}, {"at": "resumed", "step": 4, "mark": "none", "voided": {}}]
    path.write_bytes(encode_all(records)[0])
    with pytest.raises(ValueError, match="resumes from step 4, of whose checkpoint it does not know"):
        holding(read_log(path).records)


# --- the command ---


def test_command_shows_counts_steps_and_resumes(path, capsys):
    ledger = Ledger(path)
    mark = step(ledger, 1, [0, 1])
    step(ledger, 2, [2, 3])
    ledger.resumed(1, mark)
    step(ledger, 2, [2, 3], held=[4])
    assert tool.main([str(path.parent)]) == 0
    shown = capsys.readouterr().out
    assert "groups       held 1, trained 4" in shown and "step 2       d/0/2 d/0/3" in shown
    assert "resumed      after step 1: undone was work on 2 groups and of steps 2" in shown
    assert shown.endswith("no group lost, none trained twice\n")
    assert tool.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == {"1": ["d/0/0", "d/0/1"], "2": ["d/0/2", "d/0/3"]}


def test_command_complains(path, capsys):
    ledger = Ledger(path)
    step(ledger, 1, [0, 1])
    step(ledger, 2, [0, 1])
    assert tool.main([str(path)]) == 1
    assert "group 'd/0/0' (index 0) was trained 2 times" in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[1:])
    assert tool.main([str(path)]) == 1 and "ledger.jsonl:1: the ledger is damaged" in capsys.readouterr().err
    assert tool.main([str(path.parent / "elsewhere")]) == 1 and "no ledger" in capsys.readouterr().err
