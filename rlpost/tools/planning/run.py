"""What is planned: a config, the hardware it is to run on, and what a config does not say (how long answers are)."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpost.config import Config, register, to_object
from rlpost.overrides import check_overrides, compose
from rlpost.registry import near
from rlpost.tools.planning.efficiency import DIVISORS, FIELDS, Efficiency
from rlpost.tools.planning.hardware import GPUS_PER_NODE, Device, device_of
from rlpost.tools.planning.shapes import Shape, known_shape, read_shape
from rlpost.trainer.build import build_algorithm, updates_per_step
from rlpost.trainer.config import AsyncTrainerConfig
from rlpost.workers.config import TrainRoleConfig
from rlpost.workers.dispatch import on_policy_rows
from rlpost.workers.model import MAKER, resolve_path
from rlpost.workers.placement import Pools

WIDTHS = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}  # bytes, on a GPU


@dataclass(slots=True, kw_only=True)
class Workload:
    """Keys of the command that neither config nor hardware has.

    Attributes:
        mean_length: sampled tokens an answer; None: half of data.max_response_length.
        prompt_tokens: of a prompt; None: half of data.max_prompt_length.
        tail: 99th percentile of the lengths over their mean, before the cut.
        keep_rate: share of the groups that dynamic sampling keeps.
    """

    mean_length: float | None = None
    prompt_tokens: int | None = None
    tail: float = 3.0
    keep_rate: float = 1.0


@dataclass(slots=True, kw_only=True)
class Run:
    """A run on hardware.

    Attributes:
        cfg: as it would be launched.
        device: each of the GPUs.
        shape: of actor, reference and critic.
        workload, efficiency: see there.
    """

    cfg: Config
    device: Device
    shape: Shape
    workload: Workload
    efficiency: Efficiency

    @property
    def is_async(self) -> bool:
        """Whether rollout and training run at the same time."""
        return isinstance(self.cfg.trainer, AsyncTrainerConfig)

    @property
    def pools(self) -> Pools:
        """How many devices train and roll out."""
        cluster, trainer = self.cfg.cluster, self.cfg.trainer
        assert cluster.n_gpus_per_node is not None
        if not isinstance(trainer, AsyncTrainerConfig) or trainer.share_gpus:
            return Pools.colocated(cluster.nnodes, cluster.n_gpus_per_node)
        return Pools.disjoint(
            cluster.nnodes, cluster.n_gpus_per_node, trainer.train_gpus, trainer.rollout_gpus, limited=True
        )

    @property
    def takes_turns(self) -> bool:
        """Whether the engines sleep while the trainer works."""
        return not self.is_async and self.cfg.rollout.free_cache_engine

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the trained weights."""
        size = self.cfg.actor.fsdp.fsdp_size
        return self.pools.train if size == -1 else size

    @property
    def tensor_parallel(self) -> int:
        """Devices of one engine."""
        return self.cfg.rollout.tensor_model_parallel_size

    @property
    def engines_per_device(self) -> int:
        """Engines that share each device of rollout."""
        apart = self.pools.rollout // self.tensor_parallel
        return (self.cfg.rollout.num_replicas or apart) // apart

    @property
    def compiled(self) -> bool:
        """Whether the trainer's layers and head are compiled: on a GPU, unless the config says off."""
        return self.cfg.model.compile != "off"

    @property
    def train_width(self) -> int:
        """Bytes of the trainer's compute dtype."""
        return WIDTHS[self.cfg.actor.dtype]

    @property
    def engine_width(self) -> int:
        """Bytes of the engine's dtype."""
        return WIDTHS[self.cfg.rollout.dtype]

    @property
    def kernel(self) -> str:
        """How attention keeps keys; see `activations.attention_bytes`."""
        if self.cfg.model.attn_implementation == "sdpa" or self.train_width == 4:
            return "sdpa"
        varlen = self.cfg.model.attn_implementation in ("auto", "varlen")
        return "repeated" if varlen and not self.device.groups_keys else "grouped"

    @property
    def mean_length(self) -> float:
        """Sampled tokens of an answer."""
        return self.workload.mean_length or max(1.0, self.cfg.data.max_response_length / 2)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.workload.prompt_tokens or max(1, self.cfg.data.max_prompt_length // 2)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.cfg.data.max_prompt_length + self.cfg.data.max_response_length

    @property
    def rows(self) -> int:
        """Answers that a step trains."""
        return self.cfg.data.train_batch_size * self.cfg.rollout.n

    @property
    def tokens(self) -> float:
        """Prompt and sampled tokens that a step trains."""
        return self.rows * (self.prompt_tokens + self.mean_length)

    @property
    def wanted(self) -> float:
        """Share of them whose logprob is asked for."""
        return self.mean_length / (self.prompt_tokens + self.mean_length)

    @property
    def updates(self) -> int:
        """Optimizer updates of the actor in a step."""
        return updates_per_step(self.cfg.actor, self.cfg.data.train_batch_size)

    @property
    def inferred(self) -> dict[str, float]:
        """Columns that are inferred before training, and the share of a step's rows for which they are."""
        groups = self.cfg.data.train_batch_size
        on_policy = on_policy_rows(torch.arange(groups), self.cfg.actor, self.cfg.seed)
        needs = build_algorithm(self.cfg).needs(groups, on_policy)
        return {column: len(rows) / groups for column, rows in needs.items() if rows}

    @property
    def adapter_parameters(self) -> int:
        """Trained parameters with LoRA on all linear layers; 0 without."""
        shape, rank = self.shape, self.cfg.model.lora_rank
        attention = 2 * (shape.hidden + shape.query_size) + 2 * (shape.hidden + shape.key_size)
        return rank * shape.layers * (attention + 3 * (shape.hidden + shape.intermediate))

    def micro_batch(self, role: TrainRoleConfig) -> tuple[int, float]:
        """Tokens of the largest micro-batch on one rank, and how many micro-batches an update of mean lengths has."""
        ranks = self.pools.train // role.ulysses_sequence_parallel_size
        rows = max(1.0, role.ppo_mini_batch_size * self.cfg.rollout.n / ranks)
        budget = role.ppo_max_token_len_per_gpu
        largest = min(budget, rows * self.longest / role.ulysses_sequence_parallel_size)
        mean = rows * (self.prompt_tokens + self.mean_length) / role.ulysses_sequence_parallel_size
        return int(largest), max(1.0, -(-mean // budget))

    def checked(self) -> "Run":
        """This run, if its devices can be divided as it says.

        Raises:
            ValueError: pools, shards or engines that do not fit the number of devices.
        """
        pools = self.pools
        pools.check_engines(self.tensor_parallel, self.cfg.rollout.num_replicas)
        if self.tensor_parallel > GPUS_PER_NODE:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={self.tensor_parallel}: an engine's devices share a host, which "
                f"has {GPUS_PER_NODE}"
            )
        sequence = self.cfg.actor.ulysses_sequence_parallel_size
        for key, size in (("actor.fsdp.fsdp_size", self.shards), ("actor.ulysses_sequence_parallel_size", sequence)):
            if pools.train % size:
                raise ValueError(f"{key}={size} does not divide the {pools.train} trainer ranks")
        return self


PLAN_KEYS: dict[str, str] = {
    "hardware": "the accelerator: h200, mi300x, mi350x, ...",
    "num_gpus": "of them, over all hosts; null: cluster.nnodes x cluster.n_gpus_per_node, or 8",
    "shape": "the model by name or folder; null: model.path",
    **{field.name: "of the workload" for field in dataclasses.fields(Workload)},
    **{name: "of the model of time and memory" for name in FIELDS},
}


def read_run(words: Sequence[str]) -> Run:
    """The run that the words of a command line mean: keys of the plan, and overrides of the config.

    Raises:
        ValueError: words that the run itself would refuse, or a model, hardware or number that is not known.
    """
    stated: dict[str, str] = {}
    overrides: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in PLAN_KEYS:
            stated[key] = value
        elif equals:
            overrides.append(word)
        else:
            raise ValueError(f"'{word}': expected key=value; {near(word, PLAN_KEYS)}")
    register()
    if problems := check_overrides(overrides):
        raise ValueError(problems)
    cfg = to_object(compose(overrides)[0])
    count = stated.pop("num_gpus", None)
    set_devices(cfg, None if count is None else _number("num_gpus", count, int))
    run = Run(
        cfg=cfg,
        device=device_of(stated.pop("hardware", "h200")),
        shape=_shape(cfg, stated.pop("shape", None)),
        workload=_typed(Workload, {key: stated.pop(key) for key in list(stated) if key not in FIELDS}),
        efficiency=_typed(Efficiency, stated),
    )
    for key, limit in (("mean_length", "max_response_length"), ("prompt_tokens", "max_prompt_length")):
        stated_tokens, most = getattr(run.workload, key), getattr(cfg.data, limit)
        if stated_tokens is not None and stated_tokens < 1:
            raise ValueError(f"{key}={stated_tokens:g}: must be >= 1")
        if getattr(run, key) > most:
            raise ValueError(f"{key}={getattr(run, key):g} exceeds data.{limit}={most}")
    return run.checked()


def set_devices(cfg: Config, num_gpus: int | None) -> None:
    """Let the cluster have `num_gpus`, or what the config says.

    Raises:
        ValueError: a number that hosts of 8 cannot hold evenly.
    """
    trainer = cfg.trainer
    if num_gpus is None and cfg.cluster.n_gpus_per_node is None:
        pools = (trainer.train_gpus, trainer.rollout_gpus) if isinstance(trainer, AsyncTrainerConfig) else (None, None)
        num_gpus = pools[0] + pools[1] if pools[0] and pools[1] else GPUS_PER_NODE * cfg.cluster.nnodes
    if num_gpus is not None:
        nodes = max(1, -(-num_gpus // GPUS_PER_NODE))
        if num_gpus < 1 or num_gpus % nodes:
            raise ValueError(f"num_gpus={num_gpus}: must be >= 1, and fill hosts of {GPUS_PER_NODE} or fewer alike")
        cfg.cluster.nnodes, cfg.cluster.n_gpus_per_node = nodes, num_gpus // nodes


def _shape(cfg: Config, named: str | None) -> Shape:
    """Of `shape=`, or of model.path; a checkpoint that a maker writes is made."""
    if named is not None:
        return read_shape(named)
    path = cfg.model.path
    if path.startswith(MAKER):
        if (shape := known_shape("smollm2-135m")) is not None and path.endswith("make_smollm2"):
            return shape
        path = str(resolve_path(path, Path(cfg.cache_dir).expanduser(), cfg.seed))
    return read_shape(path)


def _typed(kind: Any, values: dict[str, str]) -> Any:
    """`kind` with `values` converted to the types of its fields."""
    defaults = kind()
    typed = {}
    for key, value in values.items():
        wanted = type(getattr(defaults, key)) if getattr(defaults, key) is not None else float
        wanted = int if key == "prompt_tokens" else wanted
        typed[key] = _number(key, value, wanted)
        if key in DIVISORS and typed[key] == 0:
            raise ValueError(f"{key}={value}: must be > 0")
    return kind(**typed)


def _number(key: str, value: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        number = kind(value)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{key}={value}: expected {kind.__name__}") from error
    if not 0 <= number < math.inf:
        raise ValueError(f"{key}={value}: must be >= 0, and finite")
    return number
