"""Logprobs, entropy and values from hidden states; the only place that shifts by one.

A model's hidden state at position t predicts the token at t + 1. Here everything is computed *by source* (at t) and
then moved to the token it belongs to (t + 1) by `to_predicted`.
"""

import torch
from torch import Tensor
from torch.profiler import record_function

CHUNK_BYTES = 256 * 2**20  # of one chunk's float32 logits


def next_tokens(token_ids: Tensor) -> Tensor:
    """`[N]` id of the token that follows each position in the pack; meaningless at the end of a sequence."""
    return token_ids.roll(-1)


def predicts(cu_seqlens: Tensor, targets: Tensor | None, num_tokens: int) -> Tensor:
    """bool `[N]`: positions followed by a token of the same sequence that is in `targets` (bool `[N]`; None: any)."""
    wanted = torch.ones(num_tokens, dtype=torch.bool, device=cu_seqlens.device) if targets is None else targets.roll(-1)
    return wanted.index_fill(0, _last_positions(cu_seqlens), False)


def to_predicted(by_source: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`[N]` values at the position that predicts -> at the predicted token; 0 for the first token of a sequence."""
    return by_source.index_fill(0, _last_positions(cu_seqlens), 0.0).roll(1)


def _last_positions(cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens[1:].long() - 1


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    entropy: bool,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax of the target ids, and the entropy, of the distribution that was sampled from.

    The logits exist for one chunk of tokens at a time and are recomputed in the backward pass.

    Args:
        hidden: `[M, H]` in the compute dtype.
        weight: `[V, H]` output embedding.
        bias: `[V]` or None.
        targets: int64 `[M]`, each < `vocab_size`.
        temperature: logits are divided by it.
        vocab_size: ids >= this were never sampled: their logits are -inf.
        entropy: also return it, nats.
        chunk_bytes: bound of a chunk's float32 logits.

    Returns:
        float32 `[M]` logprobs and float32 `[M]` entropy (None when not asked for).
    """
    chunk = max(1, chunk_bytes // (4 * weight.shape[0]))
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, vocab_size, entropy, chunk)
    return logprobs, entropies if entropy else None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, vocab_size: int) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float().div_(temperature)
    logits[:, vocab_size:] = -torch.inf
    return logits


class _TokenLogprobs(torch.autograd.Function):
    """d logp(y) / d z = onehot(y) - p and d H / d z = -p (log p + H), for logits z, p = softmax(z), entropy H.

    With z shifted to a maximum of 0 and S = sum exp(z), H = log S - sum(z exp(z)) / S: one pass more, not a softmax.
    """

    @staticmethod
    @record_function("rlpost.head")
    def forward(ctx, hidden, weight, bias, targets, temperature, vocab_size, entropy, chunk):
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normalizers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for rows in _chunks(len(targets), chunk):
            # without the padded ids: their -inf would make a NaN of 0 * -inf
            logits = _logits(hidden[rows], weight, bias, temperature, vocab_size)[:, :vocab_size]
            top = logits.amax(-1, keepdim=True)
            logits.sub_(top)
            exponentials = logits.exp()
            total = exponentials.sum(-1)
            log_total = total.log()
            normalizers[rows] = log_total + top.squeeze(1)
            logprobs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - log_total
            if entropy:
                entropies[rows] = log_total - exponentials.mul_(logits).sum(-1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies)
        ctx.settings = temperature, vocab_size, chunk
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @record_function("rlpost.head_backward")
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, bias, targets, normalizers, entropies = ctx.saved_tensors
        temperature, vocab_size, chunk = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        pulls = [None if g is None else g / temperature for g in (grad_logprobs, grad_entropies)]
        for rows in _chunks(len(targets), chunk):
            p = _logits(hidden[rows], weight, bias, temperature, vocab_size).sub_(normalizers[rows, None]).exp_()
            grad = _grad_logits(p, targets[rows], entropies[rows], *(g if g is None else g[rows] for g in pulls))
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _grad_logits(
    p: Tensor, targets: Tensor, entropies: Tensor, pull: Tensor | None, pull_entropy: Tensor | None
) -> Tensor:
    """`[m, V]` gradient by the logits; overwrites `p` where it can, for a pass over `[m, V]` costs memory traffic."""
    if pull_entropy is not None:
        grad = torch.special.entr(p).sub_(p * entropies[:, None]).mul_(pull_entropy[:, None])
        if pull is not None:
            grad.addcmul_(p, pull[:, None], value=-1.0)
    elif pull is not None:
        grad = p.mul_(-pull[:, None])
    else:
        return p.zero_()
    return grad if pull is None else grad.scatter_add_(1, targets[:, None], pull[:, None])


def _chunks(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]
