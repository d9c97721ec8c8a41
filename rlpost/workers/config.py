"""Schemas of the groups `model`, `actor`, `critic`, `ref` and `rollout`. Names follow verl; no torch, no ray here."""

from dataclasses import dataclass, field
from typing import Any

from rlpost.aiter import FAMILIES as AITER_FAMILIES
from rlpost.problems import refuse

DTYPES = ("auto", "float32", "bfloat16", "float16")


def _switch(key: str, value: str) -> str:
    """auto, on or off; YAML reads a bare on or off as a truth value."""
    value = {"True": "on", "False": "off", "true": "on", "false": "off"}.get(str(value), str(value))
    _one_of(key, value, ("auto", "on", "off"))
    return value


def _one_of(key: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        refuse(f"{key}={value}: expected one of {', '.join(str(a) for a in allowed)}")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:  # also where it is not a number
        refuse(f"{key}={value}: must be >= {least}")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """What is trained: a Hugging Face checkpoint, its tokenizer, and LoRA."""

    path: str = "???"  # folder, hub id, or `maker:<dotted path>` of a function(folder) that writes a checkpoint
    tokenizer_path: str | None = None  # null: as `path`
    trust_remote_code: bool = False  # run code that comes with the checkpoint
    chat_template: str | None = None  # a Jinja template, overrides the tokenizer's
    attn_implementation: str = "auto"  # auto, varlen, flash_attention_2, flash_attention_3, sdpa
    enable_gradient_checkpointing: bool = False  # compute activations twice instead of keeping them
    compile: str = "auto"  # torch.compile of layers and logprob head: auto (on GPUs, where it works), on, off
    lora_rank: int = 0  # 0: full fine-tuning
    lora_alpha: int = 16  # the adapter's output is scaled by lora_alpha / lora_rank
    target_modules: Any = "all-linear"  # all-linear, or a list of module names
    override_config: dict[str, Any] = field(default_factory=dict)  # fields of the model's own config

    def __post_init__(self) -> None:
        self.compile = _switch("model.compile", self.compile)
        _at_least("model.lora_rank", self.lora_rank, 0)
        _at_least("model.lora_alpha", self.lora_alpha, 1)
        _one_of(
            "model.attn_implementation",
            self.attn_implementation,
            ("auto", "varlen", "flash_attention_2", "flash_attention_3", "sdpa"),
        )


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule; steps are optimizer updates."""

    lr: float = 1e-6  # peak learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # decay of AdamW's two moments
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.01  # decoupled from the gradient
    lr_warmup_steps: int = 0  # linear, from near 0
    lr_scheduler_type: str = "constant"  # constant, linear or cosine, over the whole run
    min_lr_ratio: float = 0.0  # floor of linear and cosine decay, as a fraction of lr

    def check(self, at: str) -> None:
        """Refuse what cannot be; `at` is where this lies, such as `actor.optim`."""
        _one_of(f"{at}.lr_scheduler_type", self.lr_scheduler_type, ("constant", "linear", "cosine"))
        for key in ("lr", "eps"):
            if not getattr(self, key) > 0:
                refuse(f"{at}.{key}={getattr(self, key)}: must be > 0")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            refuse(f"{at}.betas={self.betas}: expected two numbers in [0, 1)")
        _at_least(f"{at}.weight_decay", self.weight_decay, 0)
        _at_least(f"{at}.lr_warmup_steps", self.lr_warmup_steps, 0)
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            refuse(f"{at}.min_lr_ratio={self.min_lr_ratio}: must lie in [0, 1], it is a fraction of {at}.lr")


@dataclass(slots=True, kw_only=True)
class FSDPConfig:
    """FSDP2 (`fully_shard`)."""

    param_offload: bool = False  # parameters to host memory while generating
    optimizer_offload: bool = False  # optimizer state to host memory while generating
    reshard_after_forward: bool | None = None  # free gathered weights between passes; null: only where ranks share them
    fsdp_size: int = -1  # ranks that shard one replica (HSDP); -1: all

    def check(self, at: str) -> None:
        """Refuse what cannot be; `at` is where this lies, such as `actor.fsdp`."""
        if self.fsdp_size != -1 and self.fsdp_size < 1:
            refuse(f"{at}.fsdp_size={self.fsdp_size}: must be -1 (all ranks) or >= 1")


@dataclass(slots=True, kw_only=True)
class TrainRoleConfig:
    """What actor and critic share."""

    strategy: str = "fsdp2"  # training engine
    ppo_mini_batch_size: int = 64  # prompts (groups) an optimizer update; the same unit as data.train_batch_size
    ppo_epochs: int = 1  # passes over a step's batch
    ppo_max_token_len_per_gpu: int = 16384  # token budget of a packed micro-batch
    shuffle: bool = False  # groups over the mini-batches of an epoch
    grad_clip: float = 1.0  # largest norm of the gradient; .inf: no clipping
    dtype: str = "auto"  # passes: auto (bfloat16; float32 on CPU), float32, bfloat16, float16; master weights: float32
    ulysses_sequence_parallel_size: int = 1  # ranks that share a sequence
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    def __post_init__(self) -> None:
        at = self._section()
        _one_of(f"{at}.strategy", self.strategy, ("fsdp2",))
        _one_of(f"{at}.dtype", self.dtype, DTYPES)
        for key in ("ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu", "ulysses_sequence_parallel_size"):
            _at_least(f"{at}.{key}", getattr(self, key), 1)
        if not self.grad_clip > 0:
            refuse(f"{at}.grad_clip={self.grad_clip}: must be > 0, the largest norm of a gradient (.inf: no clipping)")
        self.optim.check(f"{at}.optim")
        self.fsdp.check(f"{at}.fsdp")

    @staticmethod
    def _section() -> str:
        return "actor"


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
        if self.cliprange_value is not None and not self.cliprange_value > 0:
            refuse(f"critic.cliprange_value={self.cliprange_value}: must be > 0, or null for no clipping")

    @staticmethod
    def _section() -> str:
        return "critic"


@dataclass(slots=True, kw_only=True)
class RefConfig:
    """The frozen reference policy; with LoRA it is the actor with its adapter off."""

    path: str | None = None  # null: the checkpoint the actor starts from
    param_offload: bool = False  # to host memory while it is not asked
    log_prob_max_token_len_per_gpu: int | None = None  # null: as actor.ppo_max_token_len_per_gpu

    def __post_init__(self) -> None:
        _at_least("ref.log_prob_max_token_len_per_gpu", self.log_prob_max_token_len_per_gpu, 1)


@dataclass(slots=True, kw_only=True)
class SamplingConfig:
    """How validation samples."""

    n: int = 1  # answers a prompt; above 1 gives pass@k
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # sample from the likeliest tokens that make up this mass
    top_k: int = -1  # sample from so many likeliest tokens; -1: all

    def __post_init__(self) -> None:
        _at_least("rollout.val_kwargs.n", self.n, 1)
        _at_least("rollout.val_kwargs.temperature", self.temperature, 0.0)
        if not 0.0 < self.top_p <= 1.0:
            refuse(f"rollout.val_kwargs.top_p={self.top_p}: must lie in (0, 1]; 1 keeps every token")
        if self.top_k != -1:
            _at_least("rollout.val_kwargs.top_k", self.top_k, 1)
        if self.n > 1 and self.temperature == 0.0:
            refuse(
                f"rollout.val_kwargs.n={self.n} with rollout.val_kwargs.temperature=0: greedy samples are all alike; "
                "set a temperature above 0 for pass@k, or n=1"
            )


@dataclass(slots=True, kw_only=True)
class AiterKernelsConfig:
    """AITER's kernels by family, each auto, on or off. auto: on, save where docs/rocm.md names a hazard."""

    attention: str = "auto"  # attention, of prompts and of decoding
    rmsnorm: str = "auto"  # RMSNorm
    rope: str = "auto"  # rotary position embedding
    moe: str = "auto"  # fused mixture of experts
    linear: str = "auto"  # matrix products
    quantization: str = "auto"  # FP8 and FP4 products

    def __post_init__(self) -> None:
        for key in AITER_FAMILIES:
            setattr(self, key, _switch(f"rollout.aiter_kernels.{key}", getattr(self, key)))

    def set_to(self, value: str) -> frozenset[str]:
        """The families whose switch stands at `value`."""
        return frozenset(key for key in AITER_FAMILIES if getattr(self, key) == value)


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """The inference engine and how it samples."""

    name: str = "vllm"  # engine: vllm, sglang or hf; choose by the group, rollout=vllm
    n: int = 8  # samples a prompt: the size of a group
    temperature: float = 1.0  # of training's samples; the trainer divides by it as well
    top_p: float = 1.0  # 1: refused below, see docs/design.md
    top_k: int = -1  # -1: refused otherwise
    stop_token_ids: list[int] = field(default_factory=list)  # besides the tokenizer's EOS and the model's
    dtype: str = "auto"  # auto (as actor.dtype), float32, bfloat16 or float16
    fp32_lm_head: str = "auto"  # logits in float32 as the trainer has them on CUDA: auto (vLLM there), on, off
    tensor_model_parallel_size: int = 1  # devices that share an engine
    num_replicas: int | None = None  # null: as many as the devices hold; a multiple of that: several engines a device
    gpu_memory_utilization: float = 0.5  # share of a GPU's memory for weights and cache of its engines, all together
    max_model_len: int | None = None  # null: data.max_prompt_length + data.max_response_length
    max_num_seqs: int = 256  # sequences that an engine decodes at once
    max_num_batched_tokens: int | None = None  # tokens of one pass; null: the engine's choice
    enforce_eager: bool = False  # no compiled graphs: starts faster, decodes more slowly
    seed_requests: str = "auto"  # a seed of its own for every request, so that it can be repeated; auto: on CPU only
    logprobs_every: int | None = None  # the engine returns logprobs of one group in so many; null: of about 8 a step
    free_cache_engine: bool = True  # sleep while training when colocated on a GPU
    weight_sync: str = "auto"  # auto (by topology), shm, ipc, gloo, nccl
    weight_sync_timeout_s: float = 300.0  # for a bucket to reach a replica; at most trainer.timeouts.publish_s / 3
    update_weights_bucket_megabytes: int = 256  # weights travel in buckets of this size
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the engine, checked against what it accepts
    startup_timeout_s: float = 600.0  # for an engine to start
    request_timeout_s: float = 1800.0  # for one request to be answered
    max_restarts: int = 3  # of engine replicas and workflow workers that die, in the whole run; 0: go on with the rest
    health_interval_s: float = 5.0  # between two pings of each of them
    answer_timeout_s: float = 300.0  # for a ping or a pause, sleep, ...: what does not answer by then counts as dead
    workflow: str = "single_turn"  # registered name or dotted path
    num_workers: int = 1  # processes that run workflows and rewards
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    aiter: str = "auto"  # AMD's kernels: auto (on under ROCm), on, off
    aiter_kernels: AiterKernelsConfig = field(default_factory=AiterKernelsConfig)
    aiter_on_fault: str = "disable"  # when AITER breaks parity: turn the families at fault off, or stop
    aiter_max_restarts: int = 12  # of the engines, while looking for the families at fault

    def __post_init__(self) -> None:
        self.seed_requests = _switch("rollout.seed_requests", self.seed_requests)
        self.aiter = _switch("rollout.aiter", self.aiter)
        self.fp32_lm_head = _switch("rollout.fp32_lm_head", self.fp32_lm_head)
        if self.aiter == "off" and (on := sorted(self.aiter_kernels.set_to("on"))):
            refuse(f"rollout.aiter=off and rollout.aiter_kernels.{on[0]}=on contradict each other: drop one")
        _one_of("rollout.aiter_on_fault", self.aiter_on_fault, ("disable", "stop"))
        _at_least("rollout.aiter_max_restarts", self.aiter_max_restarts, 2)
        for key in ("n", "tensor_model_parallel_size", "num_replicas", "num_workers", "max_num_seqs"):
            _at_least(f"rollout.{key}", getattr(self, key), 1)
        for key in (
            "max_model_len",
            "max_num_batched_tokens",
            "logprobs_every",
            "weight_sync_timeout_s",
            "update_weights_bucket_megabytes",
            "startup_timeout_s",
            "request_timeout_s",
        ):
            _at_least(f"rollout.{key}", getattr(self, key), 1)
        _at_least("rollout.max_restarts", self.max_restarts, 0)
        for key in ("health_interval_s", "answer_timeout_s"):
            if not getattr(self, key) > 0:
                refuse(f"rollout.{key}={getattr(self, key)}: must be > 0 seconds")
        if self.temperature <= 0:
            refuse(f"rollout.temperature={self.temperature}: training needs a temperature above 0")
        if self.top_p != 1.0 or self.top_k != -1:
            refuse(
                f"rollout.top_p={self.top_p}, rollout.top_k={self.top_k}: training samples by temperature only. Below "
                "top_p=1 the engine renormalises over a set of tokens that the trainer does not know, so its logprobs "
                "belong to another policy. Set rollout.top_p=1 and rollout.top_k=-1 (rollout.val_kwargs may use both)"
            )
        if not 0.0 < self.gpu_memory_utilization < 1.0:
            refuse(f"rollout.gpu_memory_utilization={self.gpu_memory_utilization}: must lie in (0, 1)")
        _one_of("rollout.weight_sync", self.weight_sync, ("auto", "shm", "ipc", "gloo", "nccl"))
        _one_of("rollout.dtype", self.dtype, DTYPES)
