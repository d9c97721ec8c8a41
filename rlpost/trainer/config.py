"""Schemas of the groups `trainer` and `cluster`."""

from dataclasses import dataclass, field
from typing import Any

from rlpost.problems import refuse
from rlpost.trainer.limits import Limits, OnStale

COLLECTIVE_MARGIN_S = 60.0  # the watchdog, which can say more, comes before the process group's own limit
NEVER_S = 365.0 * 86400.0  # process groups know no "never"


@dataclass(slots=True, kw_only=True)
class TimeoutsConfig:
    """Seconds that a phase may take without any progress before the run ends with a report; null: no limit."""

    start_s: float | None = 3600.0  # downloads, engines and trainer ranks; until the first probe
    generate_s: float | None = 3600.0  # from one finished group to the next, rewards included
    infer_s: float | None = 1800.0  # a micro-batch
    train_s: float | None = 1800.0  # a micro-batch, or an optimizer update
    publish_s: float | None = 1800.0  # a bucket of weights
    validate_s: float | None = 3600.0  # from one finished group to the next
    save_s: float | None = 1800.0  # writing or reading a checkpoint
    driver_s: float | None = 900.0  # the driver by itself between those: advantages, trackers, closing

    def __post_init__(self) -> None:
        for key, value in self.by_phase().items():
            if value is not None and not value > 0:
                refuse(f"trainer.timeouts.{key}_s={value}: must be > 0 seconds, or null for no limit")

    def by_phase(self) -> dict[str, float | None]:
        """Phase -> limit."""
        return {key.removesuffix("_s"): getattr(self, key) for key in self.__slots__}

    @property
    def collective_s(self) -> float:
        """Limit of the trainer's process group (gloo, NCCL, RCCL): a little more than any phase with collectives."""
        phases = (self.start_s, self.infer_s, self.train_s, self.publish_s, self.save_s)
        return max(NEVER_S if limit is None else limit for limit in phases) + COLLECTIVE_MARGIN_S

    def within_publish(self, limit_s: float) -> float:
        """`limit_s` for one bucket of weights, so that a replica is given up and replaced before the run is."""
        return limit_s if self.publish_s is None else min(limit_s, self.publish_s / 3)


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """How long, how often, where to."""

    name: str = "colocated"  # choose by the group, trainer=fully_async
    total_training_steps: int | None = None  # null: total_epochs decides
    total_epochs: int = 1  # passes over the data; total_training_steps goes before it
    critic_warmup: int = 0  # steps in which only the critic is trained
    val_before_train: bool = True  # validate before the first step
    test_freq: int = -1  # steps between validations; -1: only before and after
    save_freq: int = -1  # steps between checkpoints; -1: only at the end
    max_ckpt_to_keep: int | None = 3  # null: all
    export_hf: bool = True  # write a Hugging Face checkpoint at the end
    resume: str = "auto"  # auto, never, or the path of a checkpoint folder
    log_val_generations: int = 3  # sampled answers shown at each validation
    rollout_data_dir: str | None = None  # every rollout as JSONL, one file a step; relative: below the run folder
    logprob_diff_limit: float | None = None  # mean over tokens, nats; null: 1e-3 float32, 0.01 float16, 0.05 bfloat16
    parity_probe_size: int = 16  # sequences of the probe where old logprobs are not recomputed
    parity_probe_freq: int = 10  # steps without a token of the trainer's own version (async) before it is used again
    profile_steps: list[int] = field(default_factory=list)  # whose training is traced, into <run folder>/profile
    on_nonfinite: str = "stop"  # or skip: what a NaN or infinity in logprobs, rewards, loss or gradient does to a step
    max_skipped_steps: int = 3  # in a row, after which the run stops all the same
    max_replays_to_keep: int | None = 3  # replay bundles of skipped steps, the newest; null: all
    save_replay_steps: list[int] = field(default_factory=list)  # kept as replay bundles, in <run folder>/replay
    timeline: bool = False  # every process writes down its phases, for `rlpost.tools.timeline`; see docs/tools.md
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    grace_period_s: float | None = 25.0  # from SIGTERM to the checkpoint after the step; null: no limit

    def __post_init__(self) -> None:
        if self.name != self._name():
            refuse(f"trainer.name={self.name}: choose with trainer={self.name}, not by its name")
        least_1 = ("total_training_steps", "total_epochs", "max_ckpt_to_keep", "parity_probe_size", "parity_probe_freq")
        for key in least_1:
            _at_least("trainer", key, getattr(self, key), 1)
        for key in ("critic_warmup", "log_val_generations"):
            _at_least("trainer", key, getattr(self, key), 0)
        if self.logprob_diff_limit is not None and not self.logprob_diff_limit > 0:
            refuse(f"trainer.logprob_diff_limit={self.logprob_diff_limit}: must be > 0 nats, or null")
        for key in ("test_freq", "save_freq"):
            if getattr(self, key) != -1:
                _at_least("trainer", key, getattr(self, key), 1)
        _at_least("trainer", "grace_period_s", self.grace_period_s, 0)
        for key in ("profile_steps", "save_replay_steps"):
            self._check_steps(key, getattr(self, key))
        for key in ("max_skipped_steps", "max_replays_to_keep"):
            _at_least("trainer", key, getattr(self, key), 1)
        if self.on_nonfinite not in ("stop", "skip"):
            refuse(f"trainer.on_nonfinite={self.on_nonfinite}: expected one of stop, skip")

    def _check_steps(self, key: str, steps: list[int]) -> None:
        last = self.total_training_steps
        for step in steps:
            if step < 1 or (last is not None and step > last):
                refuse(
                    f"trainer.{key}={steps}: step {step} never comes, steps count from 1 to "
                    f"trainer.total_training_steps={last}"
                )

    @staticmethod
    def _name() -> str:
        return "colocated"


@dataclass(slots=True, kw_only=True)
class AsyncTrainerConfig(TrainerConfig):
    """Rollout and training at once; see docs/fully_async.md and `rlpost.trainer.buffer`."""

    name: str = "fully_async"
    rollout_gpus: int | None = None  # for engines; on CPU their number. null: with train_gpus null half of all GPUs
    train_gpus: int | None = None  # for trainer ranks; on CPU their number. null: all that rollout leaves
    share_gpus: bool = False  # both pools on the same GPUs, whose memory they divide
    staleness_threshold: float = 2.0  # share of a sync interval's groups that may be generated ahead
    max_staleness: int | None = None  # versions; null: what staleness_threshold implies
    on_stale: str = "wait"  # a group that would exceed it: wait (is not started yet), drop or abort (both reissue it)
    trigger_parameter_sync_step: int = 1  # training steps between weight syncs
    require_batches: int | None = None  # mini-batches a step: data.train_batch_size = this x actor.ppo_mini_batch_size
    partial_rollout: bool = True  # running requests go on after a sync; false: a sync waits for them
    max_concurrent_groups: int | None = None  # null: as many as may be in flight
    autobalance: bool = False  # adjust groups in flight and trigger_parameter_sync_step, within what is set here
    on_workflow_error: str = "stop"  # or skip: drop the group and count it
    sampler: str | None = None  # dotted path of a function(prompts) -> their positions in the order to issue
    sampler_window: int = 64  # prompts that it sees at once
    hook: str | None = None  # dotted path of an async function(prompts: PromptQueue) that runs beside the training

    def __post_init__(self) -> None:
        TrainerConfig.__post_init__(self)
        for key in ("rollout_gpus", "train_gpus", "trigger_parameter_sync_step", "require_batches"):
            _at_least("trainer", key, getattr(self, key), 1)
        for key in ("max_concurrent_groups", "sampler_window"):
            _at_least("trainer", key, getattr(self, key), 1)
        for key in ("staleness_threshold", "max_staleness"):
            _at_least("trainer", key, getattr(self, key), 0)
        for key, allowed in (("on_stale", ("wait", "drop", "abort")), ("on_workflow_error", ("stop", "skip"))):
            if getattr(self, key) not in allowed:
                refuse(f"trainer.{key}={getattr(self, key)}: expected one of {', '.join(allowed)}")

    def limits(self, groups_per_step: int) -> Limits:
        """What bounds the groups in flight.

        Raises:
            ValueError: a staleness that the sync interval cannot keep.
        """
        return Limits(
            groups_per_step=groups_per_step,
            sync_every=self.trigger_parameter_sync_step,
            staleness_threshold=self.staleness_threshold,
            max_staleness=self.max_staleness,
            on_stale=OnStale(self.on_stale),
            max_running=self.max_concurrent_groups,
        )

    @staticmethod
    def _name() -> str:
        return "fully_async"


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Where Ray runs and how many trainer ranks there are."""

    address: str | None = None  # null: start Ray here; "auto" or an address joins a running cluster
    nnodes: int = 1  # hosts
    n_gpus_per_node: int | None = None  # null: all that are visible; on CPU the number of trainer processes (default 1)
    ray_init_kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of ray.init

    def __post_init__(self) -> None:
        for key in ("nnodes", "n_gpus_per_node"):
            _at_least("cluster", key, getattr(self, key), 1)


def _at_least(section: str, key: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:  # also where it is not a number
        refuse(f"{section}.{key}={value}: must be >= {least}")
