"""Programs that a run starts: Ray, and an inference engine that must give its memory back."""

import asyncio
import os
import tempfile
from pathlib import Path

import ray

from rlpost.host import exported
from rlpost.platform import platform
from rlpost.tools.checks.base import GIB, Finding, Options, Status, passed, skipped
from rlpost.trainer.build import start_ray
from rlpost.trainer.config import ClusterConfig
from rlpost.workers.config import ModelConfig, RolloutConfig
from rlpost.workers.model import inspect
from rlpost.workers.rollout.base import ENGINES, SamplingSpec
from rlpost.workers.rollout.setup import engine_setup

PAYLOAD_BYTES = 32 << 20
PROMPT = [5, 6, 7, 8]  # any ids do
LEAST_FREED = 0.6  # of what the engine took: context and captured graphs stay


def ray_starts(options: Options) -> Finding:
    """A local Ray: start, a task with 32 MiB through the object store, the GPUs that it counts, end."""
    stop = start_ray(ClusterConfig())
    try:
        echoed = ray.get(ray.remote(_echo).options(num_cpus=0).remote(bytes(PAYLOAD_BYTES)), timeout=60)
        counted, seen = int(ray.cluster_resources().get("GPU", 0)), platform().device_count()
    finally:
        stop()
    found = f"Ray {ray.__version__} starts; {counted} GPUs"
    if echoed != PAYLOAD_BYTES:
        return Finding(Status.FAIL, f"{found}; an object came back damaged", "look at /dev/shm and the disk of /tmp")
    if counted != seen:
        fix = "unset RAY_* overrides, and set CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES alike"
        return Finding(Status.FAIL, f"{found}, torch sees {seen}", fix)
    return passed(found)


def _echo(payload: bytes) -> int:
    return len(payload)


def sleep(options: Options) -> Finding:
    """Whether an engine that sleeps gives its device memory back, and says the same after it woke."""
    if platform().kind == "cpu":
        return skipped("engines have no device memory to free on CPU")
    return asyncio.run(_sleep(options))


async def _sleep(options: Options) -> Finding:
    name, here = str(options.engine), platform()
    with tempfile.TemporaryDirectory() as cache:  # of a checkpoint that is made
        info, _ = inspect(ModelConfig(path=options.model), Path(cache), seed=1)
        spec = SamplingSpec(temperature=0.0, max_tokens=16, vocab_size=info.vocab_size)
        build = ENGINES.get(name, "--engine")
        setup = engine_setup(RolloutConfig(name=name), info, here, exported())
        os.environ.update(setup.env)  # before anything imports the engine
        engine = build(setup.cfg, info, min(512, info.max_position_embeddings))
        before = here.free_memory_bytes()
        await engine.start()
        try:
            first = await engine.generate(PROMPT, spec, seed=0, request_id="first")
            awake = here.free_memory_bytes()
            await engine.sleep()
            asleep = here.free_memory_bytes()
            await engine.wake()
            second = await engine.generate(PROMPT, spec, seed=0, request_id="second")
        finally:
            await engine.shutdown()
    same = first[0].token_ids.tolist() == second[0].token_ids.tolist()
    return judge_sleep(name, took=before - awake, freed=asleep - awake, same=same)


def judge_sleep(engine: str, took: int, freed: int, same: bool) -> Finding:
    """Bytes that the engine took and gave back, and whether it then answered as before."""
    found = f"{engine} took {took / GIB:.1f} GiB and gave {freed / GIB:.1f} GiB back asleep"
    if not same:
        fix = "set rollout.free_cache_engine=false, and lower rollout.gpu_memory_utilization to make room"
        return Finding(Status.FAIL, f"{found}; after waking it answers otherwise", fix)
    if freed < LEAST_FREED * took:
        fix = "set rollout.free_cache_engine=false, and lower rollout.gpu_memory_utilization; on ROCm see docs/rocm.md"
        return Finding(Status.FAIL, found, fix)
    return passed(f"{found}, and answers as before")
