"""Checkpoints as everyone is told of them."""

import json
import os
import subprocess
import sys

import ray.cloudpickle

from rlpost.tasks.quickstart import character_tokenizer
from rlpost.workers.model import ModelInfo, portable_tokenizer

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
