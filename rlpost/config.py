"""The root schema, its registration with Hydra, and what to say of a key that is not in it. No torch, no ray."""

import copy
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.algos.config import AlgoConfig
from rlpost.data_config import DataConfig
from rlpost.problems import collecting, refuse
from rlpost.redact import redact_text
from rlpost.registry import near
from rlpost.rewards.config import RewardConfig
from rlpost.rules import cross
from rlpost.tracking.config import TrackingConfig
from rlpost.trainer.config import AsyncTrainerConfig, ClusterConfig, TrainerConfig
from rlpost.verl_keys import from_verl
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, RefConfig, RolloutConfig

PACKAGE = Path(__file__).parent
CONFIG_DIR = PACKAGE / "_config" if (PACKAGE / "_config").is_dir() else PACKAGE.parent / "config"


PARITY_GROUPS = 8  # of a step, on average: whose logprobs of the engine and of the trainer are compared


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
    seed: int = 1  # of everything that is random
    cache_dir: str = "~/.cache/rlpost"  # made checkpoints

    def __post_init__(self) -> None:
        if self.rollout.dtype == "auto":
            self.rollout.dtype = self.actor.dtype
        if isinstance(self.trainer, AsyncTrainerConfig):
            self.rollout.free_cache_engine = False  # none sleeps there
        if broken := list(cross.problems(self)):
            refuse("\n".join(broken))

    @property
    def logprobs_every(self) -> int:
        """`rollout.logprobs_every`, where null asks for what parity needs, or for all where a correction is on."""
        if self.rollout.logprobs_every is not None:
            return self.rollout.logprobs_every
        return 1 if self.algo.rollout_correction.is_on else max(1, self.data.train_batch_size // PARITY_GROUPS)


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


SCHEMAS = ("schema", "async_schema")  # what choices of a group are made of; the second for some of `trainer`


def register() -> None:
    """File the schemas with Hydra: `schema` in every group, `root_schema` the resolver `folder_name`."""
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    store = ConfigStore.instance()
    for name, schema in SECTIONS.items():
        store.store(group=name, name=SCHEMAS[0], node=schema)
    store.store(group="trainer", name=SCHEMAS[1], node=AsyncTrainerConfig)
    store.store(name="root_schema", node=Config)


def folder_name(text: str, max_length: int = 100) -> str:
    """A name for one folder from overrides that Hydra has joined by commas: sorted, without plus signs and secrets.

    Words that only make a reward term (see `rlpost.open_keys`) are left out; a name has its limit.
    """
    words = re.split(r",(?=\+{0,2}[\w./@]+=)", redact_text(text))
    kept = sorted(word.lstrip("+") for word in words if not re.search(r"=\{(\w+:\{\},?)+\}$", word))
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(kept))[:max_length]


def to_object(cfg: DictConfig) -> Config:
    """The typed config; every section's own checks and the rules of `rlpost.rules.cross` run here.

    Raises:
        ValueError: all that is wrong, a line each: key, value and fix.
    """
    try:
        typed, problems = typed_and_problems(cfg)
    except (OmegaConfBaseException, AttributeError) as error:
        raise ValueError(str(error)) from error
    if problems:
        raise ValueError("\n".join(problems))
    return typed


def typed_and_problems(cfg: DictConfig) -> tuple[Config, list[str]]:
    """The typed config, and everything that is wrong with its values.

    Raises:
        OmegaConfBaseException, AttributeError: what is not of the schema, such as `+key=...` beyond it.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    with collecting() as found:
        for key in missing:
            refuse(f"{key} has no value: set it on the command line ({key}=...) or in an experiment{_meant(cfg, key)}")
        typed = OmegaConf.to_object(_filled(cfg, missing))
    assert isinstance(typed, Config)
    return typed, list(dict.fromkeys(found))


def _meant(cfg: DictConfig, key: str) -> str:
    """The name that may be meant where `key` is of a reward term, say, of which nothing else may be known."""
    if (thing := named(key)) is None:
        return ""
    at, name, _ = thing
    close = difflib.get_close_matches(name, [str(other) for other in OmegaConf.select(cfg, at) if other != name], 1)
    return "".join(f"; or did you mean '{at}.{other}'?" for other in close)


def _filled(cfg: DictConfig, missing: list[str]) -> DictConfig:
    """A copy with a text for each missing value, so that the rest can be checked as well."""
    cfg = copy.deepcopy(cfg) if missing else cfg
    for key in missing:
        OmegaConf.update(cfg, key, "missing")
    return cfg


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


@functools.cache
def open_keys() -> dict[tuple[str, ...], Any]:
    """Path of each field that takes names of the user's, outer before inner -> the type of what has such a name.

    `*` in a path stands for such a name. A field of any type at all (`data.val_files`) has the value None.
    """
    found = dict(_walk(Config, ()))
    for group, variants in VARIANTS.items():
        for schema in variants.values():
            found |= _walk(schema, (group,))
    return found


def _walk(schema: type, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    hints = get_type_hints(schema)
    for declared in fields(schema):
        kind, path = hints[declared.name], (*at, declared.name)
        if kind is Any:
            yield path, None
        elif get_origin(kind) is dict:
            item = get_args(kind)[1]
            yield path, item
            if is_dataclass(item):
                assert isinstance(item, type)
                yield from _walk(item, (*path, "*"))
        elif is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _walk(kind, path)


def opened(key: str) -> dict[str, Any]:
    """Of `open_keys`, by dotted key, those that `key` is or lies below, outer first: `reward.terms`, say."""
    names = key.split(".")
    return {
        ".".join(names[: len(path)]): item
        for path, item in open_keys().items()
        if len(path) <= len(names) and all(p in ("*", name) for p, name in zip(path, names, strict=False))
    }


def named(key: str) -> tuple[str, str, type] | None:
    """Where `key` is or lies in a thing with a name of the user's, a reward term: key of the map, name, its schema."""
    for at, item in opened(key).items():
        if is_dataclass(item) and key != at:
            assert isinstance(item, type)
            return at, key.removeprefix(f"{at}.").partition(".")[0], item
    return None


def choices(group: str) -> list[str]:
    """What a config group offers, by the files below `config/`."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def explain_compose_error(message: str) -> str:
    """Hydra's or OmegaConf's message about an unknown key or choice, followed by the nearest known ones."""
    message = message.partition("\nConfig search path")[0]
    message = re.sub(r"\n\s*(reference|object)_type=.*", "", message)
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
    if (item := opened(wrong).get(wrong)) is not None:
        example = "NAME.KEY=VALUE" if is_dataclass(item) else "NAME=VALUE"
        return f"{message}\n{wrong} is a map of names: {wrong}.{example}"
    if thing := named(wrong):
        at, name, schema = thing
        keys = all_keys(schema, f"{at}.{name}.")
        if wrong == f"{at}.{name}":
            return f"{message}\n{wrong} is made of " + ", ".join(f"{key}=..." for key in keys)
    if wrong in keys:  # the key is right, its value is not
        return message
    if wrong in variant_keys:
        return f"{wrong} is a key of {variant_keys[wrong]} only: add {variant_keys[wrong]}, or leave it out"
    keys += variant_keys
    if known := from_verl(wrong):
        return known
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
