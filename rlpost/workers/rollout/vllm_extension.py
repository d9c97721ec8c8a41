"""What vLLM loads into its own worker processes: our weight receiver, and logits without padded ids.

vLLM imports this module in every worker because `worker_extension_cls` names it, before the model is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from rlpost.workers.weight_sync.bucket import Bucket
from rlpost.workers.weight_sync.reader import BucketReader

BACKEND = "rlpost"
# in vLLM's additional_config
VOCAB_SIZE_KEY = "rlpost_vocab_size"
FLOAT32_KEY = "rlpost_float32_logits"
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: each bucket says where its bytes are, or which group they come from."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, see `rlpost.workers.weight_sync.bucket`."""

    bucket: Bucket = field(default_factory=dict)


def loads_in_place(model: torch.nn.Module) -> bool:
    """Whether `model` computes with its weights as they were loaded, so that new ones may be written over them.

    True on CUDA without quantization, mixture of experts and latent attention: other kernels want weights packed,
    shuffled, absorbed or quantized, which vLLM's layerwise reload does anew, at a millisecond or more a tensor.
    """
    methods = [method for m in model.modules() if (method := getattr(m, "quant_method", None)) is not None]
    latent = any(isinstance(module, MLAAttention) for module in model.modules())
    return current_platform.is_cuda() and not latent and all(type(method) in PLAIN for method in methods)


class BucketTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Reads buckets of weights in checkpoint format and loads them: in place, or else by vLLM's layerwise reload.

    vLLM changed who opens and closes the layerwise reload: 0.24's worker does it itself, if it is told to; later
    versions leave it to this class.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._device = next(self.model.parameters()).device
        self._in_place = loads_in_place(self.model)
        self.reader = BucketReader(self._device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """See `InitInfo`."""

    def start_weight_update(self) -> None:
        """Open a layerwise reload, where one is needed."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Callable[..., Any] | None = None) -> None:
        """Load one bucket. The layerwise reload keeps tensors of layers that are not complete yet: it gets copies.

        Args:
            update_info: the bucket.
            load_weights: 0.24's way to load; in place it wants names of its own, so the model's is taken instead.
        """
        tensors = self.reader.read(update_info.bucket)
        if self._in_place:
            self.model.load_weights(tensors)
        else:
            load = load_weights or self.model.load_weights
            load([(name, tensor.to(self._device, copy=True)) for name, tensor in tensors])

    def finish_weight_update(self) -> None:
        """Close the layerwise reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Unmap the trainer's buffers, and leave its group."""
        self.reader.close()
        self.reader.leave()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Required by vLLM 0.24's base class; the trainer's side is `rlpost.workers.weight_sync.sender.Sender`."""
        raise RuntimeError("weights are sent by rlpost.workers.weight_sync.sender.Sender")


WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)


class WorkerExtension:
    """Mixed into vLLM's worker; reached through `collective_rpc`."""

    def rlpost_seal_update(self) -> int:
        """After `finish_weight_update`: repack a tied head, and return the digest of the bytes received.

        On CPU vLLM keeps a packed copy of the head's weight. The layerwise reload repacks the embedding but not the
        head that shares its weight, which would go on with the old values.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        head = getattr(model, "lm_head", None)
        if current_platform.is_cpu() and head is not None and getattr(head, "quant_method", None) is not None:
            head.quant_method.process_weights_after_loading(head)
        return self.weight_transfer_engine.reader.close()  # type: ignore[attr-defined]

    def rlpost_loads_in_place(self) -> bool:
        """See `loads_in_place`."""
        return loads_in_place(self.model_runner.get_model())  # type: ignore[attr-defined]

    def rlpost_device_uuid(self) -> str:
        """The physical device of this worker, "cpu" without one."""
        if current_platform.is_cpu():
            return "cpu"
        return str(torch.cuda.get_device_properties(self.device).uuid)  # type: ignore[attr-defined]


class Float32Head:
    """An output embedding whose logits are float32 `[N, V]`, where vLLM multiplies into those of its model's 16 bits.

    In place of the layer and of its `quant_method`, of which vLLM's `LogitsProcessor` asks `apply`.
    """

    def __init__(self, head: torch.nn.Module):
        self._head = head
        self.quant_method = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def apply(self, layer: Any, states: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of `states` `[N, H]`."""
        if states.is_cuda:
            logits = torch.mm(states, layer.weight.T, out_dtype=torch.float32)
        else:
            logits = states.float() @ layer.weight.float().T
        return logits if bias is None else logits + bias


@LogitsProcessor.register_oot
class TokenizerLogits(LogitsProcessor):
    """Logits of the tokenizer's ids alone: a padded embedding has rows that no token owns, and they are never sampled.

    In place of vLLM's own layer in every model. Fewer logits are less work for the sampler, while a per-step logits
    processor would keep vLLM 0.24 from its faster model runner. Where `FLOAT32_KEY` is set they are float32, also in a
    vLLM whose `head_dtype` is not for models that generate (0.24).
    """

    def __init__(self, vocab_size: int, org_vocab_size: int | None = None, **kwargs: Any):
        config = get_current_vllm_config().additional_config
        known = config.get(VOCAB_SIZE_KEY, vocab_size)
        super().__init__(vocab_size, min(org_vocab_size or vocab_size, known), **kwargs)
        own = getattr(self, "head_dtype", None) == torch.float32
        self._float32 = config.get(FLOAT32_KEY, False) and not own

    def forward(self, lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """See vLLM's; `hidden_states` are `[N, H]`."""
        if self._float32 and type(lm_head.quant_method) in PLAIN:
            lm_head = Float32Head(lm_head)
        return super().forward(lm_head, hidden_states, *args, **kwargs)
