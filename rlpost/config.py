"""The root schema, its registration with Hydra, and the checks that need more than one section. No torch, no ray."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.algos.config import AlgoConfig
from rlpost.data_config import DataConfig
from rlpost.redact import redact_text
from rlpost.registry import near
from rlpost.rewards.config import RewardConfig
from rlpost.tracking.config import TrackingConfig
from rlpost.trainer.config import AsyncTrainerConfig, ClusterConfig, TrainerConfig
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, RefConfig, RolloutConfig

PACKAGE = Path(__file__).parent
CONFIG_DIR = PACKAGE / "_config" if (PACKAGE / "_config").is_dir() else PACKAGE.parent / "config"


@dataclass(slots=True, kw_only=True)
class Config:
    """Everything a run is made of; each section goes to the component that reads it, never the whole."""

    algo: AlgoConfig = field(default_factory=AlgoConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    seed: int = 1
    cache_dir: str = "~/.cache/rlpost"  # made checkpoints

    def __post_init__(self) -> None:
        problems = list(cross_checks(self))
        if problems:
            raise ValueError("\n".join(problems))


SECTIONS: dict[str, type] = {
    "algo": AlgoConfig,
    "model": ModelConfig,
    "actor": ActorConfig,
    "critic": CriticConfig,
    "ref": RefConfig,
    "rollout": RolloutConfig,
    "reward": RewardConfig,
    "data": DataConfig,
    "trainer": TrainerConfig,
    "cluster": ClusterConfig,
    "tracking": TrackingConfig,
}


# keys that only one choice of a group has: group -> choice -> schema
VARIANTS: dict[str, dict[str, type]] = {"trainer": {"fully_async": AsyncTrainerConfig}}


def register() -> None:
    """File the schemas with Hydra: `schema` in every group, `root_schema` the resolver `folder_name`."""
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    store = ConfigStore.instance()
    for name, schema in SECTIONS.items():
        store.store(group=name, name="schema", node=schema)
    store.store(group="trainer", name="async_schema", node=AsyncTrainerConfig)
    store.store(name="root_schema", node=Config)


def folder_name(text: str, max_length: int = 100) -> str:
    """`text`, without secrets, fit for the name of one folder: overrides hold slashes; a name has its limit."""
    return re.sub(r"[^\w.,=+-]+", "_", redact_text(text))[:max_length]


def cross_checks(cfg: Config) -> Iterator[str]:
    """One sentence for each rule between sections that is broken: keys, values and the fix."""
    algo, actor, rollout, data = cfg.algo, cfg.actor, cfg.rollout, cfg.data
    if algo.adv_estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline") and rollout.n < 2:
        yield (
            f"rollout.n={rollout.n} with algo.adv_estimator={algo.adv_estimator}: one sample has no baseline, every "
            "advantage would be 0. Set rollout.n to 2 or more, or algo=ppo / algo=reinforce_plus_plus"
        )
    for section, role in (("actor", actor), ("critic", cfg.critic)):
        if section == "critic" and not algo.needs_critic:
            continue
        if role.ppo_mini_batch_size > data.train_batch_size:
            yield (
                f"{section}.ppo_mini_batch_size={role.ppo_mini_batch_size} is larger than "
                f"data.train_batch_size={data.train_batch_size} (both count prompts): lower it or raise that"
            )
        longest = data.max_prompt_length + data.max_response_length
        if role.ppo_max_token_len_per_gpu * role.ulysses_sequence_parallel_size < longest:
            yield (
                f"{section}.ppo_max_token_len_per_gpu={role.ppo_max_token_len_per_gpu} x "
                f"{section}.ulysses_sequence_parallel_size={role.ulysses_sequence_parallel_size} holds no sequence of "
                f"data.max_prompt_length + data.max_response_length = {longest} tokens: raise it to at least that"
            )
    corrected = algo.rollout_correction
    if rollout.logprobs_every > 1 and corrected.is_on:
        yield (
            f"rollout.logprobs_every={rollout.logprobs_every} with algo.rollout_correction: the correction needs the "
            "engine's logprob of every token. Set rollout.logprobs_every=1"
        )
    if rollout.max_model_len is not None and rollout.max_model_len < data.max_prompt_length + data.max_response_length:
        yield (
            f"rollout.max_model_len={rollout.max_model_len} < data.max_prompt_length + data.max_response_length = "
            f"{data.max_prompt_length + data.max_response_length}"
        )
    if cfg.trainer.critic_warmup and not algo.needs_critic:
        yield f"trainer.critic_warmup={cfg.trainer.critic_warmup}: algo.adv_estimator={algo.adv_estimator} has none"
    if algo.filter_groups.enable and algo.filter_groups.metric not in ("reward", *cfg.reward.terms):
        known = near(algo.filter_groups.metric, ["reward", *cfg.reward.terms])
        yield f"algo.filter_groups.metric={algo.filter_groups.metric}: no such reward term in reward.terms; {known}"
    if isinstance(cfg.trainer, AsyncTrainerConfig):
        yield from async_checks(cfg, cfg.trainer)
    if not cfg.reward.terms:
        yield "reward.terms is empty: nothing would be rewarded. Choose a preset such as reward=number, or name a term"
    if cfg.reward.overlong_buffer.enable and (cfg.reward.overlong_buffer.len or 0) > data.max_response_length:
        yield (
            f"reward.overlong_buffer.len={cfg.reward.overlong_buffer.len} exceeds "
            f"data.max_response_length={data.max_response_length}"
        )


def async_checks(cfg: Config, trainer: AsyncTrainerConfig) -> Iterator[str]:
    """Rules of `trainer=fully_async`."""
    try:
        trainer.limits(cfg.data.train_batch_size)
    except ValueError as error:
        yield str(error)
    batches, mini = trainer.require_batches, cfg.actor.ppo_mini_batch_size
    if batches is not None and batches * mini != cfg.data.train_batch_size:
        yield (
            f"trainer.require_batches={batches} x actor.ppo_mini_batch_size={mini} = {batches * mini} prompts a step, "
            f"but data.train_batch_size={cfg.data.train_batch_size}: make them equal, or leave require_batches out"
        )


def to_object(cfg: DictConfig) -> Config:
    """The typed config; every section's own checks and `cross_checks` run here.

    Raises:
        ValueError: what is wrong, by key, with the fix.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ValueError(
            f"{missing[0]} has no value: set it on the command line ({missing[0]}=...) or in an experiment"
        )
    try:
        typed = OmegaConf.to_object(cfg)
    except (OmegaConfBaseException, AttributeError) as error:  # AttributeError: `+key=...` beyond the schema
        raise ValueError(str(error)) from error
    assert isinstance(typed, Config)
    return typed


def all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, for did-you-mean."""
    keys: list[str] = []

    def walk(node: Any, at: str) -> None:
        for key in node:
            path = f"{at}{key}"
            keys.append(path)
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
                walk(child, path + ".")

    walk(OmegaConf.structured(schema), prefix)
    return keys


def keys_of_variants() -> dict[str, str]:
    """Dotted keys that only one choice of a group has, and that choice as it is typed."""
    base = set(all_keys())
    return {
        key: f"{group}={choice}"
        for group, variants in VARIANTS.items()
        for choice, schema in variants.items()
        for key in all_keys(schema, f"{group}.")
        if key not in base
    }


def choices(group: str) -> list[str]:
    """What a config group offers, by the files below `config/`."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def explain_compose_error(message: str) -> str:
    """Hydra's or OmegaConf's message about an unknown key or choice, followed by the nearest known ones."""
    message = message.partition("\nConfig search path")[0]
    message = re.sub(r"\nTo append to your config use .*", "", message).strip()  # no key may be added
    choice = re.search(r"Could not find '(\w+)/([^']+)'", message)
    if choice and choice.group(1) in (*SECTIONS, "experiment"):
        group, name = choice.groups()
        return f"{group}={name}: no such choice; {near(name, choices(group))}"
    found = (
        re.search(r"Could not override '([^']+)'", message)
        or re.search(r"full_key: ([\w.]+)", message)
        or re.search(r"Key '([^']+)' (?:is )?not in", message)
        or re.search(r"object has no attribute '([^']+)'", message)
    )
    if not found:
        return message
    wrong = found.group(1).lstrip("+~")
    keys, variant_keys = all_keys(), keys_of_variants()
    if wrong in keys:  # the key is right, its value is not
        return message
    if wrong in variant_keys:
        return f"{wrong} is a key of {variant_keys[wrong]} only: add {variant_keys[wrong]}, or leave it out"
    keys += variant_keys
    last = wrong.rpartition(".")[2]
    close = difflib.get_close_matches(wrong, keys, n=3, cutoff=0.6)
    close += [
        k
        for k in keys
        if k.rpartition(".")[2] in difflib.get_close_matches(last, {k.rpartition(".")[2] for k in keys}, 2, 0.7)
    ]
    names = list(dict.fromkeys(close))[:4]
    hint = "did you mean " + " or ".join(f"'{n}'" for n in names) + "?" if names else f"sections: {', '.join(SECTIONS)}"
    return f"{message}\n'{wrong}' is not a key of rlpost; {hint}"
