"""`ModelWorker`: one process of the trainer, holding actor, reference and critic of its device."""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from rlpost import heartbeat
from rlpost.batch import Batch
from rlpost.host import exported, free_port, host_address, host_id, settle
from rlpost.metrics import Metric, Metrics, Reduce, merge
from rlpost.platform import platform
from rlpost.workers.config import ActorConfig, CriticConfig, ModelConfig, RefConfig, TrainRoleConfig
from rlpost.workers.dispatch import InferWork, TrainWork
from rlpost.workers.engine.base import Output
from rlpost.workers.engine.fsdp import FSDPEngine
from rlpost.workers.growth import Growth
from rlpost.workers.model import ModelInfo
from rlpost.workers.weight_sync.bucket import Bucket, Tensors
from rlpost.workers.weight_sync.sender import Sender
from rlpost.workers.weight_sync.topology import Place

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class WorkerSetup:
    """What the trainer ranks are made of.

    Attributes:
        model: facts about the actor's checkpoint.
        model_cfg: the `model` section.
        actor: its section.
        ref: the `ref` section, None without a reference. `path` must be a local folder or null.
        critic: the `critic` section, None without a critic. `path` must be a local folder or null.
        temperature: of the rollout.
        total_updates: optimizer updates of the run for each trained role, for learning rates that decay.
        seed: of the run.
    """

    model: ModelInfo
    model_cfg: ModelConfig
    actor: ActorConfig
    ref: RefConfig | None = None
    critic: CriticConfig | None = None
    temperature: float = 1.0
    total_updates: dict[str, int] = field(default_factory=dict)
    seed: int = 0

    @property
    def has_own_ref(self) -> bool:
        """False where the reference is the actor without its LoRA."""
        return self.ref is not None and (self.model_cfg.lora_rank == 0 or self.ref.path is not None)

    def role_config(self, role: str) -> TrainRoleConfig:
        """The section that sizes a role's passes; the reference follows the actor."""
        cfg = self.critic if role == "critic" else self.actor
        assert cfg is not None
        return cfg

    def budget(self, role: str) -> tuple[int, str]:
        """Tokens of a micro-batch over its sequence group, and the key that sets it."""
        cfg = self.role_config(role)
        tokens, key = (
            cfg.ppo_max_token_len_per_gpu,
            f"{'critic' if role == 'critic' else 'actor'}.ppo_max_token_len_per_gpu",
        )
        if role == "ref" and self.ref is not None and self.ref.log_prob_max_token_len_per_gpu is not None:
            tokens, key = self.ref.log_prob_max_token_len_per_gpu, "ref.log_prob_max_token_len_per_gpu"
        return tokens * cfg.ulysses_sequence_parallel_size, key


class Objective(Protocol):
    """What `train` needs of an `Algorithm` or a `CustomLoss`."""

    def policy_loss(self, micro: Batch, output: Output) -> tuple[Tensor, Metrics]: ...

    def value_loss(self, micro: Batch, output: Output) -> tuple[Tensor, Metrics]: ...


class OutOfDeviceMemory(RuntimeError):
    """A trainer rank ran out of device memory; the message names the phase and the keys to lower."""


def _explain_oom(method: Callable) -> Callable:
    """Turn the allocator's error into advice; every other error passes as it is."""

    @functools.wraps(method)
    def wrapped(self: "ModelWorker", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            phase = " ".join([method.__name__, *(a for a in args if isinstance(a, str))])
            raise OutOfDeviceMemory(
                f"rank {self.rank} ran out of device memory in '{phase}': {error}\n"
                "Lower actor.ppo_max_token_len_per_gpu (or the critic's) or rollout.gpu_memory_utilization; or set "
                "model.enable_gradient_checkpointing=true, actor.fsdp.param_offload=true and "
                "actor.fsdp.optimizer_offload=true. What fits: python -m rlpost.tools.plan, with the same overrides"
            ) from error

    return wrapped


class ModelWorker:
    """Rank `rank` of `world_size`. A plain class: `group.py` makes a Ray actor of it.

    Methods are collective: all ranks are called alike.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        heartbeat.start(exported().get(heartbeat.VARIABLE), f"rank {rank}")
        self.engines: dict[str, FSDPEngine] = {}
        self._sender: Sender | None = None
        self._profiler: torch.profiler.profile | None = None
        self._settled = False
        self._growth: defaultdict[str, Growth] = defaultdict(Growth)  # by role

    # --- life ---

    def rendezvous(self) -> str:
        """`tcp://host:port` on this rank's host, for the process group; asked of rank 0."""
        return f"tcp://{host_address()}:{free_port()}"

    @heartbeat.during("start")
    def connect(self, init_method: str, timeout_s: float) -> None:
        """Join the trainer's process group."""
        platform().set_device(0)
        transformers.utils.logging.set_verbosity_error()  # it warns of a new value head; what matters is checked
        transformers.utils.logging.disable_progress_bar()
        dist.init_process_group(
            platform().collective_backend,
            init_method=init_method,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    @_explain_oom
    @heartbeat.during("start")
    def build(self, setup: WorkerSetup) -> None:
        """Load the engines of all roles."""
        self.setup = setup
        self.engines = {"actor": self._engine("actor", setup.model.path)}
        if setup.has_own_ref:
            assert setup.ref is not None
            self.engines["ref"] = self._engine("ref", setup.ref.path or setup.model.path)
            if self._reference_rests:
                self.engines["ref"].to("cpu")
        if setup.critic is not None:
            self.engines["critic"] = self._engine("critic", setup.critic.path or setup.model.path)
        settle()
        platform().empty_cache()

    def _engine(self, role: str, path: str) -> FSDPEngine:
        setup = self.setup
        model_cfg = setup.model_cfg
        if role != "actor":
            model_cfg = ModelConfig(**{n: getattr(model_cfg, n) for n in ModelConfig.__slots__} | {"lora_rank": 0})
        return FSDPEngine(
            path,
            model_cfg,
            setup.role_config(role),
            vocab_size=setup.model.vocab_size,
            temperature=setup.temperature,
            tokenizer_path=setup.model.tokenizer_path,
            critic=role == "critic",
            train=role != "ref",
            total_updates=setup.total_updates.get(role),
            seed=setup.seed,
        )

    def shutdown(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- passes ---

    @_explain_oom
    @heartbeat.during("infer")
    def infer(self, role: str, work: InferWork, temperature: float | None = None) -> Tensor | None:
        """Logprobs (actor, ref) or values (critic) of the work's rows, float32 `[N]` on the host; None on ranks that do
        not lead their sequence group."""
        name = "actor" if role == "ref" and not self.setup.has_own_ref else role
        engine = self.engines[name]
        micro_batches = [work.rows.select(rows) for rows in work.micro_batches]
        with self._reference_awake(name):
            outputs = engine.forward(micro_batches, temperature=temperature, adapter=role != "ref")
        if not engine.parallel.leads_sequence:
            return None
        result = torch.empty(work.rows.num_tokens)
        offsets, lengths = work.rows.cu_seqlens.tolist(), work.rows.seqlens.tolist()
        for rows, output in zip(work.micro_batches, outputs, strict=True):
            column = output.values if role == "critic" else output.logprobs
            assert column is not None
            for row, part in zip(rows, column.split([lengths[r] for r in rows]), strict=True):
                result[offsets[row] : offsets[row] + lengths[row]] = part
        return result

    @_explain_oom
    @heartbeat.during("train")
    def train(self, role: str, work: TrainWork, objective: Objective) -> Metrics:
        """All optimizer updates of the work, up to the first that is not finite; metrics under `<role>/`.

        Weights are then those that this update began with, on all ranks: the rest of the step is not trained.
        """
        platform().reset_peak_memory()
        held = platform().held_memory_bytes()
        if wrong := self._growth[role].look(held):
            logger.warning("%s: %s", role, wrong)  # without the rank, so that the driver tells it once for all alike
        engine = self.engines[role]
        loss = objective.value_loss if role == "critic" else objective.policy_loss
        parts: list[Metrics] = []
        for step in work.steps:
            parts.append(engine.train_step(work.micro_batches(step), loss))
            if engine.skipped:
                break
        metrics = merge(parts)
        if not self._settled:
            settle()  # what compilation has made stays as well
            self._settled = True
        named = {name if "/" in name else f"{role}/{name}": metric for name, metric in metrics.items()}
        peak = platform().peak_memory_bytes() / 2**30
        return named | {
            "perf/max_memory_reserved_gb": Metric(peak, reduce=Reduce.MAX),
            "perf/memory_at_rest_gb": Metric(held / 2**30, reduce=Reduce.MAX),
        }

    # --- memory ---

    @heartbeat.during("memory")
    def offload(self, params: bool, optimizer: bool) -> None:
        """Move to the host what each role's `fsdp.param_offload` and `fsdp.optimizer_offload` allow."""
        for role in ("actor", "critic"):
            if role in self.engines:
                cfg = self.setup.role_config(role).fsdp
                self.engines[role].to(
                    "cpu", params=params and cfg.param_offload, optimizer=optimizer and cfg.optimizer_offload
                )
        platform().empty_cache()

    @_explain_oom
    @heartbeat.during("memory")
    def reload(self) -> None:
        """Bring everything that trains back to the device."""
        for role in ("actor", "critic"):
            if role in self.engines:
                cfg = self.setup.role_config(role).fsdp
                self.engines[role].to("device", params=cfg.param_offload, optimizer=cfg.optimizer_offload)

    @property
    def _reference_rests(self) -> bool:
        """Whether the reference is in host memory while it is not asked."""
        return self.setup.ref is not None and self.setup.ref.param_offload

    @contextmanager
    def _reference_awake(self, name: str):
        rests = name == "ref" and self._reference_rests
        if rests:
            self.engines["ref"].to("device")
        yield
        if rests:
            self.engines["ref"].to("cpu")

    # --- weights to the rollout ---

    def place(self) -> Place:
        """Where this rank holds its weights."""
        return Place(host_id(), (platform().device_uuid(),))

    @heartbeat.during("publish")
    def open_sender(
        self, transport: str, dtype: str, bucket_bytes: int, readers: dict[str, int], timeout_s: float
    ) -> None:
        """Choose how the actor's weights leave this rank, for all updates to come; see `Sender`.

        `readers` counts the processes that receive, by the uuid of their device.
        """
        maps = transport == "ipc"  # then a rank serves the readers of its own device
        num_readers = readers.get(platform().device_uuid(), 0) if maps else sum(readers.values())
        if self._sender is not None:
            self._sender.abandon()
        self._sender = Sender(
            transport, self.engines["actor"], getattr(torch, dtype), bucket_bytes, num_readers, timeout_s
        )

    @_explain_oom
    @heartbeat.during("publish")
    def weight_manifest(self) -> Tensors:
        """What an update brings: name -> (shape, dtype name)."""
        assert self._sender is not None, "open_sender first"
        return self._sender.manifest()

    @_explain_oom
    @heartbeat.during("publish")
    def next_bucket(self) -> Bucket | None:
        """The next bucket as its transport sends it, None after the last."""
        assert self._sender is not None, "open_sender first"
        return self._sender.next_bucket()

    @heartbeat.during("publish")
    def close_sender(self) -> int | None:
        """End an update; the digest of what was sent, where this rank sends."""
        assert self._sender is not None, "open_sender first"
        return self._sender.close()

    # --- state ---

    @heartbeat.during("save")
    def save(self, folder: Path) -> dict[str, str]:
        """Sharded state of every trained role, one folder each; digests of the files that this rank wrote, by name."""
        digests: dict[str, str] = {}
        for role in ("actor", "critic"):
            if role in self.engines:
                of_role = self.engines[role].save(Path(folder) / role)
                digests |= {f"{role}/{name}": digest for name, digest in of_role.items()}
        return digests

    @_explain_oom
    @heartbeat.during("save")
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        for role in ("actor", "critic"):
            if role in self.engines:
                self.engines[role].load(Path(folder) / role)

    @_explain_oom
    @heartbeat.during("save")
    def export_hf(self, folder: Path, role: str = "actor") -> None:
        """Write a role as a Hugging Face checkpoint."""
        self.engines[role].export_hf(Path(folder))

    # --- looking in ---

    @torch.no_grad()
    def scale_weights(self, factor: float) -> None:
        """Multiply every weight of the actor, so that the engine's are clearly stale; `rlpost.tools.check` does so."""
        for parameter in self.engines["actor"].model.parameters():
            parameter.mul_(factor)

    def peak_memory_bytes(self) -> int:
        """Peak device memory reserved since the last training pass began."""
        return platform().peak_memory_bytes()

    def start_profile(self) -> None:
        """Begin a torch profile."""
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def stop_profile(self, folder: Path) -> None:
        """End it and write a Chrome trace, `<folder>/rank<rank>.json.gz`."""
        assert self._profiler is not None, "stop_profile without start_profile"
        self._profiler.stop()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / f"rank{self.rank}.json.gz"))
        self._profiler = None
