"""Weights to send, and processes that receive them."""

import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlpost.platform import platform
from rlpost.workers.weight_sync.reader import BucketReader

SHAPES = {"a": (5, 3), "b": (7,), "c": (40, 10), "d": (1,), "e": (3, 3, 3)}


class Weights:
    """Plays the train engine; the tensor it yields is overwritten when the next one is taken."""

    def __init__(self, seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES):
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def named_weights(self, dtype):
        for name, tensor in self.tensors.items():
            shared = tensor.to(dtype).clone()
            yield name, shared
            shared.fill_(torch.nan)


class ReaderProcess:
    """A `BucketReader` in a process of its own."""

    def __init__(self, device: str = "cpu"):
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self.process.start()

    def ask(self, method: str, *args: Any) -> None:
        """Have it call `read` or `close`; `answer` is what came of it."""
        self._pipe.send((method, args))

    def answer(self, limit_s: float = 60.0) -> Any:
        """Of the oldest question without one: received tensors by name, or the digest."""
        assert self._pipe.poll(limit_s), "no answer"
        return self._pipe.recv()

    def kill(self) -> None:
        """End it, as when the system does."""
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, device: str) -> None:
    torch.set_num_threads(1)
    platform().set_device(torch.device(device).index or 0)
    reader = BucketReader(device)
    while True:
        method, args = pipe.recv()
        if method == "read":
            pipe.send({name: tensor.cpu().float().numpy() for name, tensor in reader.read(*args)})
        else:
            pipe.send(reader.close())
