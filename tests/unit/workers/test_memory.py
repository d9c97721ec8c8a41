"""Device memory that a run needs at least: the sum is right, shown, and comes with the setting that helps."""

import pytest

from rlpost.workers.memory import GIB, EngineNeeds, TrainerNeeds, check_memory

NUM = GIB  # parameters: one byte each is one GiB


def engine(**changes):
    needs = dict(
        num_parameters=NUM, weight_bytes=2, tensor_parallel=1, cache_bytes=1024, max_model_len=2**20, utilization=0.5
    )
    return EngineNeeds(**needs | changes)


def trainer(**changes):
    return TrainerNeeds(**dict(trained={"actor": NUM}, frozen_bytes={}, num_shards=1) | changes)


def test_what_fits_to_the_byte_passes_and_one_byte_less_does_not():
    check_memory(16 * GIB, engine(utilization=3 / 16), trainer(), takes_turns=True)  # 2 + 1, and 4 + 4 + 8
    with pytest.raises(ValueError, match="the trainer cannot fit"):
        check_memory(16 * GIB - 1, engine(), trainer(), takes_turns=True)


def test_engine_share_too_small_shows_its_sum_and_the_fraction_that_would_do():
    expected = (
        r"gpu_memory_utilization=0.1 cannot fit: weights 2.0 GiB \(1.07e9 x 2 bytes / "
        r"rollout.tensor_model_parallel_size=1\) \+ KV cache of one sequence 1.0 GiB \(1048576 tokens x 1024 bytes\) = "
        r"3.0 GiB, but 0.1 x 20.0 GiB = 2.0 GiB; raise rollout.gpu_memory_utilization above 0.15"
    )
    with pytest.raises(ValueError, match=expected):
        check_memory(20 * GIB, engine(utilization=0.1), trainer(), takes_turns=True)


def test_model_larger_than_a_device_needs_tensor_parallelism():
    with pytest.raises(ValueError, match="raise rollout.tensor_model_parallel_size"):
        check_memory(20 * GIB, engine(num_parameters=10 * NUM), trainer(), takes_turns=True)
    check_memory(20 * GIB, engine(num_parameters=10 * NUM, tensor_parallel=4), trainer(), takes_turns=True)


def test_engine_that_stays_awake_leaves_the_trainer_the_rest():
    check_memory(20 * GIB, engine(), trainer(), takes_turns=True)
    expected = (
        r"actor's master weights 4.0 GiB \+ actor's gradients 4.0 GiB \+ actor's Adam's two moments 8.0 GiB = 16.0 GiB "
        r"a GPU over 1 shards, but there are 20.0 GiB - 10.0 GiB of rollout.gpu_memory_utilization=0.5; lower"
    )
    with pytest.raises(ValueError, match=expected):
        check_memory(20 * GIB, engine(), trainer(), takes_turns=False)


def test_roles_add_up_and_shards_divide():
    needs = trainer(trained={"actor": NUM, "critic": NUM}, frozen_bytes={"ref": 2 * GIB}, num_shards=2)  # 16 + 1
    check_memory(17 * GIB, engine(), needs, takes_turns=True)
    with pytest.raises(ValueError, match=r"ref's weights 1.0 GiB = 17.0 GiB.*use more GPUs"):
        check_memory(17 * GIB - 1, engine(), needs, takes_turns=True)
