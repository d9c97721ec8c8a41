"""Policy losses and advantages that go wrong, found by their dotted path."""

import torch

from rlpost.algos.losses import TokenLoss


def steep(terms, cfg) -> TokenLoss:
    """Finite, with an infinite slope at a ratio of 1."""
    return TokenLoss((terms.logprobs - terms.logprobs.detach()).abs().sqrt())


def endless(terms, cfg) -> TokenLoss:
    """Infinite itself."""
    return TokenLoss(terms.logprobs / 0.0)


def undefined(batch, cfg) -> dict[str, torch.Tensor]:
    """Advantages of which the last is no number."""
    advantages = batch["response_mask"].float()
    advantages[batch["response_mask"].nonzero()[-1]] = torch.nan
    return {"advantages": advantages}
