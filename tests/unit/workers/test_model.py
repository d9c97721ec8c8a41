"""Checkpoints as everyone is told of them."""

import json
import os
import subprocess
import sys

import pytest
import ray.cloudpickle
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config

from rlpost.tasks.quickstart import character_tokenizer
from rlpost.workers.config import ModelConfig
from rlpost.workers.model import ModelInfo, inspect, portable_tokenizer
from tests import tiny

CODE = """
from transformers import PreTrainedTokenizerFast

class Shouting(PreTrainedTokenizerFast):
    def decode(self, ids, **kwargs):
        return super().decode(ids, **kwargs) + "!"
"""


def test_tokenizer_with_code_of_its_own_travels_without_its_files(tmp_path):
    character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "shouting.py").write_text(CODE)
    file = tmp_path / "tokenizer_config.json"
    own = {"tokenizer_class": "Shouting", "auto_map": {"AutoTokenizer": [None, "shouting.Shouting"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    info = ModelInfo(
        path="",
        tokenizer_path=str(tmp_path),
        vocab_size=1,
        embedding_size=1,
        stop_token_ids=(),
        max_position_embeddings=1,
        trust_remote_code=True,
    )
    tokenizer = portable_tokenizer(info)
    sent = ray.cloudpickle.dumps(tokenizer)
    script = "import sys, pickle; print(pickle.load(sys.stdin.buffer).decode([5, 6]), 'torch' in sys.modules)"
    elsewhere = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "empty")}
    said = subprocess.run(
        [sys.executable, "-c", script], input=sent, stdout=subprocess.PIPE, check=True, env=elsewhere, cwd=tmp_path
    )
    assert said.stdout.decode().split() == [tokenizer.decode([5, 6]), "False"]
    assert tokenizer.decode([5, 6]).endswith("!")


def test_ids_of_a_tokenizer_may_have_gaps(tmp_path):
    vocabulary = {f"w{i}": i for i in range(20)} | {"<unk>": 20, "<eos>": 25}  # 21 to 24 belong to no token
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(tmp_path)
    Qwen3Config(**tiny.SHAPE | {"eos_token_id": 25}).save_pretrained(tmp_path)
    info, _ = inspect(ModelConfig(path=str(tmp_path)), tmp_path, seed=0)
    assert info.vocab_size == 26 and info.stop_token_ids == (25,)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 2**31),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        (
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 16,
                "long_factor": [2.0] * 16,
            },
            16,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_sequences_are_no_longer_than_their_frequencies_are_the_same(tmp_path, rope, longest):
    character_tokenizer().save_pretrained(tmp_path)
    rope = rope | {"rope_theta": 10000.0}
    Qwen3Config(**tiny.SHAPE, rope_parameters=rope).save_pretrained(tmp_path)
    info, _ = inspect(ModelConfig(path=str(tmp_path)), tmp_path, seed=0)
    assert info.max_position_embeddings == longest
