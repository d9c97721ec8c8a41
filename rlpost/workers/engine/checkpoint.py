"""Saving, restoring and exporting an engine: sharded safetensors with every random state, and Hugging Face folders."""

import json
import random
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from rlpost.files import NUM_THREADS, file_digests, write_synced
from rlpost.workers.engine.scaling import LossScaler

MOMENTS = ("exp_avg", "exp_avg_sq")
FILE_BYTES = 1 << 30


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the optimizer owns, by name; frozen ones come from the model's own checkpoint."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, scaler: LossScaler, updates: int
) -> dict[str, str]:
    """Write weights and optimizer state as sharded safetensors, and the rest of this rank as JSON; collective.

    Returns the digests of the files that this rank wrote, by their names below `folder`.

    Raises:
        RuntimeError: on all ranks, what went wrong on one of them, such as a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state, rank = _state(trainable(model), optimizer), dist.get_rank()
    writer = HuggingFaceStorageWriter(
        str(folder / "shards"), fqn_to_index_mapping=_files_of(state), save_distributed=True
    )
    with _plain_errors(f"save to {folder}"):
        dcp.save(state, storage_writer=writer)
    progress = {
        "updates": updates,
        "has_moments": bool(optimizer.state),
        "scaler": scaler.state_dict(),
        "random": random_state(),
    }
    write_synced(folder / f"rank_{rank}.json", json.dumps(progress).encode())
    written = [folder / f"rank_{rank}.json", *folder.glob(f"shards/shard-{rank + 1:05d}-*")]
    digests = file_digests(folder, [str(path.relative_to(folder)) for path in written])
    dist.barrier()
    return digests


def load(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, scaler: LossScaler) -> int:
    """Restore what `save` wrote, in place, at any world size; returns the number of updates made. Collective.

    Random states come back where the rank existed before; a new rank keeps its own. A scaler of which nothing was
    written, by an earlier version or in another dtype, stays as it is.

    Raises:
        ValueError: no checkpoint in `folder`.
        RuntimeError: it does not fit the model, or cannot be read.
    """
    own = folder / f"rank_{dist.get_rank()}.json"
    first = folder / "rank_0.json"
    if not first.is_file():
        raise ValueError(f"{folder} holds no engine state (rank_0.json is missing)")
    progress = json.loads((own if own.is_file() else first).read_text())
    parameters = trainable(model)
    optimizer.state.clear()
    if progress["has_moments"]:
        for parameter in parameters.values():
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step} | {m: torch.zeros_like(parameter) for m in MOMENTS}
    reader = HuggingFaceStorageReader(str(folder / "shards"), thread_count=NUM_THREADS)
    with _plain_errors(f"load from {folder}"):
        dcp.load(_state(parameters, optimizer), storage_reader=reader)
    scaler.load_state_dict(progress.get("scaler", {}))
    if own.is_file():
        set_random_state(progress["random"])
    dist.barrier()
    return progress["updates"]


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """DCP's own error is no `Exception`, and would end the process instead of reaching whoever waits for it."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank} failed to {what}: {type(cause).__name__}: {cause}") from cause


def _files_of(state: dict[str, Tensor]) -> dict[str, int]:
    """Number of the file, from 1, of each tensor: a file is put together in memory before it is written."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if filled and filled + local.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += local.nbytes
    return files


def _state(parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Everything that is sharded, as one flat mapping whose tensors are the live ones."""
    state: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for part, value in optimizer.state.get(parameter, {}).items():
            state[f"optim.{name}.{part}"] = value
    return state


def random_state() -> dict[str, Any]:
    """State of every generator this process draws from, as JSON can hold it."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore `random_state`."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    torch.set_rng_state(_bytes_of(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_of(state["cuda"]))


def _bytes_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def export_hf(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    model_path: str,
    tokenizer_path: str,
    dtype: torch.dtype,
) -> None:
    """Write safetensors, config, generation config and tokenizer files; rank 0 writes, all ranks iterate `weights`."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = dict(_on_host(weights))
        save_torch_state_dict(tensors, folder, safe_serialization=True)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = dtype
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if (Path(model_path) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(model_path).save_pretrained(folder)
        _copy_tokenizer(Path(tokenizer_path), folder)
    else:
        for _ in weights:
            pass
    dist.barrier()


def _on_host(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        yield name, tensor.to("cpu", copy=True).contiguous()


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Files beside the weights that are not weights or model configuration: tokenizer, template, custom code."""
    for path in source.iterdir():
        keep = path.suffix in (".json", ".txt", ".model", ".jinja", ".py")
        is_model = path.name in ("config.json", "generation_config.json") or path.name.endswith(".index.json")
        if path.is_file() and keep and not is_model:
            shutil.copy(path, folder / path.name)
