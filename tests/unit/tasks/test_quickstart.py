import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.config import Config
from rlpost.tasks import quickstart
from rlpost.tasks.addition import problems
from rlpost.workers.model import resolve_path

CACHE = Path(next(f.default for f in fields(Config) if f.name == "cache_dir")).expanduser()


@pytest.fixture
def short(monkeypatch):
    """The maker with a few steps: everything but the accuracy is as in a full run."""
    monkeypatch.setattr(quickstart, "RECIPE", quickstart.Recipe(steps=4, warmup=2, batch_size=8))


def test_quickstart_tokenizer_keeps_characters_through_a_reload(tmp_path):
    quickstart.character_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("12+34=")["input_ids"]
    assert len(ids) == 6 and tokenizer.decode(ids) == "12+34="
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>"]) == [tokenizer.pad_token_id, tokenizer.eos_token_id]
    assert tokenizer("1a")["input_ids"][1] == tokenizer.unk_token_id
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34="
    assert tokenizer.chat_template is None


def test_quickstart_checkpoint_loads_and_has_no_padded_ids(tmp_path, short):
    facts = quickstart.make_quickstart(tmp_path, seed=3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3" and model.dtype == torch.float32
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert facts["num_parameters"] == model.num_parameters() and 0.7e6 < facts["num_parameters"] < 0.9e6


def test_quickstart_is_the_same_for_a_seed_and_another_for_another(tmp_path, short):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        quickstart.make_quickstart(tmp_path / name, seed)
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


def test_quickstart_is_made_once_and_again_when_unfinished_or_for_another_seed(tmp_path, short, monkeypatch):
    trained = []
    train = quickstart.train
    monkeypatch.setattr(quickstart, "train", lambda *args: (trained.append(args[-1]), train(*args)))
    facts = quickstart.make_quickstart(tmp_path, seed=3)
    assert quickstart.make_quickstart(tmp_path, seed=3) == facts and trained == [3]
    (tmp_path / "model.safetensors").unlink()
    assert quickstart.make_quickstart(tmp_path, seed=3) == facts and trained == [3, 3]
    quickstart.make_quickstart(tmp_path, seed=4)
    assert trained == [3, 3, 4]
    assert json.loads((tmp_path / "MADE_BY").read_text())["request"]["seed"] == 4


def test_quickstart_loss_covers_the_answer_and_its_eos_only():
    tokenizer = quickstart.character_tokenizer()
    page = [{"prompt": "12+34="}, {"prompt": "57+68="}]
    ids, is_answer = quickstart.encode(page, ["46", "125"], tokenizer)
    assert [tokenizer.decode(row[mask]) for row, mask in zip(ids, is_answer, strict=True)] == ["46<eos>", "125<eos>"]
    assert [tokenizer.decode(row) for row in ids] == ["12+34=46<eos><pad>", "57+68=125<eos>"]


def test_quickstart_teacher_forced_accuracy_is_that_of_greedy_decoding():
    path = resolve_path("maker:rlpost.tasks.quickstart.make_quickstart", CACHE, seed=1)  # where whole runs have it
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    page = problems(size=200, seed=2, split="val")
    prompts = torch.tensor([tokenizer(p["prompt"])["input_ids"] for p in page])
    sampled = model.generate(prompts, do_sample=False, max_new_tokens=5)[:, prompts.shape[1] :]
    decoded = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    right = sum(text == p["ground_truth"] for text, p in zip(decoded, page, strict=True)) / len(page)
    assert right == pytest.approx(quickstart.greedy_accuracy(model, tokenizer, page))
    assert 0.25 <= right <= 0.45
    # Nearly all that is wrong lacks only its hundred: there is little else for RL to learn.
    habit = sum(text in (p["ground_truth"], p["ground_truth"][-2:]) for text, p in zip(decoded, page, strict=True))
    assert habit / len(page) > 0.8
