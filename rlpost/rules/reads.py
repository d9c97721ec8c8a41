"""Which keys only some choices read. A key that the user set and that nothing reads is an error, see `unread`.

What a choice of the machine leaves unread (`rollout.aiter` off ROCm, `rollout.gpu_memory_utilization` on a CPU) is no
error: a config travels between machines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rlpost.algos.config import AGGREGATIONS_READ, ESTIMATORS_READ, LOSSES_READ
from rlpost.data_config import ADAPTERS_READ
from rlpost.trainer.config import AsyncTrainerConfig

if TYPE_CHECKING:
    from rlpost.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who reads some keys, and when.

    Attributes:
        keys: patterns of dotted keys.
        by: the reader, in words.
        when: whether this config has such a reader.
        decided_by: the keys that `when` looks at.
        fix: what one sets to get the reader.
    """

    keys: tuple[str, ...]
    by: str
    when: Callable[["Config"], bool]
    decided_by: tuple[str, ...]
    fix: str

    def matches(self, key: str) -> bool:
        """Whether `key`, or the free-form map that it lies in, is one of `keys`."""
        return any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in self.keys)


def unread(cfg: "Config", keys: Mapping[str, Any]) -> dict[str, tuple[str, Reader]]:
    """Of `keys` (with the values they were given) those that nothing in `cfg` reads: key -> message, reader missed."""
    found = {}
    for key, value in keys.items():
        reader = next((reader for reader in READERS if reader.matches(key) and not reader.when(cfg)), None)
        if reader is not None:
            state = ", ".join(f"{name}={written(value_at(cfg, name))}" for name in reader.decided_by)
            message = f"{key}={written(value)} would have no effect (read by {reader.by}; here {state}): {reader.fix}"
            message += ", or leave it out"
            found[key] = (message, reader)
    return found


def readers_of(key: str) -> list[Reader]:
    """The rules about `key`; all must hold for it to be read."""
    return [reader for reader in READERS if reader.matches(key)]


def value_at(cfg: "Config", key: str) -> Any:
    """The value of a dotted key of the schema; of a map, the names in it."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name, None)
    return list(value) if isinstance(value, dict) else value


def written(value: Any) -> str:
    """A value as one writes it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _listed(section: str, chooser: str, table: Mapping[str, tuple[str, ...]], what: str) -> Iterator[Reader]:
    """Readers of the keys that the names of `table` read; a dotted path of the user's may read any."""
    for key in sorted({key for keys in table.values() for key in keys}):
        names = [name for name, keys in table.items() if key in keys]

        def when(cfg: "Config", names: Iterable[str] = tuple(names)) -> bool:
            chosen = value_at(cfg, f"{section}.{chooser}")
            return chosen in names or chosen not in table

        yield Reader(
            keys=(f"{section}.{key}",),
            by=f"the {what}{('es' if what.endswith('s') else 's') if len(names) > 1 else ''} {', '.join(names)}",
            when=when,
            decided_by=(f"{section}.{chooser}",),
            fix=f"set {section}.{chooser}={names[0]}",
        )


def _is_async(cfg: "Config") -> bool:
    return isinstance(cfg.trainer, AsyncTrainerConfig)


def _has_judge_term(cfg: "Config") -> bool:
    return any(term.fn == "reward_model" or "." in term.fn for term in cfg.reward.terms.values())


def _logs_to(*loggers: str) -> Callable[["Config"], bool]:
    return lambda cfg: any(name in loggers or "." in name for name in cfg.tracking.logger)


def _decays(section: str) -> Reader:
    return Reader(
        keys=(f"{section}.optim.min_lr_ratio",),
        by="a learning rate that decays",
        when=lambda cfg: value_at(cfg, f"{section}.optim.lr_scheduler_type") != "constant",
        decided_by=(f"{section}.optim.lr_scheduler_type",),
        fix=f"set {section}.optim.lr_scheduler_type to linear or cosine",
    )


def _reader(
    *keys: str, by: str, when: Callable[["Config"], bool], decided_by: str | tuple[str, ...], fix: str
) -> Reader:
    decided = (decided_by,) if isinstance(decided_by, str) else decided_by
    return Reader(keys=keys, by=by, when=when, decided_by=decided, fix=fix)


READERS: tuple[Reader, ...] = (
    _reader(
        "algo.name",
        by="nobody, it is a label",
        when=lambda cfg: False,
        decided_by="algo.adv_estimator",
        fix="choose the algorithm by its group, such as algo=ppo",
    ),
    *_listed("algo", "adv_estimator", ESTIMATORS_READ, "advantage estimator"),
    *_listed("algo", "loss_mode", LOSSES_READ, "loss"),
    *_listed("algo", "loss_agg_mode", AGGREGATIONS_READ, "aggregation"),
    *_listed("data", "adapter", ADAPTERS_READ, "adapter"),
    _reader(
        "algo.kl_loss_coef", "algo.kl_loss_type",
        by="a KL loss",
        when=lambda cfg: cfg.algo.use_kl_loss,
        decided_by="algo.use_kl_loss",
        fix="set algo.use_kl_loss=true",
    ),
    _reader(
        "algo.kl_penalty", "algo.kl_ctrl.*",
        by="a KL penalty in the reward",
        when=lambda cfg: cfg.algo.use_kl_in_reward,
        decided_by="algo.use_kl_in_reward",
        fix="set algo.use_kl_in_reward=true",
    ),
    _reader(
        "algo.kl_ctrl.horizon", "algo.kl_ctrl.target_kl",
        by="the adaptive controller",
        when=lambda cfg: cfg.algo.kl_ctrl.type == "adaptive",
        decided_by="algo.kl_ctrl.type",
        fix="set algo.kl_ctrl.type=adaptive",
    ),
    _reader(
        "algo.filter_groups.metric", "algo.filter_groups.max_num_gen_batches", "algo.filter_groups.on_exhausted",
        by="dynamic sampling",
        when=lambda cfg: cfg.algo.filter_groups.enable,
        decided_by="algo.filter_groups.enable",
        fix="set algo.filter_groups.enable=true",
    ),
    _reader(
        "algo.rollout_correction.rollout_is_threshold",
        by="importance sampling of rollouts",
        when=lambda cfg: cfg.algo.rollout_correction.rollout_is is not None,
        decided_by="algo.rollout_correction.rollout_is",
        fix="set algo.rollout_correction.rollout_is to token, sequence or geometric",
    ),
    _reader(
        "algo.rollout_correction.rollout_rs_threshold", "algo.rollout_correction.rollout_rs_threshold_lower",
        by="rejection of rollouts",
        when=lambda cfg: cfg.algo.rollout_correction.rollout_rs is not None,
        decided_by="algo.rollout_correction.rollout_rs",
        fix="set algo.rollout_correction.rollout_rs to token, sequence or geometric",
    ),
    _reader(
        "model.lora_alpha", "model.target_modules",
        by="LoRA",
        when=lambda cfg: cfg.model.lora_rank > 0,
        decided_by="model.lora_rank",
        fix="set model.lora_rank above 0",
    ),
    _decays("actor"),
    _reader(
        "critic.*",
        by="a critic",
        when=lambda cfg: cfg.algo.needs_critic,
        decided_by="algo.adv_estimator",
        fix="set algo=ppo",
    ),
    _decays("critic"),
    _reader(
        "actor.fsdp.param_offload", "actor.fsdp.optimizer_offload",
        "critic.fsdp.param_offload", "critic.fsdp.optimizer_offload",
        by="a trainer that makes room for an engine it takes turns with",
        when=lambda cfg: not _is_async(cfg) and cfg.rollout.free_cache_engine,
        decided_by=("trainer.name", "rollout.free_cache_engine"),
        fix="set trainer=colocated rollout.free_cache_engine=true",
    ),
    _reader(
        "rollout.free_cache_engine",
        by="engines that take turns with the trainer",
        when=lambda cfg: not _is_async(cfg),
        decided_by="trainer.name",
        fix="set trainer=colocated",
    ),
    _reader(
        "ref.*",
        by="a reference policy",
        when=lambda cfg: cfg.algo.needs_reference,
        decided_by=("algo.use_kl_loss", "algo.use_kl_in_reward"),
        fix="set algo.use_kl_loss=true or algo.use_kl_in_reward=true",
    ),
    _reader(
        "ref.param_offload",
        by="a reference with weights of its own",
        when=lambda cfg: not cfg.model.lora_rank or cfg.ref.path is not None,
        decided_by=("model.lora_rank", "ref.path"),
        fix="set ref.path (with LoRA the reference is the actor, its adapter off)",
    ),
    _reader(
        "rollout.enforce_eager", "rollout.max_num_batched_tokens", "rollout.startup_timeout_s", "rollout.fp32_lm_head",
        "rollout.aiter", "rollout.aiter_kernels.*", "rollout.aiter_on_fault", "rollout.aiter_max_restarts",
        by="vLLM and SGLang",
        when=lambda cfg: cfg.rollout.name != "hf",
        decided_by="rollout.name",
        fix="set rollout=vllm or rollout=sglang",
    ),
    _reader(
        "rollout.max_num_seqs",
        by="vLLM, SGLang and trainer=fully_async",
        when=lambda cfg: cfg.rollout.name != "hf" or _is_async(cfg),
        decided_by=("rollout.name", "trainer.name"),
        fix="set rollout=vllm or rollout=sglang",
    ),
    _reader(
        "rollout.aiter_kernels.*", "rollout.aiter_on_fault", "rollout.aiter_max_restarts",
        by="engines with AITER's kernels",
        when=lambda cfg: cfg.rollout.aiter != "off",
        decided_by="rollout.aiter",
        fix="leave rollout.aiter at auto",
    ),
    _reader(
        "rollout.aiter_max_restarts",
        by="the search for kernels at fault",
        when=lambda cfg: cfg.rollout.aiter_on_fault == "disable",
        decided_by="rollout.aiter_on_fault",
        fix="set rollout.aiter_on_fault=disable",
    ),
    _reader(
        "rollout.val_kwargs.*", "data.val_batch_size", "data.val_max_samples",
        "trainer.val_before_train", "trainer.test_freq", "trainer.log_val_generations",
        by="validation",
        when=lambda cfg: bool(cfg.data.val_files),
        decided_by="data.val_files",
        fix="set data.val_files",
    ),
    _reader(
        "rollout.val_kwargs.top_p", "rollout.val_kwargs.top_k",
        by="validation that samples",
        when=lambda cfg: cfg.rollout.val_kwargs.temperature > 0,
        decided_by="rollout.val_kwargs.temperature",
        fix="set rollout.val_kwargs.temperature above 0 (0 is greedy)",
    ),
    _reader(
        "reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor",
        by="the punishment of overlong answers",
        when=lambda cfg: cfg.reward.overlong_buffer.enable,
        decided_by="reward.overlong_buffer.enable",
        fix="set reward.overlong_buffer.enable=true",
    ),
    _reader(
        "reward.reward_model.*",
        by="the reward term reward_model, or one of your own",
        when=_has_judge_term,
        decided_by="reward.terms",
        fix="set reward=model",
    ),
    _reader(
        "reward.reward_model.max_length", "reward.reward_model.batch_size", "reward.reward_model.dtype",
        by="a reward model that is served",
        when=lambda cfg: cfg.reward.reward_model.path is not None,
        decided_by="reward.reward_model.path",
        fix="set reward.reward_model.path",
    ),
    _reader(
        "data.seed",
        by="prompts that are shuffled",
        when=lambda cfg: cfg.data.shuffle,
        decided_by="data.shuffle",
        fix="set data.shuffle=true",
    ),
    _reader(
        "trainer.total_epochs",
        by="a run whose steps are not counted out",
        when=lambda cfg: cfg.trainer.total_training_steps is None,
        decided_by="trainer.total_training_steps",
        fix="set trainer.total_training_steps=null",
    ),
    _reader(
        "trainer.rollout_gpus", "trainer.train_gpus",
        by="pools of their own",
        when=lambda cfg: isinstance(cfg.trainer, AsyncTrainerConfig) and not cfg.trainer.share_gpus,
        decided_by="trainer.share_gpus",
        fix="set trainer.share_gpus=false",
    ),
    _reader(
        "trainer.max_skipped_steps", "trainer.max_replays_to_keep",
        by="a run that skips steps that are not finite",
        when=lambda cfg: cfg.trainer.on_nonfinite == "skip",
        decided_by="trainer.on_nonfinite",
        fix="set trainer.on_nonfinite=skip",
    ),
    _reader(
        "trainer.sampler_window",
        by="a sampler",
        when=lambda cfg: isinstance(cfg.trainer, AsyncTrainerConfig) and cfg.trainer.sampler is not None,
        decided_by="trainer.sampler",
        fix="set trainer.sampler",
    ),
    _reader(
        "tracking.wandb",
        by="the tracker wandb",
        when=_logs_to("wandb"),
        decided_by="tracking.logger",
        fix="set tracking=wandb",
    ),
    _reader(
        "tracking.mlflow_uri",
        by="the tracker mlflow",
        when=_logs_to("mlflow"),
        decided_by="tracking.logger",
        fix="set tracking=mlflow",
    ),
    _reader(
        "tracking.project_name", "tracking.experiment_name",
        by="the trackers wandb and mlflow",
        when=_logs_to("wandb", "mlflow"),
        decided_by="tracking.logger",
        fix="set tracking=wandb or tracking=mlflow",
    ),
)  # fmt: skip
