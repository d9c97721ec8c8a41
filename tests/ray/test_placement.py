"""Reserving GPUs that Ray has only in its books, as on any machine with `num_gpus` set by hand."""

import pytest
from ray.util import placement_group_table

from rlpost.platform import Platform
from rlpost.workers import placement
from rlpost.workers.placement import Placement, Pools
from tests import tiny


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with tiny.local_ray(num_cpus=1, num_gpus=2):
        yield


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    monkeypatch.setattr(placement, "platform", lambda: Platform("cuda"))


def test_more_gpus_than_the_cluster_has_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="nnodes=2 x cluster.n_gpus_per_node=4 asks for 8 GPUs, Ray has 2"):
        Placement.create(Pools.colocated(2, 4), 1, None)


def test_gpus_whose_cpu_cores_are_missing_time_out_with_the_numbers_and_are_given_back():
    expected = r"n_gpus_per_node=2: 2 GPUs with a CPU core each did not become free within 0.5 s; .* 2 GPUs and 1 CPU"
    with pytest.raises(RuntimeError, match=expected):
        Placement.create(Pools.colocated(1, 2), 1, None, timeout_s=0.5)
    assert [group["state"] for group in placement_group_table().values()] == ["REMOVED"]


@pytest.mark.parametrize(
    ("tensor_parallel", "num_replicas", "message"),
    [
        (2, None, "rollout.tensor_model_parallel_size=2 does not divide the 1 GPUs"),
        (1, 4, "rollout.num_replicas=4 x rollout.tensor_model_parallel_size=1 must make the 3 GPUs .* or a multiple"),
    ],
)
def test_engines_that_do_not_fill_the_gpus_are_refused(tensor_parallel, num_replicas, message):
    with pytest.raises(ValueError, match=message):
        Placement.create(Pools.colocated(1, 1 if num_replicas is None else 3), tensor_parallel, num_replicas)


def test_replicas_beyond_the_devices_share_them_in_turn():
    shared = Placement(
        num_ranks=2,
        num_replicas=4,
        tensor_parallel=2,
        platform=Platform("cuda"),
        first_engine_bundle=2,
        num_engine_bundles=4,
        device_ids=tuple("012345"),
    )
    assert (shared.replicas_apart, shared.replicas_per_device) == (2, 2)
    devices = [shared.engine_env(replica, {})["CUDA_VISIBLE_DEVICES"] for replica in range(4)]
    assert devices == ["2,3", "4,5", "2,3", "4,5"]
