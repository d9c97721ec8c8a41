"""One tiny checkpoint for all whole runs."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with the quickstart's tokenizer; its embedding has rows that belong to no token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlpost.tasks.quickstart import character_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 9,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
