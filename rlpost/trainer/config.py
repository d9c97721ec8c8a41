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
    profile_steps: list[int] = field(
        default_factory=list
    )  # torch profiler traces of these steps' training, below <run folder>/profile


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Where Ray runs and how many trainer ranks there are."""

    address: str | None = None  # null: start Ray here; "auto" or an address joins a running cluster
    nnodes: int = 1
    n_gpus_per_node: int | None = None  # null: all that are visible; on CPU the number of trainer processes (default 1)
    ray_init_kwargs: dict[str, Any] = field(default_factory=dict)
    collective_timeout_s: float = 1800.0  # of the trainer's process group
