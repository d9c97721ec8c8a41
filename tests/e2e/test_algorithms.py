"""Every algorithm of `config/algo` makes a step on real workers; the engine and the trainer ranks are shared."""

import asyncio
import math
from contextlib import AsyncExitStack

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from rlpost.config import CONFIG_DIR, Config, register, to_object
from rlpost.tracking.jsonl import read_jsonl
from tests.e2e.runs import small

ALGORITHMS = sorted(path.stem for path in (CONFIG_DIR / "algo").glob("*.yaml"))


def compose(*overrides: str) -> Config:
    register()
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = to_object(hydra.compose("config", list(overrides)))
    GlobalHydra.instance().clear()
    return cfg


@pytest.fixture(scope="module")
def execute(checkpoint):
    """`rlpost.trainer.build.execute`, but on processes that serve one run after the other."""
    from rlpost.trainer import build

    all_roles = ("algo=ppo", "algo.use_kl_loss=true")
    cfg = compose(*small(checkpoint, *all_roles, "actor.optim.lr=1e-5"))  # or the last would find nothing left to learn
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        stack = AsyncExitStack()
        try:
            facts = build.prepare(cfg)
            stack.callback(build.start_ray(cfg.cluster))
            placement = build.build_placement(cfg, stack)
            pool = runner.run(build.build_pool(cfg, facts, placement, stack))
            workers = build.build_workers(cfg, facts, placement, 100, stack).load()

            async def same_pool(*args):
                return pool

            patch.setattr(build, "start_ray", lambda cfg: lambda: None)
            patch.setattr(build, "build_pool", same_pool)
            patch.setattr(build, "build_workers", lambda *args: workers)
            patch.setattr(build.WorkerGroup, "load", lambda workers: workers)
            patch.setattr(build.WorkerGroup, "shutdown", lambda workers: None)
            yield build.execute
        finally:
            runner.run(stack.aclose())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_makes_a_step(name, execute, checkpoint, tmp_path):
    cfg = compose(
        *small(
            checkpoint,
            f"algo={name}",
            "data.val_files=null",
            "actor.ppo_mini_batch_size=3",  # of 4: two updates
            "trainer.total_training_steps=1",
        )
    )
    assert execute(cfg, tmp_path)["finished"] is True
    (metrics,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert all(value is not None for value in metrics.values())
    assert metrics["train_rollout_logprob_abs_diff/mean"] <= 1e-4
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_updates"] == 0
    assert math.isfinite(metrics["actor/pg_loss"])
    expected = {
        "critic/vf_loss": cfg.algo.needs_critic,
        "actor/kl_loss": cfg.algo.use_kl_loss,
        "actor/reward_kl_penalty": cfg.algo.use_kl_in_reward,
    }
    assert {key: key in metrics for key in expected} == expected
