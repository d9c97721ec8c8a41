"""Which `RolloutSource` a config means, and what it needs: pools of devices, limits, prompts."""

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack

from rlpost.algos.algorithm import Algorithm
from rlpost.config import Config
from rlpost.data import PromptStream
from rlpost.platform import platform
from rlpost.registry import load_dotted
from rlpost.trainer.autopilot import Autopilot
from rlpost.trainer.buffer import GroupBuffer
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.config import AsyncTrainerConfig
from rlpost.trainer.fully_async import AsyncSource
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.objects import Packer
from rlpost.trainer.prompts import PromptQueue, Sampler
from rlpost.trainer.source import RolloutSource
from rlpost.workers.group import WorkerGroup
from rlpost.workers.placement import Pools
from rlpost.workers.rollout.base import SamplingSpec
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.weight_sync.base import make_weight_sync


def takes_turns(cfg: Config) -> bool:
    """Whether the engines sleep while the trainer works."""
    colocated = not isinstance(cfg.trainer, AsyncTrainerConfig)
    return colocated and cfg.rollout.free_cache_engine and platform().kind != "cpu"


def pools(cfg: Config) -> Pools:
    """How many devices train and roll out.

    Raises:
        ValueError: pools that the cluster does not hold.
    """
    here, trainer = platform(), cfg.trainer
    per_node = cfg.cluster.n_gpus_per_node or max(1, here.device_count())
    if not isinstance(trainer, AsyncTrainerConfig) or trainer.share_gpus:
        return Pools.colocated(cfg.cluster.nnodes, per_node)
    return Pools.disjoint(
        cfg.cluster.nnodes, per_node, trainer.train_gpus, trainer.rollout_gpus, limited=here.kind != "cpu"
    )


def check_callables(trainer: AsyncTrainerConfig) -> tuple[Sampler | None, Callable | None]:
    """The user's sampler and hook, before anything is started.

    Raises:
        ValueError: one that does not import, or a hook that is no async function.
    """
    sampler = load_dotted(trainer.sampler, "trainer.sampler") if trainer.sampler else None
    hook = load_dotted(trainer.hook, "trainer.hook") if trainer.hook else None
    if hook is not None and not inspect.iscoroutinefunction(hook):
        raise ValueError(f"trainer.hook={trainer.hook}: expected an async function(prompts)")
    return sampler, hook


def build_source(
    cfg: Config,
    spec: SamplingSpec,
    stream: PromptStream,
    algorithm: Algorithm,
    pool: RolloutPool,
    workers: WorkerGroup,
    stack: AsyncExitStack,
    ledger: Ledger,
) -> RolloutSource:
    """What generates and publishes, as `trainer` says; `stack` receives what must be closed."""
    if not isinstance(cfg.trainer, AsyncTrainerConfig):
        return colocated_source(cfg, spec, stream, algorithm, pool, workers, ledger)
    source = async_source(cfg, cfg.trainer, spec, stream, algorithm, pool, workers, ledger)
    stack.push_async_callback(source.close)
    return source


def colocated_source(
    cfg: Config,
    spec: SamplingSpec,
    stream: PromptStream,
    algorithm: Algorithm,
    pool: RolloutPool,
    workers: WorkerGroup,
    ledger: Ledger | None = None,
) -> ColocatedSource:
    """Rollout and training in turn. Engines that sleep meanwhile are handed over asleep."""
    return ColocatedSource(
        stream=stream,
        algorithm=algorithm,
        pool=pool,
        trainers=workers,
        sync=make_weight_sync(workers, pool),
        spec=spec,
        n=cfg.rollout.n,
        filter_groups=cfg.algo.filter_groups,
        reward=cfg.reward,
        sleep=takes_turns(cfg),
        ledger=ledger,
    )


def async_source(
    cfg: Config,
    trainer: AsyncTrainerConfig,
    spec: SamplingSpec,
    stream: PromptStream,
    algorithm: Algorithm,
    pool: RolloutPool,
    workers: WorkerGroup,
    ledger: Ledger | None = None,
) -> AsyncSource:
    """Rollout and training at once.

    Raises:
        ValueError: prompts that a checkpoint cannot hold, as far as the first one tells.
    """
    sampler, hook = check_callables(trainer)
    buffer, where = GroupBuffer(trainer.limits(cfg.data.train_batch_size)), pools(cfg)
    prompts = PromptQueue(stream, sampler, trainer.sampler_window if sampler else 1)
    for prompt in prompts.peek(1):  # now, rather than at the first checkpoint with groups in flight
        Packer().pack(prompt)
    return AsyncSource(
        buffer=buffer,
        prompts=prompts,
        algorithm=algorithm,
        pool=pool,
        sync=make_weight_sync(workers, pool, disjoint=not trainer.share_gpus),
        spec=spec,
        n=cfg.rollout.n,
        filter_groups=cfg.algo.filter_groups,
        reward=cfg.reward,
        partial_rollout=trainer.partial_rollout,
        stop_on_error=trainer.on_workflow_error == "stop",
        room=min(buffer.limits.capacity, max(1, len(pool.engines) * cfg.rollout.max_num_seqs // cfg.rollout.n)),
        hook=hook,
        autopilot=Autopilot(
            buffer.limits, rollout_share=where.rollout / (where.rollout + where.train), adjust=trainer.autobalance
        ),
        ledger=ledger,
    )
