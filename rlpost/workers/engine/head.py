"""Logprobs, entropy and values from hidden states; the only place that shifts by one.

A model's hidden state at position t predicts the token at t + 1. Here everything is computed *by source* (at t) and
then moved to the token it belongs to (t + 1) by `to_predicted`.
"""

import torch
from torch import Tensor
from torch.profiler import record_function

from rlpost.workers.engine.compiling import compiled

# of one chunk's float32 logits; each chunk costs a pass over the weight and its gradient, 2 GiB are 3,500 Qwen tokens
CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
COLUMNS = 64  # logits are computed in multiples: matrix kernels for rows that are not aligned are slow (Qwen3: 151,669)


def next_tokens(token_ids: Tensor) -> Tensor:
    """`[N]` id of the token that follows each position in the pack; meaningless at the end of a sequence."""
    return token_ids.roll(-1)


def predicts(cu_seqlens: Tensor, targets: Tensor | None, num_tokens: int) -> Tensor:
    """bool `[N]`: positions followed by a token of the same sequence that is in `targets` (bool `[N]`; None: any)."""
    wanted = torch.ones(num_tokens, dtype=torch.bool, device=cu_seqlens.device) if targets is None else targets.roll(-1)
    return wanted.index_fill(0, cu_seqlens[1:] - 1, False)


def to_predicted(by_source: Tensor, last: Tensor) -> Tensor:
    """`[N]` values at the position that predicts -> at the predicted token; 0 for the first token of a sequence.

    `last`, int64 `[S]`, are the positions at which the sequences end.
    """
    return by_source.index_fill(0, last, 0.0).roll(1)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    entropy: bool,
    compile: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax of the target ids, and the entropy, of the distribution that was sampled from.

    The logits exist for one chunk of tokens at a time and are recomputed in the backward pass.

    Args:
        hidden: `[N, H]` in the compute dtype.
        weight: `[V, H]` output embedding.
        bias: `[V]` or None.
        rows: int64 `[M]`, different rows of `hidden`.
        targets: int64 `[M]`, each < `vocab_size`.
        temperature: logits are divided by it.
        vocab_size: ids >= this were never sampled: their logits are -inf.
        entropy: also return it, nats.
        compile: whether the passes over the logits are compiled into few.
        chunk_bytes: bound of a chunk's float32 logits; None for that of the device.

    Returns:
        float32 `[M]` logprobs and float32 `[M]` entropy (None when not asked for).
    """
    chunk = max(1, (chunk_bytes or CHUNK_BYTES[hidden.device.type]) // (4 * weight.shape[0]))
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, weight, bias, rows, targets, temperature, vocab_size, entropy, compile, chunk
    )
    return logprobs, entropies if entropy else None


class _TokenLogprobs(torch.autograd.Function):
    """d logp(y) / d z = onehot(y) - p and d H / d z = -p (log p + H), for logits z, p = softmax(z), entropy H."""

    @staticmethod
    @record_function("rlpost.head")
    def forward(ctx, hidden, weight, bias, rows, targets, temperature, vocab_size, entropy, compile, chunk):
        statistics = compiled(_statistics) if compile else _statistics
        logprobs = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        normalizers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for part in _chunks(len(rows), chunk):
            logits = _logits(hidden[rows[part]], weight, bias, vocab_size)[:, :vocab_size]
            logprobs[part], normalizers[part], found = statistics(logits, targets[part], temperature, entropy)
            if entropy:
                entropies[part] = found
        ctx.save_for_backward(hidden, weight, bias, rows, targets, logprobs, normalizers, entropies)
        ctx.settings = temperature, vocab_size, compile, chunk
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @record_function("rlpost.head_backward")
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, bias, rows, targets, logprobs, normalizers, entropies = ctx.saved_tensors
        temperature, vocab_size, compile, chunk = ctx.settings
        grad_logits = compiled(_grad_logits) if compile else _grad_logits
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        pull = torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs / temperature
        pull_entropy = None if grad_entropies is None else grad_entropies / temperature
        for part in _chunks(len(rows), chunk):
            states, of_rows = hidden[rows[part]], (normalizers[part], entropies[part], pull[part])
            also = None if pull_entropy is None else pull_entropy[part]
            logits = _logits(states, weight, bias, vocab_size)
            grad = grad_logits(logits, *of_rows, also, temperature, hidden.dtype)
            grad.scatter_(1, targets[part, None], _grad_target(logprobs[part], *of_rows[1:], also, hidden.dtype))
            grad[:, vocab_size:] = 0.0
            if grad_hidden is not None:
                grad_hidden[rows[part]] = grad @ weight[: grad.shape[1]]
            if grad_weight is not None:
                grad_weight[: grad.shape[1]] += _product(grad.T, states)
            if grad_bias is not None:
                grad_bias[: grad.shape[1]] += grad.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None, None


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int) -> Tensor:
    """float32 `[m, P]`, before the temperature: P is `vocab_size`, up to a multiple of `COLUMNS` if rows are left.

    Ids >= `vocab_size` are for the caller to leave out.
    """
    columns = min(weight.shape[0], -(-vocab_size // COLUMNS) * COLUMNS)
    logits = _product(states, weight[:columns].T)
    return logits if bias is None else logits + bias[:columns]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In float32, from half precision too; on CUDA without rounding in between."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def _statistics(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of the targets, log-sum-exp and entropy (0 when not asked for) of each row, float32 `[m]`.

    `logits` are overwritten. With z shifted to a maximum of 0 and S = sum exp(z), H = log S - sum(z exp(z)) / S.
    """
    top = logits.amax(-1, keepdim=True)
    shifted = _minus(logits, top).div_(temperature)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    log_total = total.log()
    logprobs = shifted.gather(1, targets[:, None]).squeeze(1) - log_total
    mean = exponentials.mul_(shifted).sum(-1) / total if entropy else log_total
    return logprobs, log_total + top.squeeze(1) / temperature, log_total - mean


def _grad_logits(
    logits: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    pull: Tensor,
    pull_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """`[m, V]` gradient by the logits, which are overwritten; that of the target, a difference, is `_grad_target`'s."""
    log_p = _minus(logits, (normalizers * temperature)[:, None]).div_(temperature)
    if pull_entropy is None:
        return log_p.exp_().mul_(-pull[:, None]).to(dtype)
    p = log_p.exp()
    slope = log_p.add_(entropies[:, None]).mul_(pull_entropy[:, None]).add_(pull[:, None])
    return p.mul_(slope).neg_().to(dtype)


def _minus(logits: Tensor, column: Tensor) -> Tensor:
    """In place, which saves a buffer; but compiled code would write the result back for nothing."""
    return logits - column if torch.compiler.is_compiling() else logits.sub_(column)


def _grad_target(
    logprobs: Tensor, entropies: Tensor, pull: Tensor, pull_entropy: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`[m, 1]` gradient by the target's logit; 1 - p as -expm1(log p) keeps its digits where p is near 1."""
    grad = -torch.expm1(logprobs) * pull
    if pull_entropy is not None:
        grad = grad - logprobs.exp() * (logprobs + entropies) * pull_entropy
    return grad[:, None].to(dtype)


def _chunks(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]
