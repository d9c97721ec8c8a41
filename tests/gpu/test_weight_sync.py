"""Weights between processes: through memory of device 0, or by broadcast to a reader on each of the other devices."""

import numpy as np
import pytest
import torch

from rlpost.workers.weight_sync.base import check_digests
from rlpost.workers.weight_sync.collective import BroadcastError
from rlpost.workers.weight_sync.reader import MISSED
from rlpost.workers.weight_sync.sender import Sender
from tests.unit.workers.weight_sync.readers import ReaderProcess, Weights

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")

SMALL = 500  # bytes of a bucket; the largest tensor makes it larger


@pytest.fixture
def start():
    """Starts a reader on each of the devices; ends them all."""
    started: list[ReaderProcess] = []

    def readers(devices: list[int]) -> list[ReaderProcess]:
        started.extend(ReaderProcess(f"cuda:{device}") for device in devices)
        return started[-len(devices) :]

    yield readers
    for reader in started:
        reader.kill()


def others() -> list[int]:
    return list(range(1, torch.cuda.device_count()))


def make_sender(transport: str, num_readers: int, seed: int = 0) -> tuple[Sender, Weights]:
    weights = Weights(seed)
    return Sender(transport, weights, torch.bfloat16, SMALL, num_readers, 120.0), weights


def digests(readers: list[ReaderProcess]) -> dict[int, int]:
    for reader in readers:
        reader.ask("close")
    return {replica: reader.answer() for replica, reader in enumerate(readers)}


def check_update(sender: Sender, weights: Weights, readers: list[ReaderProcess]) -> None:
    received: list[dict] = [{} for _ in readers]
    num_buckets, bucket = 0, sender.next_bucket()
    while bucket:
        for number, reader in enumerate(readers):
            reader.ask("read", bucket | {"reader": dict.fromkeys(bucket.get("handles", ()), number)})
        num_buckets, bucket = num_buckets + 1, sender.next_bucket()
        for reader, tensors in zip(readers, received, strict=True):
            tensors |= reader.answer()
    assert num_buckets > 1
    for tensors in received:
        assert tensors.keys() == weights.tensors.keys()
        assert all(np.array_equal(tensors[n], t.bfloat16().float().numpy()) for n, t in weights.tensors.items())
    check_digests([sender.close()], digests(readers), 1)


@pytest.mark.parametrize("num_readers", [1, 2])
def test_mapped_memory_is_free_again_after_each_update(num_readers, start):
    readers = start([0] * num_readers)
    sender, weights = make_sender("ipc", num_readers)
    check_update(sender, weights, readers)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        check_update(sender, weights, readers)
    assert torch.cuda.memory_allocated() == before


@two_gpus
def test_nccl_gives_every_other_device_the_weights(start):
    readers = start(others())
    for seed in range(2):  # another sender is another group
        sender, weights = make_sender("nccl", len(readers), seed)
        for _ in range(2):
            check_update(sender, weights, readers)
        sender.abandon()


@two_gpus
def test_gloo_serves_two_readers_of_one_device(start):
    readers = start([1, 1])
    sender, weights = make_sender("gloo", 2)
    check_update(sender, weights, readers)
    sender.abandon()


@two_gpus
def test_nccl_reader_that_dies_ends_neither_the_trainer_nor_the_others(start):
    *survivors, mortal = start(others())
    weights = Weights(0, {"a": (3,), "b": (8192, 4096), "c": (8192, 4096)})  # more than NCCL holds for who is not there
    sender = Sender("nccl", weights, torch.bfloat16, SMALL, len(survivors) + 1, 20.0)
    bucket = sender.next_bucket()
    for reader in [*survivors, mortal]:
        reader.ask("read", bucket)
    assert all(reader.answer() for reader in [*survivors, mortal])
    mortal.kill()
    while bucket := sender.next_bucket():
        for reader in survivors:
            reader.ask("read", bucket)
        for reader in survivors:
            reader.answer()
    with pytest.raises(BroadcastError):
        sender.close()
    assert digests(survivors) == dict.fromkeys(range(len(survivors)), MISSED)
    sender.abandon()
    readers = [*survivors, *start([others()[-1]])]
    again, weights = make_sender("nccl", len(readers), seed=1)
    check_update(again, weights, readers)
    again.abandon()
