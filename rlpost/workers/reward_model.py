"""A reward model: a sequence-classification checkpoint that scores texts."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlpost.rewards.config import RewardModelConfig
from rlpost.rewards.model import Messages


class RewardModel:
    """A checkpoint with one score a sequence.

    Args:
        path: folder or hub id of an `AutoModelForSequenceClassification` with one label.
        device: where it runs.

    Raises:
        ValueError: the checkpoint has more than one label.
    """

    def __init__(self, path: str, cfg: RewardModelConfig, device: str = "cpu"):
        auto = torch.float32 if device == "cpu" else torch.bfloat16
        dtype = auto if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        self._cfg, self._device = cfg, device
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="right", truncation_side="left")
        self.model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).to(device).eval()
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"reward.reward_model.path={path}: it has {self.model.config.num_labels} labels, expected 1"
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # the last token that is no padding is scored

    @torch.no_grad()
    def score(self, texts: Sequence[str | Messages]) -> list[float]:
        """One score for each text or conversation; a text beyond `max_length` tokens loses its beginning.

        Raises:
            ValueError: a conversation, and the model's tokenizer has no chat template.
        """
        rendered = [text if isinstance(text, str) else self._render(text) for text in texts]
        scores: list[float] = []
        for start in range(0, len(rendered), self._cfg.batch_size):
            inputs = self.tokenizer(
                rendered[start : start + self._cfg.batch_size],
                padding=True,
                truncation=True,
                max_length=self._cfg.max_length,
                return_tensors="pt",
            ).to(self._device)
            outputs = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            scores += outputs.logits[:, 0].float().tolist()
        return scores

    def _render(self, messages: Messages) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError("the reward model's tokenizer has no chat template: set kwargs.chat=false in its term")
        return self.tokenizer.apply_chat_template(messages, tokenize=False)
