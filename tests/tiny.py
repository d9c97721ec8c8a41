"""What many tests need: a tiny Qwen3 on disk, the facts about it, a process group of one, and Ray on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rlpost.host import free_port
from rlpost.platform import RAY_ENV
from rlpost.workers.model import ModelInfo

ROOT = Path(__file__).parents[1]
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM has CPU attention for
    "max_position_embeddings": 64,
}


def write_qwen3(folder: Path, kind: type[PreTrainedModel] = Qwen3ForCausalLM, *, seed: int = 0, **changes: Any) -> Path:
    """A two-layer Qwen3 of random float32 weights, without a tokenizer; `changes` are fields of its config."""
    torch.manual_seed(seed)
    kind(Qwen3Config(**SHAPE | changes)).float().save_pretrained(folder)
    return folder


def model_info(folder: Path, vocab_size: int | None = None) -> ModelInfo:
    """Facts about what `write_qwen3` wrote; `vocab_size` ids belong to tokens (default: all), and 1 ends an answer."""
    config = Qwen3Config.from_pretrained(folder)
    return ModelInfo(
        path=str(folder),
        tokenizer_path=str(folder),
        vocab_size=vocab_size or config.vocab_size,
        embedding_size=config.vocab_size,
        stop_token_ids=(1,),
        max_position_embeddings=config.max_position_embeddings,
    )


@contextmanager
def group_of_one() -> Iterator[None]:
    """This process as the only rank of a gloo process group, computing on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def local_ray(*paths: Path, num_cpus: int = 4, num_gpus: int = 0, setup: str | None = None) -> Iterator[None]:
    """A Ray of one's own, whose processes import what the tests import, and what lies in `paths`.

    `setup` is the dotted path of a function that each of them runs first.
    """
    env = RAY_ENV | {"PYTHONPATH": ":".join(map(str, (ROOT, *paths))), "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": env} | ({"worker_process_setup_hook": setup} if setup else {}),
    )
    try:
        yield
    finally:
        ray.shutdown()
