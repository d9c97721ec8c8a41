"""Schemas of the groups `trainer` and `cluster`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """How long, how often, where to."""

    name: str = "colocated"
    total_training_steps: int | None = None  # null: total_epochs decides
    total_epochs: int = 1
    critic_warmup: int = 0  # steps in which only the critic is trained
    val_before_train: bool = True
    test_freq: int = -1  # steps between validations; -1: only before and after
    save_freq: int = -1  # steps between checkpoints; -1: only at the end
    max_ckpt_to_keep: int | None = 3  # null: all
    export_hf: bool = True  # write a Hugging Face checkpoint at the end
    resume: str = "auto"  # auto, never, or the path of a checkpoint folder
    log_val_generations: int = 3  # sampled answers shown at each validation
    rollout_data_dir: str | None = None  # every rollout as JSONL, one file a step
    logprob_diff_limit: float | None = None  # null: 1e-3 in float32, 0.05 below; mean over a step's tokens, nats
    parity_probe_size: int = 16  # sequences of the probe where old logprobs are not recomputed
    profile_steps: list[int] = field(default_factory=list)  # whose training is traced, into <run folder>/profile

    def __post_init__(self) -> None:
        if self.name != "colocated":
            raise ValueError(f"trainer.name={self.name}: expected colocated")
        for key in ("total_training_steps", "total_epochs", "max_ckpt_to_keep", "parity_probe_size"):
            _at_least("trainer", key, getattr(self, key), 1)
        for key in ("critic_warmup", "log_val_generations"):
            _at_least("trainer", key, getattr(self, key), 0)
        if self.logprob_diff_limit is not None and not self.logprob_diff_limit > 0:
            raise ValueError(f"trainer.logprob_diff_limit={self.logprob_diff_limit}: must be > 0 nats, or null")


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Where Ray runs and how many trainer ranks there are."""

    address: str | None = None  # null: start Ray here; "auto" or an address joins a running cluster
    nnodes: int = 1
    n_gpus_per_node: int | None = None  # null: all that are visible; on CPU the number of trainer processes (default 1)
    ray_init_kwargs: dict[str, Any] = field(default_factory=dict)
    collective_timeout_s: float = 1800.0  # of the trainer's process group

    def __post_init__(self) -> None:
        for key in ("nnodes", "n_gpus_per_node", "collective_timeout_s"):
            _at_least("cluster", key, getattr(self, key), 1)


def _at_least(section: str, key: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{section}.{key}={value}: must be >= {least}")
