import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from rlpost.rewards.base import Answer
from rlpost.rewards.config import RewardModelConfig
from rlpost.rewards.model import reward_model
from rlpost.trajectory import Prompt
from rlpost.workers.reward_model import RewardModel
from tests import tiny

MESSAGES = [{"role": "user", "content": "1+1?"}]


def write_checkpoint(folder: Path, num_labels: int = 1, chat_template: str | None = None, **changes: Any) -> str:
    """A tiny reward model; every printable character is a token, `~` ends a text, and `|` begins it (as Llama 3's)."""
    vocab = {chr(i): i for i in range(32, 127)} | {"?unk": 1}
    model = Tokenizer(WordLevel(vocab, unk_token="?unk"))
    model.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    model.post_processor = TemplateProcessing(single="| $A", special_tokens=[("|", ord("|"))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="?unk", bos_token="|", eos_token="~", pad_token="~"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    kind = changes.pop("kind", Qwen3ForSequenceClassification)
    return str(tiny.write_qwen3(folder, kind, vocab_size=128, num_labels=num_labels, **changes))


def by_transformers(path: str, ids: list[int]) -> float:
    """The head's score of the last of these tokens, without padding."""
    whole = Qwen3ForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(whole.score(whole.model(torch.tensor([ids])).last_hidden_state[:, -1])[0, 0])


def test_reward_model_scores_are_those_of_single_texts(tmp_path: Path) -> None:
    model = RewardModel(write_checkpoint(tmp_path), RewardModelConfig(batch_size=2))
    texts = ["1+1=2", "short", "a much longer text than the others"]
    alone = [model.score([text])[0] for text in texts]
    assert model.score(texts) == pytest.approx(alone, abs=1e-5)
    assert len(set(alone)) == 3
    assert model.score([]) == []


@pytest.mark.parametrize("text", ["1+1=2", "1+1=2~"])
def test_reward_model_score_is_the_head_at_the_last_token(tmp_path: Path, text: str) -> None:
    path = write_checkpoint(tmp_path)
    model = RewardModel(path, RewardModelConfig())
    expected = by_transformers(path, [ord(c) for c in "|" + text])
    assert model.score([text])[0] == pytest.approx(expected, abs=1e-5)
    assert model.score([text, "a longer text~"])[0] == pytest.approx(expected, abs=1e-5)


def test_reward_model_keeps_the_end_of_a_long_text(tmp_path: Path) -> None:
    model = RewardModel(write_checkpoint(tmp_path), RewardModelConfig(max_length=4))
    assert model.score(["xxxxbcd"]) == pytest.approx(model.score(["bcd"]))


def test_reward_model_without_a_score_head_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, kind=Qwen3ForCausalLM)
    with pytest.raises(ValueError, match="reward.reward_model.path=.*: the checkpoint has no score.weight"):
        RewardModel(path, RewardModelConfig())


def test_reward_model_refuses_a_text_without_tokens(tmp_path: Path) -> None:
    model = RewardModel(write_checkpoint(tmp_path, chat_template="{{ '' }}"), RewardModelConfig())
    with pytest.raises(ValueError, match="a text without tokens"):
        model.score([MESSAGES])


def test_reward_model_with_several_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward.reward_model.path=.*: it has 3 labels, expected 1"):
        RewardModel(write_checkpoint(tmp_path, num_labels=3), RewardModelConfig())


def test_reward_model_reads_conversations_as_transformers_does(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    path = write_checkpoint(tmp_path / "a", chat_template=template)
    model = RewardModel(path, RewardModelConfig())
    longer = [*MESSAGES, {"role": "assistant", "content": "2"}]
    ids = [model.tokenizer.apply_chat_template(c, tokenize=True, return_dict=False) for c in (MESSAGES, longer)]
    assert ids[0] == [ord(c) for c in "|<user>1+1?~"]
    assert model.score([MESSAGES, longer]) == pytest.approx([by_transformers(path, one) for one in ids], abs=1e-5)
    bare = RewardModel(write_checkpoint(tmp_path / "b"), RewardModelConfig())
    with pytest.raises(ValueError, match="the reward model's tokenizer has no chat template"):
        bare.score([MESSAGES])


def test_reward_model_term_sends_text_or_conversation() -> None:
    sent: list[Any] = []

    async def served(inputs: list) -> list[float]:
        sent.extend(inputs)
        return [1.0] * len(inputs)

    def ask(extra_info: dict, chat: bool) -> list[float]:
        prompt = Prompt(
            id="x/0/0", index=0, token_ids=np.array([1]), text="<user>1+1?", data_source="d", extra_info=extra_info
        )
        return asyncio.run(reward_model(prompt, [Answer(text="2", token_ids=[1])], reward_model=served, chat=chat))

    assert ask({}, chat=False) == ask({"messages": MESSAGES}, chat=True) == [1.0]
    assert sent == ["<user>1+1?2", [*MESSAGES, {"role": "assistant", "content": "2"}]]
    with pytest.raises(ValueError, match="chat=true needs a prompt of messages"):
        ask({}, chat=True)
