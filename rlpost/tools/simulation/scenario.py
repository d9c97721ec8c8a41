"""What is simulated: devices, workload, what things cost, and how rollout and training are scheduled."""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

from rlpost.registry import near
from rlpost.trainer.limits import Limits, OnStale

DELIVERIES = ("issued", "bounded", "finished")


@dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """One run. A *batch* is what a colocated step trains; times are reported per batch, whatever the async steps are.

    Raises:
        ValueError: a value out of its range, or settings that do not fit together.
    """

    # devices
    devices: float = 32
    rollout_share: float = 0.5  # of the devices, async; the others train
    devices_per_replica: float = 4  # an engine on fewer than these is slower in proportion
    slots: int = 256  # sequences that a replica decodes at once (rollout.max_num_seqs)
    # workload
    batch: int = 512  # groups
    batch_devices: float | None = None  # so many devices train `batch`, others in proportion; null: all the same batch
    n: int = 16  # answers a group
    prompt_tokens: int = 150
    mean_length: float = 890.0  # sampled tokens an answer
    grow_to: float | None = None  # mean length at the end of the run, reached linearly; null: it stays
    tail: float = 4.0  # 99th percentile of the lengths over their mean, before the cut
    max_length: int = 28672  # data.max_response_length
    lengths: str | None = None  # recorded instead: folder of trainer.rollout_data_dir
    keep_rate: float = 1.0  # share of the groups that dynamic sampling keeps
    # what things take; device-seconds are divided by the devices at work
    decode_step_s: float = 0.02  # of a replica, however many sequences
    decode_sequence_s: float = 1e-4  # and for each sequence of its batch
    device_step_s: float = 0.0  # of its device, where that takes longer than those two, which are then the host's
    device_sequence_s: float = 0.0
    prefill_token_s: float = 5e-6  # of a replica, for each prompt token
    infer_token_s: float = 1e-4  # device-seconds of inference (old logprobs) for each token trained, if not of all
    train_token_s: float = 3e-4  # device-seconds
    update_s: float = 0.0  # of each optimizer update, however many devices
    updates: int = 16  # optimizer updates a batch
    sync_s: float = 1.0  # of each weight sync, and
    weight_bytes: float = 15e9
    sync_bytes_per_s: float = 10e9
    move_s: float = 0.0  # a colocated step: memory from the trainer to the engine and back
    # asynchronous training; names as in `trainer`
    steps_per_batch: int = 4  # training steps that a batch is divided into
    trigger_parameter_sync_step: int = 4
    staleness_threshold: float = 0.5
    max_staleness: int | None = None
    on_stale: str = "wait"
    partial_rollout: bool = True
    max_concurrent_groups: int | None = None
    recompute_logprobs: bool = True  # async training infers old logprobs, as colocated training does
    autobalance: bool = False
    delivery: str = "issued"  # what if: see `delivery.py`
    # how much is simulated
    batches: int = 8  # measured
    warmup: int = 3  # before those
    seed: int = 1

    def __post_init__(self) -> None:
        positive = ("devices", "devices_per_replica", "slots", "batch", "n", "mean_length", "tail", "max_length")
        optional = tuple(key for key in ("batch_devices", "grow_to") if getattr(self, key) is not None)
        for key in (*positive, *optional, "sync_bytes_per_s", "steps_per_batch", "updates", "batches"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key}={getattr(self, key)}: must be > 0, and finite")
        for key in (field.name for field in dataclasses.fields(self) if field.name.endswith("_s")):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"{key}={getattr(self, key)}: must be >= 0 seconds, and finite")
        for key in ("prompt_tokens", "weight_bytes", "warmup", "seed", "staleness_threshold"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"{key}={getattr(self, key)}: must be >= 0, and finite")
        for key in ("trigger_parameter_sync_step", "max_concurrent_groups"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be >= 1")
        for key in ("rollout_share", "keep_rate"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be > 0 and <= 1")
        if self.decode_step_s + self.decode_sequence_s + self.device_step_s + self.device_sequence_s == 0:
            raise ValueError(
                "decode_step_s=0 and decode_sequence_s=0, and no device_step_s or device_sequence_s: sampling takes no "
                "time; set one of them"
            )
        if self.rollout_share == 1.0:
            raise ValueError("rollout_share=1: leaves no device to train on")
        for key, known in (("delivery", DELIVERIES), ("on_stale", tuple(OnStale))):
            if getattr(self, key) not in known:
                raise ValueError(f"{key}={getattr(self, key)}: expected one of {', '.join(known)}")
        if self.batch % self.steps_per_batch:
            raise ValueError(f"batch={self.batch} is not divisible by steps_per_batch={self.steps_per_batch}")
        _ = self.limits

    @property
    def rollout_devices(self) -> float:
        """Devices of the async run's engines."""
        return self.devices * self.rollout_share

    @property
    def groups(self) -> int:
        """Groups of a batch."""
        return self.groups_per_step * self.steps_per_batch

    @property
    def groups_per_step(self) -> int:
        """Groups that an async step trains."""
        scale = 1.0 if self.batch_devices is None else self.devices / self.batch_devices
        return max(1, round(self.batch * scale / self.steps_per_batch))

    @property
    def limits(self) -> Limits:
        """Of the async run's buffer."""
        return Limits(
            groups_per_step=self.groups_per_step,
            sync_every=self.trigger_parameter_sync_step,
            staleness_threshold=self.staleness_threshold,
            max_staleness=self.max_staleness,
            on_stale=OnStale(self.on_stale),
            max_running=self.max_concurrent_groups,
        )

    def replicas(self, devices: float) -> tuple[int, float]:
        """How many engines `devices` hold, and how fast each is (1: as `decode_step_s` says)."""
        return max(1, int(devices / self.devices_per_replica + 1e-9)), min(1.0, devices / self.devices_per_replica)

    def training_s(self, tokens: int, share_of_batch: float, devices: float, infers: bool) -> float:
        """Seconds that `devices` need to train `tokens`, `share_of_batch` of a batch's updates."""
        token_s = self.train_token_s + (self.infer_token_s if infers else 0.0)
        return tokens * token_s / devices + self.update_s * self.updates * share_of_batch

    @property
    def push_s(self) -> float:
        """Seconds of one weight sync."""
        return self.sync_s + self.weight_bytes / self.sync_bytes_per_s


def read_scenario(path: Path | None, overrides: Iterable[str] = ()) -> tuple[dict[str, list[Any]], list[Scenario]]:
    """The keys that are swept with their values, and every scenario of the sweep.

    Args:
        path: JSON object of keys of `Scenario`; None: its defaults.
        overrides: `key=value`, or `key=value,value,...` for a sweep; several sweeps multiply.

    Raises:
        ValueError: an unknown key or a value that is not of the key's type.
    """
    values = {key: [_value(key, value)] for key, value in _read(path).items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"'{override}': expected key=value, or key=value,value,... for a sweep")
        values.pop(key, None)  # sweeps come in the order of the command line
        values[key] = [_value(key, part) for part in text.split(",")]
    swept = {key: several for key, several in values.items() if len(several) > 1}
    scenarios = [Scenario(**dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]
    return swept, scenarios


def _read(path: Path | None) -> dict[str, Any]:
    """The JSON object at `path`."""
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no scenario: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no scenario: expected a JSON object of keys and values")
    return found


def _value(key: str, value: Any) -> Any:
    hints = get_type_hints(Scenario)
    if key not in hints:
        raise ValueError(f"'{key}' is no key of a scenario; {near(key, hints)}")
    kinds = getattr(hints[key], "__args__", (hints[key],))
    kind = next(t for t in kinds if t is not type(None))
    if value is None or value in ("null", ""):
        if len(kinds) == 1:
            raise ValueError(f"{key}=null: expected {kind.__name__}")
        return None
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        return kind(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{key}={value}: expected {kind.__name__}") from error
