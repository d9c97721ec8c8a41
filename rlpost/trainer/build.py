"""From a typed config to a running `Trainer`, and back to nothing: what is started here is ended here."""

import asyncio
import dataclasses
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import ray
import transformers
from transformers import PreTrainedTokenizerBase

from rlpost import heartbeat
from rlpost.algos.algorithm import Algorithm
from rlpost.config import Config
from rlpost.data import PromptStream, load_val_sets
from rlpost.endings import Preempted, Stalled, described
from rlpost.files import below
from rlpost.host import cpu_count, exported, exported_while
from rlpost.platform import RAY_ENV, RAY_START_ENV, adopt_visibility, limit_threads, platform
from rlpost.rewards.scorer import RewardScorer
from rlpost.tracking.tracking import Tracking
from rlpost.trainer.about import about
from rlpost.trainer.config import AsyncTrainerConfig, ClusterConfig
from rlpost.trainer.evaluate import Evaluator
from rlpost.trainer.fit import check_fit
from rlpost.trainer.gate import ParityGate, Repair
from rlpost.trainer.history import LEDGER
from rlpost.trainer.interrupts import Interrupts
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.leftovers import set_earlier_aside
from rlpost.trainer.repair import AiterRepair
from rlpost.trainer.replay import REPLAY, ReplayStore, describe
from rlpost.trainer.report import Reporter
from rlpost.trainer.resumable import check_resume
from rlpost.trainer.run_state import RunState
from rlpost.trainer.sources import build_source, check_callables, pools, takes_turns
from rlpost.trainer.state import CheckpointStore
from rlpost.trainer.trainer import Trainer
from rlpost.trainer.update import Updates
from rlpost.trainer.watch import Watch, watching
from rlpost.workers.config import CriticConfig, RefConfig, TrainRoleConfig
from rlpost.workers.group import WorkerGroup
from rlpost.workers.model import ModelInfo, inspect, resolve_path
from rlpost.workers.placement import Placement
from rlpost.workers.reward_model import RewardModel
from rlpost.workers.rollout.base import ENGINES, SamplingSpec
from rlpost.workers.rollout.installed import require_installed
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.rollout.processes import children, end
from rlpost.workers.rollout.setup import engine_setup
from rlpost.workers.rollout.workflow import get_workflow

logger = logging.getLogger(__name__)

PARITY_LIMIT = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}  # nats


@dataclasses.dataclass(slots=True, kw_only=True)
class Facts:
    """What engine, trainer and data agree on: the checkpoint, its tokenizer, and how training samples."""

    model: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    spec: SamplingSpec

    def decode(self, token_ids: Any) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def execute(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Run `cfg` to its end in `run_dir` and return the summary; every process started is ended, however it ends.

    Raises:
        Stalled: no progress within a limit of `trainer.timeouts`.
        Preempted: SIGTERM, and no end of the step within `trainer.grace_period_s`, or an error that it may have caused.
    """
    grace_s = cfg.trainer.grace_period_s
    with (
        watching(run_dir, cfg.trainer.timeouts, cfg.trainer.timeline) as watch,
        closing(Interrupts(grace_s)) as interrupts,
    ):
        try:
            return asyncio.run(_execute(cfg, run_dir, watch, interrupts))
        except BaseException as error:  # a cancelled task, or what its cancellation led to
            if watch.stalled is not None:
                raise Stalled(watch.stalled) from error
            if interrupts.stopped_by == "SIGTERM":
                late = f"no end of the step within trainer.grace_period_s={grace_s}"
                reason = late if interrupts.expired else f"and then {described(error)}"
                saved = CheckpointStore(run_dir / "checkpoints", None).complete()
                goes_on = f"goes on from {saved[-1]}" if saved else "begins anew: there is no checkpoint yet"
                raise Preempted(f"SIGTERM, {reason}\n{again(run_dir)} {goes_on}") from error
            raise


async def _execute(cfg: Config, run_dir: Path, watch: Watch, interrupts: Interrupts) -> dict[str, Any]:
    watch.guard()
    async with AsyncExitStack() as stack:
        with heartbeat.phase("start"):
            trainer, reporter = await build(cfg, run_dir, stack)
        with interrupts.stop(trainer, reporter.note):
            summary = await trainer.fit()
        if not summary["finished"]:
            reporter.note(f"to go on    {again(run_dir)}")
        reporter.finish()
        if cfg.trainer.timeline:
            await asyncio.sleep(heartbeat.SETTLE_S)  # those who are about to be killed have then written their phases
        return summary if summary["finished"] else summary | {"stopped_by": interrupts.stopped_by}


def again(run_dir: Path) -> str:
    """What resumes a run: without its folder the command would begin another."""
    return f"The same command with hydra.run.dir={run_dir}"


def prepare(cfg: Config) -> Facts:
    """Find what the config names, and read what everyone must know about the model; nothing is started.

    Raises:
        ValueError: the model, its tokenizer, the engine, the workflow or a reward is not to be had, sequences may grow
            longer than the model was built for, or this host's devices or its kernels are not fit for the run.
    """
    adopt_visibility()
    limit_threads()
    ENGINES.get(cfg.rollout.name, "rollout.name")
    require_installed(cfg.rollout.name)
    get_workflow(cfg.rollout.workflow)
    if platform().kind != "cpu":
        pools(cfg).check_engines(cfg.rollout.tensor_model_parallel_size, cfg.rollout.num_replicas)
    if isinstance(cfg.trainer, AsyncTrainerConfig):
        check_callables(cfg.trainer)
    cache, judge = Path(cfg.cache_dir).expanduser(), cfg.reward.reward_model
    if judge.path is not None:
        judge.path = str(resolve_path(judge.path, cache, cfg.seed, "reward.reward_model.path"))
    # only checks the terms; of the reward model it wants to know no more than that there is one
    RewardScorer(cfg.reward, cfg.data.max_response_length, RewardModel.score if judge.path else None).close()
    transformers.utils.logging.disable_progress_bar()
    info, tokenizer = inspect(cfg.model, cache, cfg.seed)
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    if longest > info.max_position_embeddings:
        raise ValueError(
            f"data.max_prompt_length + data.max_response_length = {longest} tokens, but model.path={cfg.model.path} "
            f"was built for {info.max_position_embeddings} (max_position_embeddings): lower them, or stretch its "
            "positions in model.override_config"
        )
    engine_setup(cfg.rollout, info, platform(), exported())  # only checks: the pool asks again, and warns
    spec = SamplingSpec(
        temperature=cfg.rollout.temperature,
        max_tokens=cfg.data.max_response_length,
        vocab_size=info.vocab_size,
        stop_token_ids=tuple(sorted({*info.stop_token_ids, *cfg.rollout.stop_token_ids})),
        logprobs_every=cfg.logprobs_every,
    )
    return Facts(model=info, tokenizer=tokenizer, spec=spec)


def start_ray(cfg: ClusterConfig) -> Callable[[], None]:
    """Start or join Ray; returns what ends it.

    Raises:
        Preempted: SIGTERM meanwhile.
    """
    here = platform()
    env = RAY_ENV | here.process_env(exported())
    if (folder := heartbeat.current().folder) is not None:
        env[heartbeat.VARIABLE] = str(folder)
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": env}}
    if cfg.address is None:
        arguments |= {"address": "local", "num_cpus": max(4, cpu_count()), "include_dashboard": False}
        if here.kind == "rocm":  # Ray would count them by a library that not every image has
            arguments["num_gpus"] = here.device_count()
    else:
        arguments["address"] = cfg.address
    on_terminate = signal.getsignal(signal.SIGTERM)
    before = children()
    at_start = {name: exported().get(name, value) for name, value in RAY_START_ENV.items()}
    try:
        with exported_while(**at_start):
            ray.init(**(arguments | cfg.ray_init_kwargs))
    except SystemExit:  # its answer to SIGTERM, whose handler it has replaced; half of its processes run by then
        end(children() - before)
        raise Preempted("SIGTERM while Ray started: nothing is lost") from None
    finally:
        signal.signal(signal.SIGTERM, on_terminate or signal.SIG_DFL)  # Ray's own would abort, and end nothing
    return ray.shutdown


def build_evaluator(cfg: Config, facts: Facts) -> Evaluator | None:
    """Validation over `data.val_files` with `rollout.val_kwargs`; None without validation files."""
    sets = load_val_sets(cfg.data, facts.tokenizer)
    if not sets:
        return None
    val = cfg.rollout.val_kwargs
    spec = dataclasses.replace(
        facts.spec, temperature=val.temperature, top_p=val.top_p, top_k=val.top_k, logprobs_every=0
    )
    return Evaluator(sets, val.n, spec, facts.decode, cfg.data.val_batch_size)


def build_placement(cfg: Config, stack: AsyncExitStack) -> Placement:
    """Reserve the devices of the run."""
    placement = Placement.create(pools(cfg), cfg.rollout.tensor_model_parallel_size, cfg.rollout.num_replicas)
    stack.callback(placement.remove)
    return placement


async def build_pool(cfg: Config, facts: Facts, placement: Placement, stack: AsyncExitStack) -> RolloutPool:
    """Engines, workflows and rewards, started."""
    sync_s = cfg.trainer.timeouts.within_publish(cfg.rollout.weight_sync_timeout_s)
    pool = RolloutPool(
        dataclasses.replace(cfg.rollout, weight_sync_timeout_s=sync_s),
        facts.model,
        cfg.reward,
        placement,
        seed=cfg.seed,
        max_prompt_length=cfg.data.max_prompt_length,
        max_response_length=cfg.data.max_response_length,
    )
    stack.push_async_callback(pool.shutdown)
    await pool.start()
    return pool


def updates_per_step(role: TrainRoleConfig, train_batch_size: int) -> int:
    """Optimizer updates of one role between two generations: epochs times mini-batches."""
    return role.ppo_epochs * -(-train_batch_size // role.ppo_mini_batch_size)


def count_updates(cfg: Config, total_steps: int) -> dict[str, int]:
    """Optimizer updates of the whole run for each trained role: the length of its learning rate's schedule."""
    batch_size = cfg.data.train_batch_size
    return {
        "actor": updates_per_step(cfg.actor, batch_size) * max(0, total_steps - cfg.trainer.critic_warmup),
        "critic": updates_per_step(cfg.critic, batch_size) * total_steps,
    }


def _other_roles(cfg: Config) -> tuple[RefConfig | None, CriticConfig | None]:
    """Sections of reference and critic; None where the algorithm needs none."""
    return cfg.ref if cfg.algo.needs_reference else None, cfg.critic if cfg.algo.needs_critic else None


def resolve_other_paths(cfg: Config) -> None:
    """Make `ref.path` and `critic.path` local folders; may download."""
    cache = Path(cfg.cache_dir).expanduser()
    for role, section in zip(("ref", "critic"), _other_roles(cfg), strict=True):
        if section is not None and section.path is not None:
            section.path = str(resolve_path(section.path, cache, cfg.seed, f"{role}.path"))


def build_workers(
    cfg: Config, facts: Facts, placement: Placement, total_steps: int, stack: AsyncExitStack
) -> WorkerGroup:
    """Processes of trainer ranks with the roles that the algorithm needs, for a run of `total_steps`; to be loaded."""
    ref, critic = _other_roles(cfg)
    workers = WorkerGroup.start(
        facts.model,
        cfg.model,
        cfg.actor,
        placement=placement,
        ref=ref,
        critic=critic,
        temperature=cfg.rollout.temperature,
        total_updates=count_updates(cfg, total_steps),
        seed=cfg.seed,
        collective_timeout_s=cfg.trainer.timeouts.collective_s,
    )
    stack.callback(workers.shutdown)
    return workers


async def start_processes(
    cfg: Config, facts: Facts, total_steps: int, sleep: bool, stack: AsyncExitStack
) -> tuple[RolloutPool, WorkerGroup]:
    """Engines and trainer ranks. On shared accelerators these load one after the other: an engine measures how much
    memory it may take, and must not see the trainer take and free some meanwhile. With `sleep` it is asleep at the end.
    """
    placement = build_placement(cfg, stack)
    check_fit(cfg, facts.model, placement, sleep)

    async def start_pool() -> RolloutPool:
        with _announced(f"engines: {placement.num_replicas} of {cfg.rollout.name}"):
            return await build_pool(cfg, facts, placement, stack)

    async def load_workers() -> None:
        with _announced(f"trainer ranks: {placement.num_ranks}"):
            await asyncio.to_thread(workers.load)

    await asyncio.to_thread(resolve_other_paths, cfg)
    workers = build_workers(cfg, facts, placement, total_steps, stack)
    if placement.shares_no_device:
        pool, _ = await _together(start_pool(), load_workers())
    else:
        pool = await start_pool()
        if sleep:
            await pool.sleep()
        await load_workers()
    stack.callback(workers.shutdown)  # before the engines, which may wait for a rank
    return pool, workers


@contextmanager
def _announced(what: str) -> Iterator[None]:
    """Say that `what` has started, and how long it took: it may be minutes."""
    start = time.perf_counter()
    yield
    logger.info("%s, started in %.0f s", what, time.perf_counter() - start)


async def _together(*starting: Awaitable[Any]) -> list[Any]:
    """Wait for all, also when one fails: what the others started must be registered before it is closed."""
    results = await asyncio.gather(*starting, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def build(cfg: Config, run_dir: Path, stack: AsyncExitStack) -> tuple[Trainer, Reporter]:
    """Compose the run; `stack` receives what must be closed.

    Raises:
        ValueError: something the config names cannot be had; says which key and what to change.
    """
    facts = prepare(cfg)
    stream = PromptStream(cfg.data, facts.tokenizer, cfg.seed)
    evaluator = build_evaluator(cfg, facts)
    if len(stream) < cfg.data.train_batch_size:
        logger.warning(
            "data.train_files has %d usable prompts, fewer than data.train_batch_size=%d: prompts repeat within a step",
            len(stream), cfg.data.train_batch_size,
        )  # fmt: skip
    steps_per_epoch = max(1, len(stream) // cfg.data.train_batch_size)
    total_steps = cfg.trainer.total_training_steps or cfg.trainer.total_epochs * steps_per_epoch
    algorithm = build_algorithm(cfg)
    rollouts = cfg.trainer.rollout_data_dir
    rollout_dir = below(run_dir, rollouts, "trainer.rollout_data_dir") if rollouts else None
    manifest = about(cfg)
    checkpoints = CheckpointStore(run_dir / "checkpoints", cfg.trainer.max_ckpt_to_keep, manifest)
    if check_resume(checkpoints, cfg, stream, total_steps) is None:
        set_earlier_aside(run_dir, rollout_dir)
    ledger = Ledger(run_dir / LEDGER)
    stack.callback(ledger.close)

    reporter = Reporter(
        Tracking.build(cfg.tracking, run_dir, manifest["config"], total_steps),
        run_dir,
        decode=facts.decode,
        rollout_dir=rollout_dir,
    )
    stack.callback(reporter.close)
    reporter.note(f"starting    Ray, then the trainer and {cfg.rollout.name} with {facts.model.path}")
    stack.callback(start_ray(cfg.cluster))
    pool, workers = await start_processes(cfg, facts, total_steps, takes_turns(cfg), stack)
    source = build_source(cfg, facts.spec, stream, algorithm, pool, workers, stack, ledger)
    replays = ReplayStore(
        run_dir / REPLAY,
        describe(cfg, facts.model, count_updates(cfg, total_steps)),
        cfg.trainer.max_replays_to_keep,
    )
    trainer = Trainer(
        cfg.trainer,
        algorithm=algorithm,
        source=source,
        workers=workers,
        updates=Updates(cfg.trainer, algorithm, workers, replays, reporter),
        gate=build_gate(cfg, workers, AiterRepair(lambda: pool.cfg, source.restart_engines, reporter.note)),
        evaluator=evaluator,
        reporter=reporter,
        state=RunState(checkpoints, source, algorithm, workers, reporter, ledger),
        ledger=ledger,
        groups_per_step=cfg.data.train_batch_size,
        n=cfg.rollout.n,
        total_steps=total_steps,
    )
    return trainer, reporter

    if check_resume(checkpoints, cfg, stream, total_steps) is None:
        set_earlier_aside(run_dir, rollout_dir)


def build_algorithm(cfg: Config) -> Algorithm:
    """The learning rule, with what it must know of the run."""
    return Algorithm(
        cfg.algo,
        max_response_length=cfg.data.max_response_length,
        critic_warmup=cfg.trainer.critic_warmup,
        cliprange_value=cfg.critic.cliprange_value,
    )


def build_gate(cfg: Config, workers: WorkerGroup, mend: Repair | None = None) -> ParityGate:
    """The parity gate; `trainer.logprob_diff_limit` null means what engine's and actor's dtype allow."""
    limit = cfg.trainer.logprob_diff_limit
    if limit is None:
        dtypes = (platform().dtype(name) for name in (cfg.rollout.dtype, cfg.actor.dtype))
        limit = max(PARITY_LIMIT[str(dtype).removeprefix("torch.")] for dtype in dtypes)
    trainer, rollout = cfg.trainer, cfg.rollout
    return ParityGate(
        workers,
        limit,
        trainer.parity_probe_size,
        rollout.n,
        rollout.temperature,
        mend,
        trainer.parity_probe_freq,
    )
