import pytest

from rlpost.data_adapters import ADAPTERS, Example, detect, get_adapter
from rlpost.data_config import DataConfig

GSM8K = {"question": "How much?", "answer": "It is <<1+1=2>>2.\n#### 1,234"}
MATH = {"problem": "What?", "solution": r"So \boxed{\frac{1}{2}}, yes.", "level": 2}
VERL = {
    "prompt": [{"role": "user", "content": "How much?"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "72", "style": "rule"},
    "extra_info": {"split": "train"},
    "ability": "math",
}
ROWS = {"prompt": "12+34=", "ground_truth": "46", "data_source": "addition"}


def config(**fields: object) -> DataConfig:
    return DataConfig(train_files="unused", **fields)


def adapt(columns: dict, **fields: object) -> Example:
    cfg = config(**fields)
    return get_adapter(cfg)(columns, cfg)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (GSM8K, "gsm8k"),
        (MATH, "math"),
        (VERL, "verl"),
        (ROWS, "rows"),
        ({"prompt": "1+1=", "answer": "2"}, "plain"),
    ],
)
def test_auto_detects_the_adapter_by_columns(columns: dict, name: str) -> None:
    assert detect(columns, config()) == name
    assert adapt(columns) == adapt(columns, adapter=name)


def test_gsm8k_truth_follows_the_mark_without_commas() -> None:
    example = adapt(GSM8K, adapter="gsm8k")
    assert example.ground_truth == "1234"
    assert example.prompt == [{"role": "user", "content": "How much?"}]
    assert example.data_source == "gsm8k"


def test_math_truth_is_the_answer_or_the_last_box() -> None:
    assert adapt(MATH).ground_truth == r"\frac{1}{2}"
    assert adapt(MATH | {"answer": "0.5"}).ground_truth == "0.5"
    assert adapt(MATH).extra_info == {"level": 2}


def test_verl_columns_are_taken_as_they_are() -> None:
    example = adapt(VERL)
    assert example.prompt == VERL["prompt"]
    assert (example.ground_truth, example.data_source) == ("72", "openai/gsm8k")
    assert example.extra_info == {"ability": "math", "split": "train"}


def test_chat_makes_a_message_of_the_string_and_plain_does_not() -> None:
    columns = {"q": "1+1?", "a": "2", "level": 3}
    fields = {"prompt_key": "q", "answer_key": "a"}
    assert adapt(columns, adapter="plain", **fields).prompt == "1+1?"
    assert adapt(columns, adapter="chat", **fields) == Example(
        prompt=[{"role": "user", "content": "1+1?"}], ground_truth="2", extra_info={"level": 3}
    )
    assert adapt(columns, adapter="plain", prompt_key="q", answer_key=None).ground_truth is None


def test_adapter_by_dotted_path_is_called() -> None:
    assert adapt(ROWS, adapter="rlpost.data_adapters.rows") == adapt(ROWS, adapter="rows")


@pytest.mark.parametrize("name", ADAPTERS.names())
def test_adapters_leave_the_row_unchanged(name: str) -> None:
    columns = {"gsm8k": GSM8K, "math": MATH, "verl": VERL, "rows": ROWS}.get(name, {"prompt": "1+1=", "answer": "2"})
    before = repr(columns)
    ADAPTERS.get(name)(columns, config())
    assert repr(columns) == before


@pytest.mark.parametrize(
    ("columns", "fields", "message"),
    [
        ({"questoin": "1+1?", "answer": "2"}, {"adapter": "gsm8k"}, r"no column 'question'; did you mean 'questoin'"),
        ({"question": "1+1?", "answer": "2"}, {"adapter": "gsm8k"}, r"'answer' has no '####'"),
        ({"problem": "?", "solution": "none"}, {"adapter": "math"}, r"'solution' has no \\boxed"),
        ({"prompt": "?", "reward_model": None}, {"adapter": "verl"}, r"'reward_model' has no 'ground_truth'"),
        ({"prompt": "?"}, {"adapter": "plain"}, r"data.answer_key=answer \(null: no ground truth\): .* no column"),
        ({"text": "?"}, {}, r"data.adapter=auto fits no row with the columns text: set data.prompt_key"),
        ({"text": "?"}, {"adapter": "gsm8"}, r"data.adapter=gsm8: no such adapter; did you mean 'gsm8k'"),
        ({"text": "?"}, {"adapter": "rlpost.data_adapters.ADAPTERS"}, r"not a function"),
    ],
)
def test_row_that_does_not_fit_is_explained(columns: dict, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapt(columns, **fields)
