"""The logprob head: a full softmax's numbers, chunk by chunk, and the one shift."""

import math

import pytest
import torch

from rlpost.workers.engine.head import next_tokens, predicts, to_predicted, token_logprobs

NUM_TOKENS, HIDDEN, EMBEDDING, VOCAB = 11, 6, 10, 8


def _inputs(bias: bool):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(EMBEDDING, HIDDEN, dtype=torch.float64, generator=generator)
    offset = torch.randn(EMBEDDING, dtype=torch.float64, generator=generator) if bias else None
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    leaves = [x.float().requires_grad_() if x is not None else None for x in (hidden, weight, offset)]
    return *leaves, targets


def _full_softmax(hidden, weight, bias, targets, temperature):
    log_p = (torch.nn.functional.linear(hidden, weight, bias)[:, :VOCAB] / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows_a_chunk", [1, 4, 100])
def test_chunked_head_equals_full_softmax_with_gradients(rows_a_chunk, bias):
    hidden, weight, offset, targets = _inputs(bias)
    got = token_logprobs(
        hidden,
        weight,
        offset,
        torch.arange(NUM_TOKENS),
        targets,
        temperature=0.6,
        vocab_size=VOCAB,
        entropy=True,
        chunk_bytes=rows_a_chunk * 4 * EMBEDDING,
    )
    want = _full_softmax(hidden, weight, offset, targets, 0.6)
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    pull = torch.linspace(-1, 1, NUM_TOKENS)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        mine = torch.autograd.grad((one * pull).sum(), leaves, retain_graph=True)
        theirs = torch.autograd.grad((other * pull).sum(), leaves, retain_graph=True)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_padded_vocabulary_has_no_probability_and_no_gradient():
    hidden, weight, _, targets = _inputs(bias=False)
    options = {"temperature": 1.0, "vocab_size": VOCAB, "entropy": True}
    rows = torch.arange(NUM_TOKENS)
    logprobs, entropy = token_logprobs(hidden, weight, None, rows, targets, **options)
    every = [
        token_logprobs(hidden, weight, None, rows, torch.full_like(targets, i), **options)[0] for i in range(VOCAB)
    ]
    torch.testing.assert_close(torch.stack(every).exp().sum(0), torch.ones(NUM_TOKENS))
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), [weight])
    assert grad[VOCAB:].abs().max() == 0.0 and grad[:VOCAB].abs().min() > 0.0


@pytest.mark.parametrize("embedding", [VOCAB, VOCAB + 1, 64, 100])
def test_rows_that_no_id_has_do_not_matter_whatever_they_hold(embedding):
    """Some of them are computed along, so that matrix kernels find aligned rows."""
    hidden, weight, offset, targets = _inputs(bias=True)
    padded = torch.full((embedding, HIDDEN), 1e30)
    padded[:VOCAB] = weight[:VOCAB].detach()
    beyond = torch.full((embedding,), 1e30)
    beyond[:VOCAB] = offset[:VOCAB].detach()
    leaves = [hidden, padded.requires_grad_(), beyond.requires_grad_()]
    got = token_logprobs(
        *leaves, torch.arange(NUM_TOKENS), targets, temperature=0.6, vocab_size=VOCAB, entropy=True, chunk_bytes=1000
    )
    want = _full_softmax(hidden, weight, offset, targets, 0.6)
    mine = torch.autograd.grad(got[0].sum() + 0.1 * got[1].sum(), leaves)
    theirs = torch.autograd.grad(want[0].sum() + 0.1 * want[1].sum(), [hidden, weight, offset])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a[:VOCAB], b[:VOCAB], rtol=1e-4, atol=1e-5)
        assert a[VOCAB:].abs().sum() == 0.0


@pytest.mark.parametrize(("scale", "expected"), [(0.0, math.log(VOCAB)), (1e4, 0.0)])
def test_entropy_of_a_uniform_and_of_a_certain_distribution(scale, expected):
    hidden, weight, _, targets = _inputs(bias=False)
    logprobs, entropy = token_logprobs(
        hidden * scale, weight, None, torch.arange(NUM_TOKENS), targets, temperature=1.0, vocab_size=VOCAB, entropy=True
    )
    torch.testing.assert_close(entropy, torch.full((NUM_TOKENS,), expected))
    assert torch.isfinite(logprobs).all()


def test_no_tokens_give_zero_gradients():
    hidden, weight, _, targets = _inputs(bias=False)
    logprobs, entropy = token_logprobs(
        hidden, weight, None, torch.arange(0), targets[:0], temperature=1.0, vocab_size=VOCAB, entropy=False
    )
    assert logprobs.shape == (0,) and entropy is None
    (grad,) = torch.autograd.grad(logprobs.sum(), [weight])
    assert grad.abs().max() == 0.0


def test_shift_moves_values_to_the_predicted_token():
    cu_seqlens = torch.tensor([0, 3, 4, 6])
    assert to_predicted(torch.arange(10.0, 16.0), cu_seqlens[1:] - 1).tolist() == [0, 10, 11, 0, 0, 14]
    assert next_tokens(torch.arange(6)).tolist()[:5] == [1, 2, 3, 4, 5]
    assert predicts(cu_seqlens, None, 6).tolist() == [True, True, False, False, True, False]
    targets = torch.tensor([True, False, True, True, True, True])
    assert predicts(cu_seqlens, targets, 6).tolist() == [False, True, False, False, True, False]
