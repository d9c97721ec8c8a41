"""What a training backend must offer: `TrainEngine`, one model with its optimizer on this process's device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rlpost.batch import Batch
from rlpost.metrics import Metrics


@dataclass(slots=True, frozen=True)
class Output:
    """What the model says about the tokens of one packed micro-batch.

    `logprobs` (and `entropy`) or `values`, each float32 `[N]` aligned with `token_ids`; positions without a prediction
    (the first token of each sequence) hold 0.
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


# (micro-batch, output) -> (scalar to minimise, metrics). The scalar is this micro-batch's share of the loss: shares of
# all micro-batches on all ranks are *summed*, so it must already carry the global denominator (`loss_weights`).
MicroLoss = Callable[[Batch, Output], tuple[torch.Tensor, Metrics]]


class TrainEngine(ABC):
    """One model sharded over the trainer's process group. Every method is collective: all ranks call it alike.

    Attributes:
        skipped: whether the last `train_step` made no update; equal on all ranks.
    """

    skipped: bool

    @abstractmethod
    def forward(self, micro_batches: list[Batch], entropy: bool = False) -> list[Output]:
        """Inference without gradient; `Output` of each micro-batch on CPU. Empty micro-batches are allowed."""

    @abstractmethod
    def train_step(self, micro_batches: list[Batch], loss: MicroLoss) -> Metrics:
        """One optimizer update from the *sum* of the micro-batches' losses over all ranks.

        Returns the merged metrics of `loss` plus `grad_norm` (before clipping, global), `lr` and `updates` = 1. Where
        the loss of any rank or the gradient is not finite, parameters and optimizer state stay as they are on all
        ranks: `updates` = 0, `skipped_updates` = 1, `nonfinite_losses` counts micro-batches, and `skipped` is set.
        In float16 a gradient that overflows is computed again with a smaller scale first, with metrics of the last
        try alone: `loss_scale` is what it was made with, `scale_retries` how often it was halved for it.
        """

    @abstractmethod
    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Full (unsharded) parameters under their checkpoint names, cast to `dtype` before they are gathered.

        Tied weights appear once; LoRA is merged out of place. Tensors live on this rank's device and may be reused
        by the iterator after the next one is taken.
        """

    @abstractmethod
    def to(self, device: str, *, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and/or optimizer state to "cpu" or back to the "device"."""

    @abstractmethod
    def save(self, folder: Path) -> dict[str, str]:
        """Write this engine's sharded state (weights, optimizer, schedule, RNG) below `folder`.

        Returns digests (`rlpost.files.file_digest`) of the files that this rank wrote, by their names below `folder`.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; world size may differ."""

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint (LoRA merged) that transformers and the engines load."""
