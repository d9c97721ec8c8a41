"""What `build` decides before anything is started, and in which order it starts things."""

import asyncio
import threading
from contextlib import AsyncExitStack
from unittest.mock import Mock

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from rlpost.config import CONFIG_DIR, register, to_object
from rlpost.platform import DRIVER_THREADS, Platform
from rlpost.trainer import build
from rlpost.trainer.build import PARITY_LIMIT, build_gate, count_updates, prepare
from rlpost.workers.placement import Placement
from tests.e2e import engine_contract as contract


def compose(*overrides):
    register()
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            return to_object(hydra.compose("config", list(overrides)))
        finally:
            GlobalHydra.instance().clear()


def test_limits_of_phases_reach_the_process_group_and_weight_sync():
    timeouts = compose("trainer.timeouts.train_s=7000", "trainer.timeouts.publish_s=60").trainer.timeouts
    assert timeouts.collective_s == 7060  # later than the watchdog, which can say more
    assert timeouts.within_publish(300.0) == 20 and timeouts.within_publish(5.0) == 5
    timeouts = compose("trainer.timeouts.train_s=null", "trainer.timeouts.publish_s=null").trainer.timeouts
    assert timeouts.collective_s > 1e7 and timeouts.within_publish(300.0) == 300
    assert timeouts.by_phase()["train"] is None and timeouts.by_phase()["save"] == 1800


def test_schedules_of_actor_and_critic_are_as_long_as_their_own_updates():
    cfg = compose(
        "algo=ppo",
        "data.train_batch_size=10",
        "actor.ppo_mini_batch_size=4",  # 3 mini-batches, the last of 2
        "critic.ppo_mini_batch_size=5",
        "critic.ppo_epochs=3",
        "trainer.critic_warmup=2",
    )
    assert count_updates(cfg, total_steps=7) == {"actor": 3 * 5, "critic": 2 * 3 * 7}


@pytest.mark.parametrize(
    "actor,rollout,coarser",
    [
        ("float16", "auto", "float16"),
        ("float16", "bfloat16", "bfloat16"),
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("float32", "auto", "float32"),
    ],
)
def test_parity_is_held_to_what_the_coarser_dtype_allows(actor, rollout, coarser):
    cfg = compose(f"actor.dtype={actor}", f"rollout.dtype={rollout}")
    assert build_gate(cfg, workers=None).limit == PARITY_LIMIT[coarser]
    assert PARITY_LIMIT["float32"] < PARITY_LIMIT["float16"] < PARITY_LIMIT["bfloat16"]


def test_sequences_longer_than_the_model_was_built_for_are_refused(tmp_path):
    checkpoint = contract.make_checkpoint(tmp_path, tied=True)
    prompt = checkpoint.max_position_embeddings - 7
    overrides = ["model=hf", f"model.path={checkpoint.path}", f"data.max_prompt_length={prompt}"]
    prepare(compose(*overrides, "data.max_response_length=7"))
    with pytest.raises(ValueError, match="max_response_length = .* built for .*max_position_embeddings"):
        prepare(compose(*overrides, "data.max_response_length=8"))


def test_commands_limit_the_threads_of_their_own_process(tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(9)
    try:
        prepare(compose("model=hf", f"model.path={contract.make_checkpoint(tmp_path, tied=True).path}"))
        assert torch.get_num_threads() == DRIVER_THREADS
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "first_engine_bundle", "sleep", "order"),
    [
        ("cuda", 0, False, ["engines begin", "engines end", "ranks"]),
        ("cuda", 0, True, ["engines begin", "engines end", "sleep", "ranks"]),
        ("cuda", 1, False, ["engines begin", "ranks", "engines end"]),  # on devices of their own
        ("cpu", 0, False, ["engines begin", "ranks", "engines end"]),
    ],
)
def test_trainer_waits_for_engines_only_where_they_share_its_devices(
    monkeypatch, kind, first_engine_bundle, sleep, order
):
    happened, ranks_loaded = [], threading.Event()
    placement = Placement(1, 1, 1, Platform(kind), first_engine_bundle)

    class Pool:
        async def sleep(self):
            happened.append("sleep")

    class Workers:
        shutdown = Mock()

        def load(self):
            happened.append("ranks")
            ranks_loaded.set()

    async def build_pool(*_):
        happened.append("engines begin")
        if placement.shares_no_device:
            await asyncio.to_thread(ranks_loaded.wait, 60)
        happened.append("engines end")
        return Pool()

    monkeypatch.setattr(build, "build_placement", lambda *_: placement)
    monkeypatch.setattr(build, "check_fit", Mock())
    monkeypatch.setattr(build, "build_workers", lambda *_: Workers())
    monkeypatch.setattr(build, "build_pool", build_pool)

    async def start():
        async with AsyncExitStack() as stack:
            await build.start_processes(compose(), Mock(), 1, sleep, stack)

    asyncio.run(start())
    assert happened == order
