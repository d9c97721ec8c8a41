"""`explain`, the reference of all keys, and the table of verl's: one source, and pages that are up to date."""

import re
import subprocess
import sys

import pytest

from rlpost.config import CONFIG_DIR, all_keys, keys_of_variants
from rlpost.reference import all_documented, section_meaning
from rlpost.tools.explain import PAGES, explain, main
from rlpost.verl_keys import ROWS, from_verl, ours_of, verl_names

ROOT = CONFIG_DIR.parent
KEYS = {key.name: key for key in all_documented()}


def test_every_key_is_documented_with_a_meaning():
    sections = {key.partition(".")[0] for key in all_keys() if "." in key}
    leaves = {key for key in [*all_keys(), *keys_of_variants()] if key not in sections}
    leaves = {key for key in leaves if not any(other.startswith(f"{key}.") for other in leaves)}
    assert leaves <= set(KEYS)
    assert [key.name for key in KEYS.values() if not key.meaning] == []
    assert all(section_meaning(section) for section in sections)


def test_types_defaults_and_choices_are_those_of_the_schema():
    assert (KEYS["actor.optim.lr"].type, KEYS["actor.optim.lr"].default) == ("float", "1e-06")
    assert (KEYS["rollout.max_model_len"].type, KEYS["rollout.max_model_len"].default) == ("int or null", "null")
    assert (KEYS["model.path"].default, KEYS["data.shuffle"].default) == ("must be set", "true")
    assert KEYS["trainer.max_staleness"].choice == "trainer=fully_async" and KEYS["trainer.test_freq"].choice == ""
    assert KEYS["reward.terms.*.weight"].meaning.startswith("0: logged")


@pytest.mark.parametrize("page", PAGES)
def test_page_is_up_to_date(page):
    written = (ROOT / "docs" / page).read_text()
    assert written == PAGES[page](), f"docs/{page}: write it anew by `python -m rlpost.tools.explain --write docs`"


def test_pages_are_written_where_one_asks(tmp_path):
    assert main(["--write", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)


def test_a_key_is_explained_with_reader_and_verls_name():
    text = explain("critic.optim.min_lr_ratio")
    assert text is not None
    for part in ("fraction of lr", "float", "a critic (algo=ppo)", "that decays", "rlpost/workers"):
        assert part in text
    assert "actor_rollout_ref.rollout.n" in (explain("rollout.n") or "")
    assert "the root config sets 0.0005" in (explain("actor.optim.lr") or "")
    assert "trainer=fully_async" in (explain("trainer.max_staleness") or "")


def test_a_prefix_lists_what_is_below_it():
    lines = (explain("algo.kl_ctrl") or "").splitlines()
    assert [line.split()[0] for line in lines] == [
        f"algo.kl_ctrl.{k}" for k in ("type", "kl_coef", "horizon", "target_kl")
    ]


@pytest.mark.parametrize(
    ("asked", "head"),
    [
        ("+rollout.engine_kwargs.x=1", "rollout.engine_kwargs"),
        ("data.val_files.mine", "data.val_files"),
        ("reward.terms.mine.fn", "reward.terms.*.fn"),
        ("reward.terms.mine.kwargs.x.y", "reward.terms.*.kwargs"),
        ("reward.terms.mine", "reward.terms.*.fn"),
    ],
)
def test_names_of_the_users_are_explained_by_the_key_that_takes_them(asked, head, capsys):
    assert main([asked]) == 0
    assert capsys.readouterr().out.split()[0] == head


def test_a_wrong_key_of_a_named_thing_names_the_near_ones(capsys):
    assert main(["reward.terms.mine.wieght"]) == 2
    assert "'reward.terms.mine.weight'" in capsys.readouterr().err


def test_verls_key_is_answered_with_ours(capsys):
    assert main(["actor_rollout_ref.rollout.n=8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("actor_rollout_ref.rollout.n is verl's name for rollout.n\n\nrollout.n\n  samples a prompt")
    assert "has none here: always on" in (explain("actor_rollout_ref.model.use_remove_padding") or "")


def test_an_unknown_key_names_the_near_ones(capsys):
    assert main(["algo.gama"]) == 2
    assert "'algo.gamma'" in capsys.readouterr().err


def test_table_of_verls_keys_names_ours_and_none_twice():
    pairs = [pair for row in ROWS for pair in row.pairs()]
    assert len({theirs for theirs, _ in pairs}) == len(pairs) > 100
    assert {ours for _, ours in pairs if ours is not None} <= {*all_keys(), *keys_of_variants()}
    assert all(row.note for row in ROWS if row.ours is None)
    assert from_verl("data.train_batch_size") is None and verl_names("data.train_batch_size") == [
        "data.train_batch_size"
    ]


def test_the_readmes_table_agrees_with_it():
    table = (ROOT / "README.md").read_text().partition("## From verl")[2].partition("The whole table")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `") and "main_ppo" not in line]
    assert len(rows) >= 8
    for theirs, ours in rows:
        first, *more = re.findall(r"`([\w.]+)(?:=\w+)?`", theirs)
        for name in (first, *(key if "." in key else f"{first.rpartition('.')[0]}.{key}" for key in more)):
            found = ours_of(name)
            assert found is not None, name
            assert found == name if "the same" in ours else found.partition(".")[0] in ours, (name, ours)


def test_explain_imports_neither_torch_nor_ray():
    code = "import sys, rlpost.tools.explain as e; e.main(['rollout.n']); print({'torch', 'ray'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert shown.stdout.splitlines()[-1] == "set()", shown.stderr
