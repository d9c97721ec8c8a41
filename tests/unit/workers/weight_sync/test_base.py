import pytest

from rlpost.workers.weight_sync.base import check_digests, merge_ranks
from rlpost.workers.weight_sync.reader import MISSED


def test_ranks_merge_into_one_bucket():
    ranks = [{"names": ["a"], "handles": {f"GPU-{i}": [f"h{i}"]}} for i in range(2)]
    assert merge_ranks(ranks) == {"names": ["a"], "handles": {"GPU-0": ["h0"], "GPU-1": ["h1"]}}
    assert merge_ranks([{"names": ["a"], "path": "/p"}, {"names": ["a"]}]) == {"names": ["a"], "path": "/p"}
    assert merge_ranks([None, None]) is None


def test_digests_that_differ_are_an_error_that_names_the_replicas():
    check_digests([5, None], {0: 5, 1: None, 3: 5}, 2)
    with pytest.raises(RuntimeError, match=r"weight update 2: sent digest 5, but replicas received \{3: 6\}"):
        check_digests([5, None], {0: 5, 3: 6}, 2)


def test_missed_bucket_is_an_error_that_names_the_replicas():
    with pytest.raises(RuntimeError, match=r"weight update 2: a bucket did not reach replicas \[1, 4\]"):
        check_digests([5], {0: 5, 1: MISSED, 4: MISSED}, 2)
