"""Broadcasts between real processes over gloo."""

import numpy as np
import pytest
import torch

from rlpost.workers.weight_sync.base import check_digests
from rlpost.workers.weight_sync.collective import BroadcastError, GroupSpec, cancel
from rlpost.workers.weight_sync.reader import MISSED
from rlpost.workers.weight_sync.sender import Sender
from tests.unit.workers.weight_sync.readers import ReaderProcess, Weights

LIMIT_S = 60.0  # never reached but by those who wait for nothing
SMALL = 500  # bytes of a bucket: four of them, one of which holds a tensor larger than that


@pytest.fixture(scope="module")
def readers():
    processes = [ReaderProcess() for _ in range(2)]
    yield processes
    for reader in processes:
        reader.kill()


@pytest.fixture
def mortal():
    process = ReaderProcess()
    yield process
    process.kill()


def make_sender(num_readers: int, timeout_s: float = LIMIT_S, seed: int = 0) -> tuple[Sender, Weights]:
    weights = Weights(seed)
    return Sender("gloo", weights, torch.float32, SMALL, num_readers, timeout_s), weights


def send_all(sender, readers) -> list[dict]:
    """One update as the driver does it: the next bucket is filled while one is being read."""
    received = [{} for _ in readers]
    bucket = sender.next_bucket()
    while bucket:
        for reader in readers:
            reader.ask("read", bucket)
        bucket = sender.next_bucket()
        for reader, tensors in zip(readers, received, strict=True):
            tensors |= reader.answer()
    return received


def digests(readers) -> dict[int, int]:
    for reader in readers:
        reader.ask("close")
    return {replica: reader.answer() for replica, reader in enumerate(readers)}


def test_every_reader_gets_every_update(readers):
    for seed in range(2):  # another sender is another group
        sender, weights = make_sender(len(readers), seed=seed)
        for _ in range(2):
            for received in send_all(sender, readers):
                assert received.keys() == weights.tensors.keys()
                assert all(np.array_equal(received[name], t.numpy()) for name, t in weights.tensors.items())
            check_digests([sender.close()], digests(readers), 1)
        sender.abandon()


def test_a_bucket_misread_shows_in_the_digest(readers):
    sender, _ = make_sender(len(readers))
    while bucket := sender.next_bucket():
        readers[0].ask("read", bucket)
        names = bucket["names"]
        readers[1].ask("read", bucket | {"names": ["x", *names[1:]]} if "c" in names else bucket)
        for reader in readers:
            reader.answer()
    with pytest.raises(RuntimeError, match=r"replicas received \{1: "):
        check_digests([sender.close()], digests(readers), 1)
    sender.abandon()


def first_bucket(sender, readers) -> None:
    """Sent and read: everyone has joined."""
    bucket = sender.next_bucket()
    for reader in readers:
        reader.ask("read", bucket)
    assert [list(reader.answer()) for reader in readers] == [bucket["names"]] * len(readers)


def test_reader_that_dies_leaves_nobody_waiting(readers, mortal):
    sender, _ = make_sender(2)
    first_bucket(sender, [readers[0], mortal])
    mortal.kill()
    num_buckets = 0
    while bucket := sender.next_bucket():  # the trainer's ranks stay in step to the end
        readers[0].ask("read", bucket)
        readers[0].answer(LIMIT_S / 2)
        num_buckets += 1
    assert num_buckets == 2
    with pytest.raises(BroadcastError):
        sender.close()
    assert digests(readers[:1]) == {0: MISSED}
    sender.abandon()


def test_cancel_ends_the_wait_for_a_reader_that_hangs(readers):
    sender, _ = make_sender(2)
    first_bucket(sender, readers)
    bucket = sender.next_bucket()
    readers[0].ask("read", bucket)  # and the other one does not
    cancel(GroupSpec(**bucket["group"]), "a replica was lost")
    readers[0].answer(LIMIT_S / 2)
    while bucket := sender.next_bucket():
        readers[0].ask("read", bucket)
        assert readers[0].answer(LIMIT_S / 2) == {}
    with pytest.raises(BroadcastError, match="a replica was lost"):
        sender.close()
    assert digests(readers)[0] == MISSED
    sender.abandon()


def test_reader_that_never_comes_is_waited_for_only_so_long(readers):
    sender, _ = make_sender(2, timeout_s=1.5)
    bucket = sender.next_bucket()
    readers[0].ask("read", bucket)
    while sender.next_bucket():
        pass
    with pytest.raises(BroadcastError, match=r"waited 1.5 s for all members to join"):
        sender.close()
    assert readers[0].answer() == {}
    assert digests(readers[:1]) == {0: MISSED}
    sender.abandon()


def test_readers_of_a_group_that_failed_join_the_next(readers):
    broken, _ = make_sender(3, timeout_s=0.5)
    bucket = broken.next_bucket()
    for reader in readers:
        reader.ask("read", bucket)
    assert [reader.answer() for reader in readers] == [{}, {}]
    broken.abandon()
    assert digests(readers) == {0: MISSED, 1: MISSED}
    sender, _ = make_sender(2)
    send_all(sender, readers)
    check_digests([sender.close()], digests(readers), 1)
    sender.abandon()
