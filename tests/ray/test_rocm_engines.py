"""ROCm as real Ray workers see it: the environment when an engine is imported, and engines with faulty kernels."""

import asyncio

import numpy as np
import pytest
import ray

from rlpost import aiter
from rlpost.algos.config import FilterGroupsConfig
from rlpost.platform import RAY_ENV, platform
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.parity import ParityError
from rlpost.trainer.repair import AiterRepair
from rlpost.trajectory import Prompt
from rlpost.workers import placement
from rlpost.workers.config import ActorConfig, AiterKernelsConfig, ModelConfig, RolloutConfig
from rlpost.workers.group import WorkerGroup
from rlpost.workers.placement import Placement, Pools
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.rollout.setup import with_families
from rlpost.workers.weight_sync.base import BucketSync
from tests import tiny
from tests.e2e import engine_contract as contract
from tests.ray.standin_engines import ROCM

LENGTH = RewardConfig(terms={"length": RewardTermConfig(fn="length", kwargs={"max_length": 40})})
INHERITED = {
    "VLLM_ROCM_USE_AITER": "0",
    "HIP_VISIBLE_DEVICES": "5,4",
    "CUDA_VISIBLE_DEVICES": "5,4",
}  # by all processes


@pytest.fixture
def start_ray():
    """A Ray whose workers run a function of `standin_engines` first."""

    def start(hook, **resources):
        env = RAY_ENV | {"PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": env, "worker_process_setup_hook": f"tests.ray.standin_engines.{hook}"},
            **resources,
        )

    yield start
    ray.shutdown()


@pytest.fixture(autouse=True)
def switches(monkeypatch):
    """The stand-ins have vLLM's switches."""
    for name in ("imports_late", "faulty"):
        monkeypatch.setitem(aiter.ENGINES, name, aiter.ENGINES["vllm"])


def make_pool(cfg, info, where):
    return RolloutPool(cfg, info, LENGTH, where, seed=1, max_prompt_length=32, max_response_length=32)


@ray.remote(num_cpus=0)
class Environment:
    """Plays a trainer."""

    def get(self):
        import os

        return dict(os.environ)


def test_environment_is_complete_in_every_process_when_the_engine_is_imported(start_ray, monkeypatch, tmp_path):
    for name, value in INHERITED.items():
        monkeypatch.setenv(name, value)
    start_ray("setup_rocm", num_cpus=4, num_gpus=2)
    monkeypatch.setattr(placement, "platform", lambda: ROCM)
    where = Placement.create(Pools.colocated(1, 2), 2, None)
    cfg = RolloutConfig(name="imports_late", tensor_model_parallel_size=2, aiter_kernels=AiterKernelsConfig(rope="off"))
    info = contract.make_checkpoint(tmp_path, tied=True)

    async def main():
        pool = make_pool(cfg, info, where)
        await pool.start()
        try:
            return await pool.call("seen")
        finally:
            await pool.shutdown()

    ((env, engines_before),) = asyncio.run(main())
    assert engines_before == []
    assert sorted(where.device_ids) == ["4", "5"]  # as the driver's mask names them, not as numbers within it
    assert env["HIP_VISIBLE_DEVICES"] == env["CUDA_VISIBLE_DEVICES"] == ",".join(where.device_ids)
    expected = aiter.environment("vllm", set(aiter.FAMILIES) - {"rope"})
    assert expected["VLLM_ROCM_USE_AITER"] == "1" and expected["VLLM_ROCM_USE_AITER_TRITON_ROPE"] == "0"
    for name, value in (RAY_ENV | expected | {"HSA_ENABLE_IPC_MODE_LEGACY": "1"}).items():
        assert env[name] == value, name
    trainers = [Environment.options(**where.trainer_options(rank)).remote() for rank in range(2)]
    for rank, env in enumerate(ray.get([trainer.get.remote() for trainer in trainers])):
        assert env["HIP_VISIBLE_DEVICES"] == env["CUDA_VISIBLE_DEVICES"] == where.device_ids[rank]
        assert env["HSA_ENABLE_IPC_MODE_LEGACY"] == "1"
    where.remove()


class Stream:
    """Prompts without end, the same after `load_state_dict`."""

    def __init__(self):
        self.at = 0

    def next(self, n):
        rows = [np.random.default_rng(self.at + i).integers(3, 30, 6) for i in range(n)]
        self.at += n
        return [Prompt(id=f"p{i}", index=i, token_ids=row, text="", data_source="d") for i, row in enumerate(rows)]

    def state_dict(self):
        return self.at

    def load_state_dict(self, at):
        self.at = at


def test_gate_finds_a_faulty_family_turns_it_off_and_goes_on(start_ray, tmp_path):
    start_ray("setup", num_cpus=4)
    info = contract.make_checkpoint(tmp_path, tied=True)
    simulated = Placement(num_ranks=1, num_replicas=1, tensor_parallel=1, platform=ROCM)
    on = frozenset({"moe", "rope"})
    cfg = RolloutConfig(name="faulty", dtype="float32", engine_kwargs={"faults": ["moe"]})
    notes = []

    async def main():
        pool, workers = make_pool(with_families(cfg, on), info, simulated), None
        try:
            await pool.start()
            workers = WorkerGroup.start(
                info,
                ModelConfig(path=info.path),
                ActorConfig(dtype="float32"),
                placement=Placement(num_ranks=1, num_replicas=1, tensor_parallel=1, platform=platform()),
            )
            await asyncio.to_thread(workers.load)
            source = ColocatedSource(
                stream=Stream(),
                algorithm=None,
                pool=pool,
                trainers=workers,
                sync=BucketSync(workers, pool),
                spec=contract.spec(max_tokens=8, stop=()),
                n=2,
                filter_groups=FilterGroupsConfig(),
                reward=LENGTH,
                sleep=False,
            )
            await source.publish(3)
            with pytest.raises(ParityError):  # without anything to mend it
                await ParityGate(workers, 1e-3, 4, 2, 1.0).probe(source, 3)
            mend = AiterRepair(lambda: pool.cfg, source.restart_engines, notes.append)
            metrics = await ParityGate(workers, 1e-3, 4, 2, 1.0, mend).probe(source, 3)
            assert metrics["train_rollout_logprob_abs_diff/mean"].value < 1e-4
            assert pool.cfg.aiter_kernels.set_to("on") == {"rope"}
        finally:
            await pool.shutdown()
            if workers is not None:
                workers.shutdown()

    asyncio.run(main())
    assert "looking for the kernels at fault" in notes[0]
    assert notes[-1].startswith("AITER's moe breaks parity, and stays off in this run")
