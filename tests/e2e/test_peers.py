"""The comparison with other systems, on its own side: from random weights to a row of the table."""

import json
from pathlib import Path

from benchmarks.peers.__main__ import main
from rlpost.tasks.quickstart import character_tokenizer


def test_peers_measures_rlpost_on_cpu(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    out = tmp_path / "out.json"
    cell = "--model tiny --vocabulary 500 --lengths fixed12 --prompts 2 --samples 2 --warmup 1 --steps 1 --engine hf"
    where = ["--tokenizer", str(tmp_path / "tokenizer"), "--work", str(tmp_path / "work"), "--out", str(out)]
    assert main([*cell.split(), "--systems", "rlpost", *where]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["system"], row["variant"], row["ended"]) == ("rlpost", "fast", "done")
    assert row["tokens_per_step"] == 2 * 2 * 12  # no answer ends early
    assert row["differences"]["train_rollout_logprob_abs_diff/mean"] < 1e-3
    assert {"generate", "update", "weight_sync"} <= row["phases_s"].keys()
    assert "| rlpost (fast) | done |" in out.with_suffix(".md").read_text()
