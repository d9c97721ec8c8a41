"""Rules between sections, checked before anything heavy is imported: keys, values and the fix of each that is broken.

A rule is a generator over the whole config. It must bear values that the sections themselves refuse, since all that is
wrong is reported at once. What depends on the machine is checked where the machine is known (`rlpost.trainer.build`).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlpost.algos.config import AGGREGATIONS_READ, ESTIMATORS_READ, LOSSES_READ
from rlpost.data_config import ADAPTERS_READ
from rlpost.registry import near
from rlpost.trainer.config import AsyncTrainerConfig

if TYPE_CHECKING:
    from rlpost.config import Config
    from rlpost.workers.config import TrainRoleConfig

ENGINES = ("vllm", "sglang", "hf")
RESIDENT_LIMIT = 0.9  # of a GPU's memory, for an engine that stays there while the trainer works

Rule = Callable[["Config"], Iterator[str]]


def problems(cfg: "Config") -> Iterator[str]:
    """One message for each rule that is broken."""
    for rule in RULES:
        yield from rule(cfg)


def names(cfg: "Config") -> Iterator[str]:
    """What is chosen by name exists."""
    algo = cfg.algo
    for key, name, known, own in (
        ("algo.adv_estimator", algo.adv_estimator, ESTIMATORS_READ, True),
        ("algo.loss_mode", algo.loss_mode, LOSSES_READ, True),
        ("algo.loss_agg_mode", algo.loss_agg_mode, AGGREGATIONS_READ, False),
        ("rollout.name", cfg.rollout.name, ENGINES, False),
        ("data.adapter", cfg.data.adapter, ADAPTERS_READ, True),
    ):
        if name not in known and not (own and "." in name):
            yield f"{key}={name}: no such name; {near(name, known)}" + (
                " (or a dotted path of your own)" if own else ""
            )


def groups(cfg: "Config") -> Iterator[str]:
    """A group is large enough for those who compare within it."""
    algo, n = cfg.algo, cfg.rollout.n
    if algo.adv_estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline") and n == 1:
        yield (
            f"rollout.n={n} with algo.adv_estimator={algo.adv_estimator}: one sample has no baseline, every "
            "advantage would be 0. Set rollout.n to 2 or more, or algo=ppo / algo=reinforce_plus_plus"
        )
    if algo.filter_groups.enable and n == 1:
        yield (
            f"rollout.n={n} with algo.filter_groups.enable=true: a single sample never differs from itself, every "
            "group would be dropped. Set rollout.n to 2 or more, or algo.filter_groups.enable=false"
        )
    if algo.filter_groups.enable and algo.filter_groups.metric not in ("reward", *cfg.reward.terms):
        known = near(algo.filter_groups.metric, ["reward", *cfg.reward.terms])
        yield f"algo.filter_groups.metric={algo.filter_groups.metric}: no such reward term in reward.terms; {known}"


def batches(cfg: "Config") -> Iterator[str]:
    """Mini-batches are parts of a batch."""
    for section, role in trained(cfg):
        if role.ppo_mini_batch_size > cfg.data.train_batch_size > 0:
            yield (
                f"{section}.ppo_mini_batch_size={role.ppo_mini_batch_size} is larger than "
                f"data.train_batch_size={cfg.data.train_batch_size} (both count prompts): lower it or raise that"
            )
    trainer = cfg.trainer
    if isinstance(trainer, AsyncTrainerConfig) and trainer.require_batches is not None:
        batches, mini = trainer.require_batches, cfg.actor.ppo_mini_batch_size
        if batches * mini != cfg.data.train_batch_size:
            yield (
                f"trainer.require_batches={batches} x actor.ppo_mini_batch_size={mini} = {batches * mini} prompts a "
                f"step, but data.train_batch_size={cfg.data.train_batch_size}: make them equal, or leave "
                "require_batches out"
            )


def token_budgets(cfg: "Config") -> Iterator[str]:
    """The longest sequence fits wherever sequences go."""
    data, rollout = cfg.data, cfg.rollout
    longest = data.max_prompt_length + data.max_response_length
    what = f"data.max_prompt_length + data.max_response_length = {longest}"
    budgets = [(f"{s}.ppo_max_token_len_per_gpu", r.ppo_max_token_len_per_gpu, s, r) for s, r in trained(cfg)]
    if cfg.algo.needs_reference and cfg.ref.log_prob_max_token_len_per_gpu is not None:
        key = "ref.log_prob_max_token_len_per_gpu"
        budgets.append((key, cfg.ref.log_prob_max_token_len_per_gpu, "actor", cfg.actor))
    for key, tokens, section, role in budgets:
        if tokens * role.ulysses_sequence_parallel_size < longest:
            yield (
                f"{key}={tokens} x {section}.ulysses_sequence_parallel_size={role.ulysses_sequence_parallel_size} "
                f"holds no sequence of {what} tokens: raise it to at least that"
            )
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield f"rollout.max_model_len={rollout.max_model_len} < {what}: raise it, or leave it out to take that"
    batched = rollout.max_num_batched_tokens
    if rollout.name == "vllm" and batched is not None and batched < rollout.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens={batched} < rollout.max_num_seqs={rollout.max_num_seqs}: vLLM decodes a "
            "token of each sequence in one pass; raise the first or lower the second"
        )
    overlong = cfg.reward.overlong_buffer
    if overlong.enable and (overlong.len or 0) > data.max_response_length:
        yield (
            f"reward.overlong_buffer.len={overlong.len} exceeds data.max_response_length={data.max_response_length}: "
            "lower it, or leave it out for a quarter of that"
        )


def corrections(cfg: "Config") -> Iterator[str]:
    """The engine reports the logprobs that a correction needs."""
    if (cfg.rollout.logprobs_every or 1) > 1 and cfg.algo.rollout_correction.is_on:
        yield (
            f"rollout.logprobs_every={cfg.rollout.logprobs_every} with algo.rollout_correction: the correction needs "
            "the engine's logprob of every token. Leave rollout.logprobs_every out"
        )


def critic_warmup(cfg: "Config") -> Iterator[str]:
    """There is a critic to warm up, and an end to it."""
    warmup, total = cfg.trainer.critic_warmup, cfg.trainer.total_training_steps
    if warmup and not cfg.algo.needs_critic:
        yield (
            f"trainer.critic_warmup={warmup}: algo.adv_estimator={cfg.algo.adv_estimator} has no critic. Set algo=ppo, "
            "or trainer.critic_warmup=0"
        )
    elif warmup and total is not None and warmup >= total:
        yield (
            f"trainer.critic_warmup={warmup} leaves the actor none of trainer.total_training_steps={total}: lower the "
            "first or raise the second"
        )


def rewards(cfg: "Config") -> Iterator[str]:
    """Something is rewarded, by what is there."""
    if not cfg.reward.terms:
        yield "reward.terms is empty: nothing would be rewarded. Choose a preset such as reward=number, or name a term"
    if cfg.reward.reward_model.path is None:
        for name, term in cfg.reward.terms.items():
            if term.fn == "reward_model":
                yield (
                    f"reward.terms.{name}.fn=reward_model asks a reward model, but none is served: set "
                    "reward.reward_model.path"
                )


def engines(cfg: "Config") -> Iterator[str]:
    """The engine can do what is asked of it."""
    rollout, trainer = cfg.rollout, cfg.trainer
    if rollout.name == "hf":
        for key in rollout.engine_kwargs:
            yield f"rollout.engine_kwargs.{key}: the hf engine takes no arguments; leave it out or use rollout=vllm"
        if rollout.tensor_model_parallel_size > 1:
            yield (
                f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the hf engine runs on one "
                "device; set it to 1 or use rollout=vllm"
            )
    shares = trainer.share_gpus if isinstance(trainer, AsyncTrainerConfig) else True
    stays = isinstance(trainer, AsyncTrainerConfig) or not rollout.free_cache_engine
    if shares and stays and RESIDENT_LIMIT < rollout.gpu_memory_utilization < 1.0:
        yield (
            f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization} with an engine that stays on the "
            f"trainer's GPU while that works ({_who_stays(cfg)}): next to nothing is left to train in. Set it to "
            f"{RESIDENT_LIMIT} or less"
        )
    if rollout.weight_sync == "nccl" and shares:
        yield (
            "rollout.weight_sync=nccl cannot work where trainer and engines share GPUs, since NCCL and RCCL refuse two "
            "ranks on one device: set rollout.weight_sync=auto, or trainer=fully_async trainer.share_gpus=false"
        )
    if rollout.weight_sync == "ipc" and not shares:
        yield (
            "rollout.weight_sync=ipc cannot work with trainer.share_gpus=false: an engine's device holds no trainer "
            "whose memory it could map. Set rollout.weight_sync=auto"
        )


def ranks(cfg: "Config") -> Iterator[str]:
    """Sizes divide the number of trainer ranks, where that is stated."""
    stated = _trainer_ranks(cfg)
    if stated is None or stated[0] < 1:
        return
    count, why = stated
    for section, role in trained(cfg):
        shards, slices = role.fsdp.fsdp_size, role.ulysses_sequence_parallel_size
        for key, size in ((f"{section}.fsdp.fsdp_size", shards), (f"{section}.ulysses_sequence_parallel_size", slices)):
            if size > 0 and count % size:
                yield f"{key}={size} does not divide the {count} trainer ranks ({why}): choose a divisor"


def staleness(cfg: "Config") -> Iterator[str]:
    """A bound on staleness that the sync interval can keep."""
    trainer, groups_per_step = cfg.trainer, cfg.data.train_batch_size
    if not isinstance(trainer, AsyncTrainerConfig):
        return
    counts = (groups_per_step, trainer.trigger_parameter_sync_step, trainer.max_concurrent_groups or 1)
    if min(counts) < 1 or not trainer.staleness_threshold >= 0 or trainer.on_stale not in ("wait", "drop", "abort"):
        return  # refused already
    try:
        trainer.limits(groups_per_step)
    except ValueError as error:
        yield str(error)


RULES: tuple[Rule, ...] = (
    names,
    groups,
    batches,
    token_budgets,
    corrections,
    critic_warmup,
    rewards,
    engines,
    ranks,
    staleness,
)


def trained(cfg: "Config") -> "list[tuple[str, TrainRoleConfig]]":
    """The sections of the roles that are trained."""
    return [("actor", cfg.actor), *([("critic", cfg.critic)] if cfg.algo.needs_critic else [])]


def _trainer_ranks(cfg: "Config") -> tuple[int, str] | None:
    """How many ranks train and which keys say so; None where that is left to the machine."""
    trainer, cluster = cfg.trainer, cfg.cluster
    if isinstance(trainer, AsyncTrainerConfig) and not trainer.share_gpus:
        return None if trainer.train_gpus is None else (trainer.train_gpus, f"trainer.train_gpus={trainer.train_gpus}")
    if cluster.n_gpus_per_node is None:
        return None
    why = f"cluster.nnodes={cluster.nnodes} x cluster.n_gpus_per_node={cluster.n_gpus_per_node}"
    return cluster.nnodes * cluster.n_gpus_per_node, why


def _who_stays(cfg: "Config") -> str:
    return (
        "trainer.share_gpus=true" if isinstance(cfg.trainer, AsyncTrainerConfig) else "rollout.free_cache_engine=false"
    )
