import logging

import pytest
import torch

from rlpost.batch import Batch
from rlpost.metrics import scalars
from rlpost.platform import Platform
from rlpost.workers.dispatch import Step, TrainWork
from rlpost.workers.growth import Growth
from rlpost.workers.model_worker import ModelWorker

GIB = 2**30
LEAK = 300 << 20


def test_memory_that_grows_step_after_step_is_told_once():
    growth = Growth()
    said = [growth.look(GIB + step * LEAK) for step in range(12)]
    assert [step for step, text in enumerate(said) if text] == [5]
    assert "5 times in the last 5 steps and never fallen, from 1.00 to 2.46 GiB" in said[5]


@pytest.mark.parametrize("held, steps", [
    ([GIB + step // 3 * LEAK for step in range(30)], 15),  # by what happens in every third step, as a weight sync may
    ([GIB + step * (2 << 20) for step in range(100)], 40),  # by little
])  # fmt: skip
def test_memory_that_grows_now_and_then_or_slowly_is_told_once(held, steps):
    growth = Growth()
    told = [(step, text) for step, text in enumerate(map(growth.look, held)) if text]
    assert [step for step, _ in told] == [steps]
    assert f"5 times in the last {steps} steps" in told[0][1]


@pytest.mark.parametrize("held", [
    [GIB, 3 * GIB, *[3 * GIB] * 10],  # the optimizer's state comes with the first step
    [GIB + step * (1 << 20) for step in range(12)],  # too little
    [GIB + step % 5 * LEAK for step in range(30)],  # up and down
    [GIB + step % 2 * (15 << 20) for step in range(200)],
    [0] * 12,  # CPU
])  # fmt: skip
def test_memory_that_does_not_keep_growing_is_not_told(held):
    growth = Growth()
    assert not any(growth.look(nbytes) for nbytes in held)


def test_each_role_of_a_rank_is_watched(monkeypatch, caplog):
    class Engine:
        skipped = False

        def train_step(self, micro_batches, loss):
            return {}

    class Losses:
        policy_loss = value_loss = None

    held = {"bytes": GIB}
    monkeypatch.setattr(Platform, "held_memory_bytes", lambda self: held["bytes"])
    worker = ModelWorker(rank=3, world_size=8)
    worker.engines = {"actor": Engine(), "critic": Engine()}
    work = TrainWork(Batch(torch.tensor([0, 2]), {"token_ids": torch.tensor([1, 2])}), [Step([[0]], torch.ones(2))])
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            found = scalars(worker.train("actor", work, Losses()))
            assert found["perf/memory_at_rest_gb"] == held["bytes"] / GIB
            worker.train("critic", work, Losses())
            held["bytes"] += LEAK
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told] == ["actor", "critic"]
