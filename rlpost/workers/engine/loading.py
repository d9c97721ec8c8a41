"""From a checkpoint folder to sharded weights: every rank builds on the meta device, rank 0 reads and broadcasts."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from rlpost.registry import near
from rlpost.workers.config import ModelConfig
from rlpost.workers.engine import compiling
from rlpost.workers.engine.attention import note_windows
from rlpost.workers.engine.packed_model import PackedModel
from rlpost.workers.engine.parallel import Parallel

UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
STATEFUL = ("mamba", "deltanet", "recurrent", "lightning", "rwkv")  # in names of classes, lower case


def build(path: str, cfg: ModelConfig, *, critic: bool, attention: str, meta: bool) -> PreTrainedModel:
    """The transformers model, with LoRA injected when `cfg.lora_rank` > 0 (never for a critic).

    Args:
        path: checkpoint folder.
        cfg: the `model` section.
        critic: a value head (`score`) instead of the output embedding.
        attention: name of a registered attention implementation.
        meta: no weights, only shapes; otherwise weights on the CPU in the checkpoint's dtype.

    Raises:
        ValueError: the model changes its logits in a way that the logprob head does not know, has layers that carry a
            state from token to token, or no module to adapt of a name in `cfg.target_modules`.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code, **cfg.override_config)
    for name in UNSUPPORTED:
        for part in (config, config.get_text_config()):
            if getattr(part, name, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"model.path={path}: {name}={getattr(part, name)} is not supported by the logprob head"
                )
    kind: Any = AutoModelForCausalLM
    if critic:
        kind = AutoModelForTokenClassification
        config.num_labels = 1
    common = {"attn_implementation": attention, "trust_remote_code": cfg.trust_remote_code}
    with init_empty_weights(include_buffers=False) if meta else nullcontext():
        if meta:
            model = kind.from_config(config, dtype=torch.float32, **common)  # buffers keep it: nothing is rounded
        else:
            model, report = kind.from_pretrained(path, config=config, dtype="auto", output_loading_info=True, **common)
            _check_loaded(path, model, report, critic)
        _refuse_stateful(path, model)
        if cfg.lora_rank > 0 and not critic:
            inject_adapter_in_model(_lora_config(cfg, model), model)
    model.tie_weights()  # building on the meta device replaces parameters one by one
    return model


def _refuse_stateful(path: str, model: PreTrainedModel) -> None:
    """Packed sequences are told apart by attention alone; other layers would mix one into the next."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) or any(word in type(module).__name__.lower() for word in STATEFUL):
            raise ValueError(
                f"model.path={path}: its module {name} ({type(module).__name__}) carries a state from token to token, "
                "which would leak from one packed sequence into the next. Such models are not supported"
            )


def _check_loaded(path: str, model: PreTrainedModel, report: dict[str, Any], critic: bool) -> None:
    """A new value head starts at 0; anything else that the checkpoint lacks is an error."""
    missing = set(report["missing_keys"])
    if critic and "score.weight" in missing:
        for parameter in model.score.parameters():
            nn.init.zeros_(parameter)
        missing = {name for name in missing if not name.startswith("score.")}
    if missing:
        raise ValueError(
            f"model.path={path}: the checkpoint lacks {len(missing)} weights, such as {sorted(missing)[:3]}"
        )


def _lora_config(cfg: ModelConfig, model: PreTrainedModel) -> LoraConfig:
    targets, output = cfg.target_modules, model.get_output_embeddings()
    if targets == "all-linear":
        linear = {
            n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output
        }
        targets = sorted(linear)
    elif not isinstance(targets, str):
        modules = [name for name, _ in model.named_modules()]
        for target in targets:
            if any(module is output and f".{name}".endswith(f".{target}") for name, module in model.named_modules()):
                raise ValueError(f"model.target_modules: '{target}' is the output head, which takes no adapter here")
            if not any(f".{name}".endswith(f".{target}") for name in modules):
                known = near(target, sorted({name.rpartition(".")[2] for name in modules}))
                raise ValueError(f"model.target_modules: the model has no module '{target}'; {known}")
    return LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules=targets, lora_dropout=0.0)


def load_sharded(
    path: str,
    cfg: ModelConfig,
    *,
    critic: bool,
    attention: str,
    vocab_size: int,
    parallel: Parallel,
    device: torch.device,
    master_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    seed: int,
) -> PackedModel:
    """A `PackedModel` sharded over `parallel.mesh`; its weights are those that rank 0 read.

    `fully_shard` wraps each decoder layer and the root. Gradients are summed over ranks in float32. Without
    `reshard_after_forward` gathered weights stay until `reshard` is called.
    """
    compiles = compiling.wanted(cfg.compile, device)
    model = PackedModel(build(path, cfg, critic=critic, attention=attention, meta=True), vocab_size, compiles)
    note_windows(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # LoRA's initial A
        source = build(path, cfg, critic=critic, attention=attention, meta=False) if dist.get_rank() == 0 else None
    if cfg.enable_gradient_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():  # not the buffers: rotary frequencies must stay float32
        parameter.data = parameter.data.to(master_dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model.model):
        if compiles:
            compiling.compile_layer(layer)
        fully_shard(layer, mesh=parallel.mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=parallel.mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(reshard_after_forward, recurse=False)
    _materialize(model, device)
    _fill(model, source, device)
    return model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers says must not be split: one for each layer.

    Raises:
        ValueError: the model names none.
    """
    names = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no layer class to shard by (_no_split_modules is empty)")
    return layers


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters; buffers were built for real and keep their values."""
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def _fill(model: PackedModel, source: PreTrainedModel | None, device: torch.device) -> None:
    """Broadcast each parameter from rank 0 and keep this rank's shard.

    Raises:
        ValueError: on rank 0, where the checkpoint gives a value to something that is no parameter.
    """
    if source is not None:
        _check_buffers(model.model, source)
    read = dict(source.named_parameters()) if source is not None else {}
    for name, parameter in model.model.named_parameters():
        assert isinstance(parameter, DTensor)
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if source is not None:
            full.copy_(read[name])
        dist.broadcast(full, src=0)
        shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())


def _check_buffers(model: PreTrainedModel, source: PreTrainedModel) -> None:
    """Buffers are built, not read: no value of the checkpoint may be lost that way."""
    built, saved = dict(model.named_buffers()), source.state_dict()
    for name, buffer in source.named_buffers():
        if name in saved and not torch.equal(buffer.float().cpu(), built[name].float().cpu()):
            raise ValueError(
                f"model.path={source.name_or_path}: the checkpoint has values of its own for {name}, which is no "
                "parameter: it would be neither trained, sent to engines nor exported. Such models are not supported"
            )
