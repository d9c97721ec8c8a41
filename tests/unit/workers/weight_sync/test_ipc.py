import subprocess
import sys

import pytest
import torch

from rlpost.workers.weight_sync.base import check_digests, choose_transport, merge_ranks
from rlpost.workers.weight_sync.ipc import BucketReader, Sender, digest_of

SHAPES = {"a": (5, 3), "b": (7,), "c": (40, 10), "d": (1,), "e": (3, 3, 3)}


class Weights:
    """Plays the train engine; the tensor it yields is overwritten when the next one is taken."""

    def __init__(self, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def named_weights(self, dtype):
        for name, tensor in self.tensors.items():
            shared = tensor.to(dtype).clone()
            yield name, shared
            shared.fill_(torch.nan)


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
        "from rlpost.workers.weight_sync.ipc import BucketReader; r = BucketReader();"
        f"list(r.read({bucket!r})); print(r.close())"
    )
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert int(printed) == sender.close()


@pytest.mark.parametrize("change", ["one bit", "swap"])
def test_digest_notices_a_changed_byte_and_swapped_tensors(change):
    a, b = torch.arange(21, dtype=torch.uint8), torch.arange(1, 22, dtype=torch.uint8)
    before = digest_of("a", a) + digest_of("b", b)
    if change == "one bit":
        a[20] ^= 1
        after = digest_of("a", a) + digest_of("b", b)
    else:
        after = digest_of("a", b) + digest_of("b", a)
    assert after != before


def test_transport_follows_the_devices():
    assert choose_transport({"cpu"}, {"cpu"}) == "shm"
    assert choose_transport({"GPU-1", "GPU-2"}, {"GPU-2"}) == "ipc"
    assert choose_transport({"GPU-1"}, {"GPU-2"}) == "shm"


def test_ranks_merge_into_one_bucket():
    ranks = [{"names": ["a"], "handles": {f"GPU-{i}": f"h{i}"}} for i in range(2)]
    assert merge_ranks(ranks) == {"names": ["a"], "handles": {"GPU-0": "h0", "GPU-1": "h1"}}
    assert merge_ranks([{"names": ["a"], "path": "/p"}, {"names": ["a"]}]) == {"names": ["a"], "path": "/p"}
    assert merge_ranks([None, None]) is None


def test_digests_that_differ_are_an_error():
    check_digests([5, None], [5, None, 5], 2)
    with pytest.raises(RuntimeError, match=r"weight update 2: sent digest 5, but replicas received \{1: 6\}"):
        check_digests([5, None], [5, 6], 2)
