"""A rank that runs out of device memory says in which phase, and what to lower."""

import pytest
import torch

from rlpost.batch import Batch
from rlpost.workers.dispatch import InferWork, Step, TrainWork
from rlpost.workers.model_worker import ModelWorker, OutOfDeviceMemory, WorkerSetup


class FullEngine:
    """An engine whose every pass finds the device full."""

    def forward(self, *args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    train_step = forward


@pytest.fixture
def worker():
    worker = ModelWorker(rank=3, world_size=8)
    worker.setup = WorkerSetup(model=None, model_cfg=None, actor=None)
    worker.engines = {"actor": FullEngine()}
    return worker


def one_row():
    return Batch(torch.tensor([0, 2]), {"token_ids": torch.tensor([1, 2])})


def test_out_of_memory_while_inferring_names_rank_phase_and_keys(worker):
    with pytest.raises(OutOfDeviceMemory, match="rank 3 .*'infer actor'.*tried to allocate 2 GiB") as caught:
        worker.infer("actor", InferWork(one_row(), [[0]]))
    for key in ("actor.ppo_max_token_len_per_gpu", "rollout.gpu_memory_utilization", "actor.fsdp.param_offload"):
        assert key in str(caught.value)


def test_out_of_memory_while_training_names_the_phase(worker):
    work = TrainWork(one_row(), [Step([[0]], torch.ones(2))])
    with pytest.raises(OutOfDeviceMemory, match="'train actor'"):
        worker.train("actor", work, type("Objective", (), {"policy_loss": None, "value_loss": None}))
