import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from rlpost.data import PromptStream, load_prompts, load_val_sets
from rlpost.data_config import DataConfig

DATA = Path(os.environ.get("RLPOST_DATA", Path(__file__).parents[3] / "shared" / "data"))
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined %}!{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {chr(i): i for i in range(128)} | {"?unk": 128}
    model = Tokenizer(WordLevel(vocab, unk_token="?unk"))
    model.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?unk", chat_template=TEMPLATE)


@pytest.fixture
def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?unk")


@pytest.fixture
def sums(tmp_path: Path) -> str:
    """Seven rows; the fifth is twelve characters long."""
    texts = ["0+0=", "1+1=", "2+2=", "3+3=", "44444+44444=", "5+5=", "6+6="]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "?"}) + "\n" for text in texts))
    return str(path)


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(files: Any, **fields: Any) -> DataConfig:
    return DataConfig(train_files=files, **{"max_prompt_length": 10, **fields})


def keys(prompts: list) -> list[tuple[int, str, str]]:
    return [(prompt.index, prompt.id, prompt.text) for prompt in prompts]


def test_stream_issues_every_usable_prompt_once_an_epoch(tokenizer: Any, sums: str) -> None:
    stream = PromptStream(config(sums), tokenizer, seed=1, epochs=2)
    assert (len(stream), stream.dropped_overlong) == (6, 1)
    prompts = list(stream)
    assert [prompt.index for prompt in prompts] == list(range(12))
    assert sorted(prompt.id for prompt in prompts[:6]) == [f"sums/0/{row}" for row in (0, 1, 2, 3, 5, 6)]
    assert sorted(prompt.id for prompt in prompts[6:]) == [f"sums/1/{row}" for row in (0, 1, 2, 3, 5, 6)]
    assert [p.text for p in prompts[:6]] != [p.text for p in prompts[6:]]
    assert stream.next(1) == []


def test_stream_order_depends_on_the_seed_alone(tokenizer: Any, sums: str) -> None:
    first = PromptStream(config(sums), tokenizer, seed=1).next(20)
    assert keys(first) == keys(PromptStream(config(sums), tokenizer, seed=1).next(20))
    assert keys(first) == keys(PromptStream(config(sums, seed=1), tokenizer, seed=2).next(20))
    assert keys(first) != keys(PromptStream(config(sums), tokenizer, seed=2).next(20))
    unshuffled = PromptStream(config(sums, shuffle=False), tokenizer, seed=1).next(6)
    assert [prompt.text for prompt in unshuffled] == ["0+0=", "1+1=", "2+2=", "3+3=", "5+5=", "6+6="]


def test_stream_batch_larger_than_the_data_rolls_over(tokenizer: Any, sums: str) -> None:
    prompts = PromptStream(config(sums), tokenizer, seed=1).next(15)
    assert len({prompt.id for prompt in prompts}) == 15
    assert [prompt.id.split("/")[1] for prompt in prompts] == ["0"] * 6 + ["1"] * 6 + ["2"] * 3


@pytest.mark.parametrize("taken", [0, 1, 4, 6, 11, 12, 17])
def test_stream_resumed_equals_uninterrupted(tokenizer: Any, sums: str, taken: int) -> None:
    whole = PromptStream(config(sums), tokenizer, seed=3)
    whole.next(taken)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptStream(config(sums), tokenizer, seed=3)
    resumed.next(2)
    resumed.load_state_dict(state)
    assert keys(resumed.next(14)) == keys(whole.next(14))


def test_stream_refuses_the_state_of_other_data(tokenizer: Any, sums: str, tmp_path: Path) -> None:
    state = PromptStream(config(sums), tokenizer, seed=3).state_dict()
    with pytest.raises(ValueError, match="seed.* is 4, the checkpoint has 3"):
        PromptStream(config(sums), tokenizer, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="number of usable prompts is 5, the checkpoint has 6"):
        PromptStream(config(sums, train_max_samples=5), tokenizer, seed=3).load_state_dict(state)
    Path(sums).write_text(Path(sums).read_text().replace("3+3", "9+9"))
    with pytest.raises(ValueError, match="digest of the prompts"):
        PromptStream(config(sums), tokenizer, seed=3).load_state_dict(state)


def test_overlong_prompt_is_refused_by_row_when_not_filtered(tokenizer: Any, sums: str) -> None:
    with pytest.raises(ValueError, match=r"sums.jsonl:5: the prompt has 12 tokens, data.max_prompt_length=10"):
        load_prompts(sums, config(sums, filter_overlong_prompts=False), tokenizer, "train")


def test_no_prompt_short_enough_names_the_shortest(tokenizer: Any, sums: str) -> None:
    with pytest.raises(
        ValueError, match=r"data.max_prompt_length=3: none of the 7 prompts .* the shortest has 4 tokens"
    ):
        load_prompts(sums, config(sums, max_prompt_length=3), tokenizer, "train")


def test_string_is_tokenized_as_it_is_in_spite_of_a_template(tokenizer: Any, sums: str) -> None:
    prompt = load_prompts(sums, config(sums), tokenizer, "train")[0]
    assert prompt.text == "0+0="
    assert prompt.token_ids.tolist() == [ord(c) for c in "0+0="]
    assert prompt.token_ids.dtype == "int64"


def test_messages_go_through_the_template_with_instruction_and_system(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "gsm8k.jsonl", {"question": "How much?", "answer": "#### 7", "messages": "a column"})
    cfg = config(
        path,
        instruction="Think.",
        system_prompt="Be brief.",
        chat_template_kwargs={"think": True},
        max_prompt_length=99,
    )
    (prompt,) = load_prompts(path, cfg, tokenizer, "train")
    assert prompt.text == "<system>Be brief.<user>How much?\nThink.<assistant>!"
    assert prompt.token_ids.tolist() == [ord(c) for c in prompt.text]
    assert (prompt.ground_truth, prompt.data_source) == ("7", "gsm8k")
    assert prompt.extra_info["messages"] == [  # what the policy is asked, as a reward model must see it
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How much?\nThink."},
    ]


def test_messages_are_joined_without_a_template(plain_tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "gsm8k.jsonl", {"question": "How much?", "answer": "#### 7"})
    cfg = config(path, apply_chat_template=False, instruction="Think.", max_prompt_length=99)
    assert load_prompts(path, cfg, plain_tokenizer, "train")[0].text == "How much?\nThink."


def test_missing_template_names_both_ways_out(plain_tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "gsm8k.jsonl", {"question": "How much?", "answer": "#### 7"})
    with pytest.raises(
        ValueError, match=r"no chat template: set model.chat_template, or data.apply_chat_template=false"
    ):
        load_prompts(path, config(path), plain_tokenizer, "train")


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"prompt": "1+1=", "answer": "2"}, {"system_prompt": "Hi"}, r"x.jsonl:1: data.system_prompt needs messages"),
        ({"prompt": 3, "answer": "2"}, {}, r"x.jsonl:1: the prompt is '3', expected a string or a list of"),
        ({"prompt": [], "answer": "2"}, {}, r"x.jsonl:1: the prompt is '\[\]', expected"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, {}, r"x.jsonl:1: the prompt is .*, expected"),
        ({"prompt": "", "answer": "2"}, {}, r"x.jsonl:1: the prompt has no tokens"),
        ({"promt": "1+1=", "answer": "2"}, {"adapter": "plain"}, r"x.jsonl:1: data.prompt_key=prompt: .* 'promt'"),
        ({"a": 1}, {"adapter": "operator.getitem"}, r"x.jsonl:1: data.adapter=operator.getitem: TypeError"),
        (
            {"prompt": [{"role": "system", "content": "a"}], "answer": "2"},
            {"instruction": "Think."},
            r"x.jsonl:1: data.instruction is appended to a user message, but the prompt has none",
        ),
    ],
)
def test_row_that_makes_no_prompt_is_named(
    tokenizer: Any, tmp_path: Path, row: dict, fields: dict, message: str
) -> None:
    path = write(tmp_path / "x.jsonl", row)
    with pytest.raises(ValueError, match=message):
        load_prompts(path, config(path, **fields), tokenizer, "train")


def test_adapter_must_return_an_example(tokenizer: Any, sums: str) -> None:
    with pytest.raises(ValueError, match=r"sums.jsonl:1: data.adapter=.*detect returned a str, expected rlpost"):
        load_prompts(sums, config(sums, adapter="rlpost.data_adapters.detect"), tokenizer, "train")


@pytest.mark.parametrize("files", [[], None, [3], {"a": "b"}])
def test_train_files_of_another_form_are_refused(tokenizer: Any, files: Any) -> None:
    with pytest.raises(ValueError, match="data.train_files=.*: expected a path or address, or a list of them"):
        PromptStream(config(files), tokenizer, seed=1)


def test_sources_of_the_same_name_get_different_ids(tokenizer: Any, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "x.jsonl", {"prompt": folder, "answer": "2"})
    files = [str(tmp_path / folder / "x.jsonl") for folder in ("a", "b")]
    prompts = load_prompts(files, config(files), tokenizer, "train")
    assert [(p.id, p.text) for p in prompts] == [("x/0/0", "a"), ("x-2/0/0", "b")]


def test_validation_sets_are_named_and_limited(tokenizer: Any, sums: str) -> None:
    cfg = config(sums, val_files={"one": sums, "two": [sums]}, val_max_samples=2)
    sets = load_val_sets(cfg, tokenizer)
    assert {name: [p.id for p in prompts] for name, prompts in sets.items()} == {
        "one": ["val.one.sums/0/0", "val.one.sums/0/1"],
        "two": ["val.two.sums/0/0", "val.two.sums/0/1"],
    }
    assert list(load_val_sets(config(sums, val_files=[sums, sums]), tokenizer)) == ["sums", "sums-2"]
    assert load_val_sets(config(sums), tokenizer) == {}


def test_validation_sets_of_rows_with_sources_of_their_own(tokenizer: Any, tmp_path: Path) -> None:
    def rows(name: str, *sources: str) -> str:
        return write(tmp_path / f"{name}.jsonl", *({"prompt": "1", "answer": "2", "data_source": s} for s in sources))

    def sizes(val_files: Any) -> dict[str, int]:
        sets = load_val_sets(config(rows("train", "a"), val_files=val_files), tokenizer)
        return {name: len(prompts) for name, prompts in sets.items()}

    one, both = rows("one", "a", "a"), rows("both", "a", "b", "b")
    assert sizes({"easy": one, "hard": one}) == {"easy": 2, "hard": 2}
    assert sizes({"easy": one, "all": both}) == {"easy": 2, "all/a": 1, "all/b": 2}
    assert sizes([one, both]) == {"a": 3, "b": 2}  # as verl does


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_batch_size": 0}, "data.train_batch_size=0: must be >= 1"),
        ({"val_max_samples": 0}, "data.val_max_samples=0: must be >= 1, or null"),
        ({"apply_chat_template": False, "chat_template_kwargs": {"a": 1}}, "data.chat_template_kwargs=.*has no effect"),
    ],
)
def test_config_refuses_what_makes_no_sense(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config("x", **fields)


def test_verl_parquet_becomes_prompts(tokenizer: Any, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 7, "split": "train"},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row] * 3), tmp_path / "train.parquet")
    path = str(tmp_path / "train.parquet")
    prompt = load_prompts(path, config(path, max_prompt_length=99), tokenizer, "train")[2]
    assert (prompt.id, prompt.text, prompt.ground_truth) == ("train/0/2", "<user>1+1?<assistant>", "2")
    assert (prompt.data_source, prompt.extra_info["index"]) == ("openai/gsm8k", 7)


@pytest.mark.parametrize(("name", "truth"), [("gsm8k/test.jsonl", "18"), ("math500/test.jsonl", None)])
def test_real_data_sets_become_prompts(tokenizer: Any, name: str, truth: str | None) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {name} in {DATA}; set RLPOST_DATA to its folder")
    stream = PromptStream(config(str(path), max_prompt_length=400, shuffle=False), tokenizer, seed=1)
    rows = len(path.read_text().splitlines())
    assert len(stream) + stream.dropped_overlong == rows
    assert 0 < stream.dropped_overlong < rows / 2
    prompt = stream.next(1)[0]
    assert prompt.text.startswith("<user>") and prompt.text.endswith("<assistant>")
    assert prompt.ground_truth == (truth or r"\left( 3, \frac{\pi}{2} \right)")
