"""A reward model: a sequence-classification checkpoint that scores texts."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlpost.rewards.config import RewardModelConfig
from rlpost.rewards.model import Messages


class RewardModel:
    """A checkpoint with one score a sequence.

    Args:
        path: folder or hub id of an `AutoModelForSequenceClassification` with one label.
        device: where it runs.

    Raises:
        ValueError: the checkpoint has more than one label, or lacks weights such as the score head.
    """

    def __init__(self, path: str, cfg: RewardModelConfig, device: str = "cpu"):
        auto = torch.float32 if device == "cpu" else torch.bfloat16
        dtype = auto if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        self._cfg, self._device = cfg, device
        self.tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
        model, loaded = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, output_loading_info=True)
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(
                f"reward.reward_model.path={path}: the checkpoint has no {', '.join(missing[:3])}, which would be "
                "random; it takes one that was saved with its score head (AutoModelForSequenceClassification)"
            )
        if model.config.num_labels != 1:
            raise ValueError(f"reward.reward_model.path={path}: it has {model.config.num_labels} labels, expected 1")
        self.model = model.to(device).eval()

    @torch.no_grad()
    def score(self, texts: Sequence[str | Messages]) -> list[float]:
        """One score for each text or conversation; a text beyond `max_length` tokens loses its beginning.

        A text gets the tokenizer's special tokens, a conversation only those that the chat template writes.

        Raises:
            ValueError: a conversation, and the model's tokenizer has no chat template; or a text without tokens.
        """
        ids = [self._token_ids(text) for text in texts]
        scores: list[float] = []
        for start in range(0, len(ids), self._cfg.batch_size):
            scores += self._scores(ids[start : start + self._cfg.batch_size])
        return scores

    def _token_ids(self, text: str | Messages) -> list[int]:
        if not isinstance(text, str) and not self.tokenizer.chat_template:
            raise ValueError("the reward model's tokenizer has no chat template: set kwargs.chat=false in its term")
        raw = isinstance(text, str)
        rendered = text if raw else self.tokenizer.apply_chat_template(text, tokenize=False)
        ids = self.tokenizer(rendered, add_special_tokens=raw, truncation=True, max_length=self._cfg.max_length)
        if not ids["input_ids"]:
            raise ValueError("the reward model was asked to score a text without tokens")
        return ids["input_ids"]

    def _scores(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Scores of one right-padded batch.

        The model scores the last token that is not `pad_token_id`. Where the tokenizer pads with the token that ends a
        conversation, that would be the one before, so the padding is a token that ends none of the batch.
        """
        ends = {sequence[-1] for sequence in ids}
        padding = next(
            i for i in (self.tokenizer.pad_token_id, *range(len(ids) + 1)) if i is not None and i not in ends
        )
        config = self.model.config
        config.pad_token_id = config.get_text_config().pad_token_id = padding
        rows = [torch.tensor(sequence) for sequence in ids]
        inputs = pad_sequence(rows, batch_first=True, padding_value=padding)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        outputs = self.model(input_ids=inputs.to(self._device), attention_mask=mask.to(self._device))
        return outputs.logits[:, 0].float().tolist()
