"""Schemas of the groups `model`, `actor`, `critic`, `ref` and `rollout`. Names follow verl; no torch, no ray here."""

from dataclasses import dataclass, field
from typing import Any

from rlpost.aiter import FAMILIES as AITER_FAMILIES


def _switch(key: str, value: str) -> str:
    """auto, on or off; YAML reads a bare on or off as a truth value."""
    value = {"True": "on", "False": "off", "true": "on", "false": "off"}.get(str(value), str(value))
    _one_of(key, value, ("auto", "on", "off"))
    return value


def _one_of(key: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value}: expected one of {', '.join(str(a) for a in allowed)}")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ValueError(f"{key}={value}: must be >= {least}")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """What is trained: a Hugging Face checkpoint, its tokenizer, and LoRA."""

    path: str = "???"  # folder, hub id, or `maker:<dotted path>` of a function(folder) that writes a checkpoint
    tokenizer_path: str | None = None  # null: as `path`
    trust_remote_code: bool = False
    chat_template: str | None = None  # a Jinja template, overrides the tokenizer's
    attn_implementation: str = "auto"  # auto, varlen, flash_attention_2, flash_attention_3, sdpa
    enable_gradient_checkpointing: bool = False
    lora_rank: int = 0  # 0: full fine-tuning
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    override_config: dict[str, Any] = field(default_factory=dict)  # fields of the model's own config

    def __post_init__(self) -> None:
        _at_least("model.lora_rank", self.lora_rank, 0)
        _one_of(
            "model.attn_implementation",
            self.attn_implementation,
            ("auto", "varlen", "flash_attention_2", "flash_attention_3", "sdpa"),
        )


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule; steps are optimizer updates."""

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    lr_warmup_steps: int = 0
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0  # floor of linear and cosine decay, as a fraction of lr

    def __post_init__(self) -> None:
        _one_of("optim.lr_scheduler_type", self.lr_scheduler_type, ("constant", "linear", "cosine"))
        if self.lr <= 0:
            raise ValueError(f"optim.lr={self.lr}: must be > 0")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas}: expected two numbers in [0, 1)")
        _at_least("optim.lr_warmup_steps", self.lr_warmup_steps, 0)


@dataclass(slots=True, kw_only=True)
class FSDPConfig:
    """FSDP2 (`fully_shard`)."""

    param_offload: bool = False  # parameters to host memory while generating
    optimizer_offload: bool = False  # optimizer state to host memory while generating
    reshard_after_forward: bool = True
    fsdp_size: int = -1  # ranks that shard one replica (HSDP); -1: all

    def __post_init__(self) -> None:
        if self.fsdp_size != -1 and self.fsdp_size < 1:
            raise ValueError(f"fsdp.fsdp_size={self.fsdp_size}: must be -1 (all ranks) or >= 1")


@dataclass(slots=True, kw_only=True)
class TrainRoleConfig:
    """What actor and critic share."""

    strategy: str = "fsdp2"
    ppo_mini_batch_size: int = 64  # prompts (groups) an optimizer update; the same unit as data.train_batch_size
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 16384  # token budget of a packed micro-batch
    shuffle: bool = False  # groups over the mini-batches of an epoch
    grad_clip: float = 1.0
    dtype: str = "auto"  # compute dtype: bfloat16 on GPUs, float32 on CPU; master weights are float32
    ulysses_sequence_parallel_size: int = 1
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, ("fsdp2",))
        if self.dtype == "float16":
            raise ValueError(
                "dtype=float16 of actor or critic: training in it needs a loss scaler, which rlpost does not have, or "
                "small gradients become 0. Set bfloat16, which has float32's range (or float32)"
            )
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        for key in ("ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu", "ulysses_sequence_parallel_size"):
            _at_least(key, getattr(self, key), 1)
        if not self.grad_clip > 0:
            raise ValueError(
                f"grad_clip={self.grad_clip}: must be > 0, the largest norm of a gradient (.inf: no clipping)"
            )


@dataclass(slots=True, kw_only=True)
class ActorConfig(TrainRoleConfig):
    """The policy being trained."""


@dataclass(slots=True, kw_only=True)
class CriticConfig(TrainRoleConfig):
    """The value function (PPO only)."""

    path: str | None = None  # null: start from the actor's checkpoint with a new value head
    cliprange_value: float | None = 0.5  # null: no value clipping

    def __post_init__(self) -> None:
        TrainRoleConfig.__post_init__(self)


@dataclass(slots=True, kw_only=True)
class RefConfig:
    """The frozen reference policy; with LoRA it is the actor with its adapter off."""

    path: str | None = None  # null: the checkpoint the actor starts from
    param_offload: bool = False
    log_prob_max_token_len_per_gpu: int | None = None  # null: as actor.ppo_max_token_len_per_gpu


@dataclass(slots=True, kw_only=True)
class SamplingConfig:
    """How validation samples."""

    n: int = 1
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        _at_least("rollout.val_kwargs.n", self.n, 1)
        _at_least("rollout.val_kwargs.temperature", self.temperature, 0.0)
        if self.n > 1 and self.temperature == 0.0:
            raise ValueError(
                f"rollout.val_kwargs.n={self.n} with rollout.val_kwargs.temperature=0: greedy samples are all alike; "
                "set a temperature above 0 for pass@k, or n=1"
            )


@dataclass(slots=True, kw_only=True)
class AiterKernelsConfig:
    """AITER's kernels by family, each auto, on or off. auto: on, save where docs/rocm.md names a hazard."""

    attention: str = "auto"
    rmsnorm: str = "auto"
    rope: str = "auto"
    moe: str = "auto"
    linear: str = "auto"
    quantization: str = "auto"

    def __post_init__(self) -> None:
        for key in AITER_FAMILIES:
            setattr(self, key, _switch(f"rollout.aiter_kernels.{key}", getattr(self, key)))

    def set_to(self, value: str) -> frozenset[str]:
        """The families whose switch stands at `value`."""
        return frozenset(key for key in AITER_FAMILIES if getattr(self, key) == value)


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """The inference engine and how it samples."""

    name: str = "vllm"
    n: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] = field(default_factory=list)  # besides the tokenizer's EOS and the model's
    dtype: str = "auto"
    tensor_model_parallel_size: int = 1
    num_replicas: int | None = None  # null: as many as the devices hold
    gpu_memory_utilization: float = 0.5
    max_model_len: int | None = None  # null: data.max_prompt_length + data.max_response_length
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    logprobs_every: int = 1  # the engine returns logprobs of one group in so many, enough for parity; saves its time
    free_cache_engine: bool = True  # sleep while training when colocated on a GPU
    weight_sync: str = "auto"  # auto (by topology), shm, ipc, gloo, nccl
    weight_sync_timeout_s: float = 300.0  # for a bucket to reach a replica; at most trainer.timeouts.publish_s / 3
    update_weights_bucket_megabytes: int = 256
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the engine, checked against what it accepts
    startup_timeout_s: float = 600.0
    request_timeout_s: float = 1800.0
    workflow: str = "single_turn"  # registered name or dotted path
    num_workers: int = 1  # processes that run workflows and rewards
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    aiter: str = "auto"  # AMD's kernels: auto (on under ROCm), on, off
    aiter_kernels: AiterKernelsConfig = field(default_factory=AiterKernelsConfig)
    aiter_on_fault: str = "disable"  # when AITER breaks parity: turn the families at fault off, or stop
    aiter_max_restarts: int = 12  # of the engines, while looking for the families at fault

    def __post_init__(self) -> None:
        self.aiter = _switch("rollout.aiter", self.aiter)
        if self.aiter == "off" and (on := sorted(self.aiter_kernels.set_to("on"))):
            raise ValueError(f"rollout.aiter=off and rollout.aiter_kernels.{on[0]}=on contradict each other: drop one")
        _one_of("rollout.aiter_on_fault", self.aiter_on_fault, ("disable", "stop"))
        _at_least("rollout.aiter_max_restarts", self.aiter_max_restarts, 2)
        for key in ("n", "tensor_model_parallel_size", "num_replicas", "num_workers", "max_num_seqs", "logprobs_every"):
            _at_least(f"rollout.{key}", getattr(self, key), 1)
        for key in (
            "max_num_batched_tokens",
            "weight_sync_timeout_s",
            "update_weights_bucket_megabytes",
            "startup_timeout_s",
            "request_timeout_s",
        ):
            _at_least(f"rollout.{key}", getattr(self, key), 1)
        if self.temperature <= 0:
            raise ValueError(f"rollout.temperature={self.temperature}: training needs a temperature above 0")
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                f"rollout.top_p={self.top_p}, rollout.top_k={self.top_k}: training samples by temperature only. Below "
                "top_p=1 the engine renormalises over a set of tokens that the trainer does not know, so its logprobs "
                "belong to another policy. Set rollout.top_p=1 and rollout.top_k=-1 (rollout.val_kwargs may use both)"
            )
        if not 0.0 < self.gpu_memory_utilization < 1.0:
            raise ValueError(f"rollout.gpu_memory_utilization={self.gpu_memory_utilization}: must lie in (0, 1)")
        _one_of("rollout.weight_sync", self.weight_sync, ("auto", "shm", "ipc", "gloo", "nccl"))
        _one_of("rollout.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
