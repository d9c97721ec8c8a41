"""The root module: a transformers backbone over a pack, with a logprob or a value head."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpost.workers.engine.attention import Packing
from rlpost.workers.engine.head import token_logprobs


class PackedModel(nn.Module):
    """`model` is a `...ForCausalLM` (policy) or a `...ForTokenClassification` with one label (critic).

    Backbone and head run within one `forward`, so that FSDP's root has gathered embedding and head when they are used.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, compiled: bool = False):
        super().__init__()
        self.compiled = compiled
        self.model = model
        self.vocab_size = vocab_size
        self.is_critic = hasattr(model, "score")

    def train(self, mode: bool = True) -> "PackedModel":
        """Training is as free of noise as evaluation: the ratio of new to old policy must be 1 for equal weights.

        Dropout, jitter and sampled routing all ask `training`, so it stays False, save in layers that are computed
        again in the backward pass only then; what they themselves would drop is set to 0.
        """
        super().train(False)
        for layer in self.modules():
            if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
                layer.training = mode
                for name, value in vars(layer).items():
                    if isinstance(value, float) and ("drop" in name or "jitter" in name):
                        setattr(layer, name, 0.0)
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packing: Packing,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`[n]` is this rank's slice of the pack; results are float32 `[n]` by source position.

        Args:
            input_ids: int64 `[n]` tokens.
            position_ids: int64 `[n]`, restarting with each sequence.
            packing: the whole pack.
            rows: int64 `[m]`, ascending positions whose logprob is computed; others give 0.
            targets: int64 `[m]`, the token that follows each of them.
            temperature: of the sampling.
            entropy: also compute it.

        Returns:
            (values, None) of a critic, (logprobs, entropy or None) of a policy.
        """
        backbone = self.model.base_model
        output = backbone(input_ids=input_ids[None], position_ids=position_ids[None], packing=packing, use_cache=False)
        hidden = output.last_hidden_state.squeeze(0)  # an index would fill a tensor of zeros in the backward pass
        if self.is_critic:
            score = self.model.score
            bias = None if score.bias is None else score.bias.float()
            return nn.functional.linear(hidden.float(), score.weight.float(), bias).sum(-1), None  # [n, 1] -> [n]
        head = self.model.get_output_embeddings()
        logprobs, entropies = token_logprobs(
            hidden, head.weight, head.bias, rows, targets,
            temperature=temperature, vocab_size=self.vocab_size, entropy=entropy, compile=self.compiled,
        )  # fmt: skip
        zeros = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        spread = zeros.index_put((rows,), logprobs)
        return spread, None if entropies is None else zeros.index_put((rows,), entropies)

    def adapters(self) -> list[BaseTunerLayer]:
        """The LoRA layers; empty without LoRA."""
        return [module for module in self.modules() if isinstance(module, BaseTunerLayer)]

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The model before training: LoRA layers pass through their base layer."""
        trained = [p for p in self.parameters() if p.requires_grad]
        for layer in self.adapters():
            layer.enable_adapters(False)
        for parameter in trained:
            parameter.requires_grad_(True)  # peft froze them too, which FSDP must not see
        try:
            yield
        finally:
            for layer in self.adapters():
                layer.enable_adapters(True)
