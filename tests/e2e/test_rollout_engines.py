"""The rollout contract on real engines. One start of an engine serves all its checks."""

import asyncio
from pathlib import Path

import psutil
import pytest

from rlpost.platform import platform
from rlpost.workers.config import RolloutConfig
from rlpost.workers.rollout.base import ENGINES, RolloutEngine
from tests.e2e import engine_contract as contract


def engine_processes() -> list[psutil.Process]:
    """The engine cores below this process; they may or may not have named themselves yet."""
    marks = ("VLLM::", "sglang::", "spawn_main")
    return [p for p in psutil.Process().children(recursive=True) if any(m in " ".join(p.cmdline()) for m in marks)]


@pytest.fixture(autouse=True)
def engine_environment(monkeypatch):
    for engine in contract.TITLES:
        for key, value in platform().engine_env(engine).items():
            monkeypatch.setenv(key, value)
    yield
    left = [p.cmdline() for p in engine_processes()]
    assert not left, f"processes left behind: {left}"


def config(name: str, **changes) -> RolloutConfig:
    kwargs: dict[str, int] = {}
    if name == "vllm" and platform().kind != "cpu":  # a GPU that others use too cannot be profiled
        kwargs["kv_cache_memory_bytes"] = 1 << 30
    return RolloutConfig(
        name=name,
        dtype=str(contract.DTYPE).removeprefix("torch."),
        max_num_seqs=64,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.2,
        startup_timeout_s=180.0,
        engine_kwargs=kwargs,
        **changes,
    )


def make_engine(name: str, folder: Path, *, tied: bool, **changes) -> tuple[RolloutEngine, contract.Trainer]:
    info = contract.make_checkpoint(folder, tied=tied)
    return ENGINES.get(name)(config(name, **changes), info, contract.MAX_MODEL_LEN), contract.Trainer(info)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["hf", *contract.SERVED])
def test_engine_honours_the_contract(name, tied, tmp_path):
    async def main() -> None:
        engine, trainer = make_engine(name, tmp_path, tied=tied)
        await engine.start()
        try:
            await contract.check_greedy(engine, trainer)
            await contract.check_logprobs(engine, trainer)
            await contract.check_without_logprobs(engine)
            await contract.check_seeds(engine)
            await contract.check_unseeded(engine, trainer)
            await contract.check_stop_and_length(engine, trainer)
            await contract.check_only_given_stops(engine, trainer)
            await contract.check_truncation(engine, trainer)
            await contract.check_padded_ids(engine)
            await contract.check_concurrency(engine, trainer)
            await contract.check_abort(engine)
            await contract.check_ping(engine)
            await contract.check_too_long(engine)
            await contract.check_refused_update(engine, trainer)
            await contract.check_update(engine, trainer, 1)
            await contract.check_update(engine, trainer, 2)
            await contract.check_pause_keep(engine, trainer, 3)
            await contract.check_pause_abort(engine)
            await contract.check_sleep(engine, trainer)
            await contract.check_update_gloo(engine, trainer, 4)
            assert await engine.device_uuids() == [platform().device_uuid()]
            if name in contract.TITLES and tied:
                await check_death(engine, name)
        finally:
            await engine.shutdown()

    asyncio.run(main())


async def check_death(engine: RolloutEngine, name: str) -> None:
    """Processes that hang answer no ping; of those that are killed the engine says that they died. The last check."""
    assert engine_processes()
    for process in engine_processes():
        process.suspend()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.ping(), 1.0)
    for process in engine_processes():
        process.resume()
    await engine.ping()
    for process in engine_processes():
        process.kill()
    with pytest.raises(RuntimeError, match=f"the {contract.TITLES[name]} engine died"):
        await engine.generate([3], contract.spec(), seed=0, request_id="r", n=8)


@pytest.mark.parametrize("name", [param for param in contract.SERVED if param.values == ("sglang",)])
def test_tensor_parallel_ranks_sample_alike_and_are_all_updated(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # which cores each rank takes

    async def main() -> None:
        engine, trainer = make_engine(name, tmp_path, tied=False, tensor_model_parallel_size=2)
        await engine.start()
        try:
            await contract.check_seeds(engine)
            await contract.check_unseeded(engine, trainer)
            await contract.check_update(engine, trainer, 1)
            await contract.check_update_gloo(engine, trainer, 2)
            assert len(await engine.device_uuids()) == 2
        finally:
            await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("name", contract.SERVED)
def test_engine_that_does_not_start_says_why(name, tmp_path):
    async def main() -> None:
        engine, _ = make_engine(name, tmp_path, tied=True)
        (tmp_path / "model.safetensors").unlink()  # which only the engine's own process looks at
        failure = f"{contract.TITLES[name]} did not start: .*Cannot find any model weights"
        with pytest.raises(RuntimeError, match=failure):
            await engine.start()
        await engine.shutdown()

    asyncio.run(main())
