"""One tiny checkpoint for all whole runs."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with the quickstart's tokenizer; its embedding has rows that belong to no token."""
    from rlpost.tasks.quickstart import character_tokenizer
    from tests import tiny

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = character_tokenizer()
    tiny.write_qwen3(
        folder,
        vocab_size=len(tokenizer) + 9,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(folder)
    return folder
