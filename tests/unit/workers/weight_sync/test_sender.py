import itertools
import subprocess
import sys

import pytest
import torch

from rlpost.workers.weight_sync import buffers, reader
from rlpost.workers.weight_sync.bucket import digest_of
from rlpost.workers.weight_sync.reader import BucketReader
from rlpost.workers.weight_sync.sender import Sender
from tests.unit.workers.weight_sync.readers import SHAPES, Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 500, 1 << 20])
def test_weights_arrive_whole_whatever_the_bucket_size(bucket_bytes, dtype):
    weights = Weights()
    sender, reader = Sender("shm", weights, dtype, bucket_bytes), BucketReader()
    for _ in range(2):  # a sender serves many updates
        received = {}
        while bucket := sender.next_bucket():
            received |= {name: tensor.clone() for name, tensor in reader.read(bucket)}
        assert received.keys() == weights.tensors.keys()
        assert all(torch.equal(received[name], tensor.to(dtype)) for name, tensor in weights.tensors.items())
        assert reader.close() == sender.close()


def test_bucket_stays_readable_while_the_next_is_filled():
    weights = Weights()
    sender, reader = Sender("shm", weights, torch.float32, 1700), BucketReader()
    bucket, num_buckets = sender.next_bucket(), 0
    while bucket:
        following = sender.next_bucket()
        for name, tensor in reader.read(bucket):
            assert torch.equal(tensor, weights.tensors[name])
        bucket, num_buckets = following, num_buckets + 1
    assert num_buckets > 1
    assert reader.close() == sender.close()


def test_manifest_says_what_will_come():
    sender = Sender("shm", Weights(), torch.bfloat16, 1000)
    assert sender.manifest() == {name: (shape, "bfloat16") for name, shape in SHAPES.items()}


def test_another_process_reads_the_buffer():
    sender = Sender("shm", Weights(), torch.float32, 1 << 20)
    bucket = sender.next_bucket()
    script = (
        "from rlpost.workers.weight_sync.reader import BucketReader; r = BucketReader();"
        f"list(r.read({bucket!r})); print(r.close())"
    )
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert int(printed) == sender.close()


@pytest.mark.parametrize("bucket_bytes, num_buffers", [(1, 2), (1 << 20, 1)])
def test_each_export_of_device_memory_has_one_reader(bucket_bytes, num_buffers, monkeypatch):
    """torch frees what as many readers have released as it was exported to: no more, no fewer."""
    exported, opened = itertools.count(), []

    def rebuild(*arguments):
        opened.append(arguments[-1])
        return torch.zeros(1 << 12, dtype=torch.uint8)

    monkeypatch.setattr(buffers, "reduce_tensor", lambda tensor: (None, [*range(7), next(exported)]))
    monkeypatch.setattr(reader, "rebuild_cuda_tensor", rebuild)
    sender = Sender("ipc", Weights(), torch.float32, bucket_bytes, num_readers=2)
    readers = [BucketReader(), BucketReader()]
    for update in (1, 2):
        while bucket := sender.next_bucket():
            for number, one in enumerate(readers):
                list(one.read(bucket | {"reader": {"cpu": number}}))
        for one in readers:
            one.close()
        sender.close()
        assert sorted(opened) == list(range(update * num_buffers * 2))
    assert next(exported) == len(opened)


def test_ranks_that_send_the_same_weights_agree_on_their_digest(monkeypatch):
    """Whatever was in a device's memory before, between the tensors of a bucket."""
    monkeypatch.setattr(buffers, "reduce_tensor", lambda tensor: (None, []))
    digests = []
    for junk in (1, 2):
        with monkeypatch.context() as device:
            device.setattr(torch, "empty", lambda n, junk=junk, **kwargs: torch.full((n,), junk, **kwargs))
            sender = Sender("ipc", Weights(), torch.float32, 500)
            while sender.next_bucket():
                pass
        digests.append(sender.close())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("change", ["one bit", "swapped tensors", "other name"])
def test_digest_notices(change):
    data, names = torch.arange(192, dtype=torch.uint8), ["a", "b"]
    before = digest_of(names, data)
    if change == "one bit":
        data[191] ^= 1
    elif change == "swapped tensors":
        data = torch.cat([data[64:], data[:64]])
    else:
        names = ["a", "c"]
    assert digest_of(names, data) != before
