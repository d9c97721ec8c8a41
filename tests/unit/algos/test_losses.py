"""Policy and value losses: values by hand, and gradients against a categorical policy with every action enumerated."""

import math

import pytest
import torch

from rlpost.algos.config import AlgoConfig
from rlpost.algos.losses import POLICY_LOSSES, PolicyTerms, value_loss

LOSSES = ["cispo", "gspo", "ppo_clip", "reinforce", "sapo"]


def terms_of(ratios, advantages, rows="MMMMM", logprobs=None) -> PolicyTerms:
    """Terms with the given policy / proximal ratios; where not 'M' the proximal logprob is NaN."""
    words = rows.split()
    mask = torch.tensor([letter == "M" for word in words for letter in word])
    logp = torch.tensor(logprobs if logprobs is not None else [-1.0] * len(mask))
    old = (logp - torch.tensor(ratios).log()).masked_fill(~mask, math.nan)
    return PolicyTerms(
        logprobs=logp.requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor(advantages),
        response_mask=mask,
        cu_seqlens=torch.tensor([0, *map(len, words)]).cumsum(0),
        rollout_logprobs=old,
    )


def evaluate(name, terms, **cfg):
    token = POLICY_LOSSES.get(name)(terms, AlgoConfig(loss_mode=name, **cfg))
    loss = token.loss.masked_fill(~terms.response_mask, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), terms.logprobs)
    return loss.tolist(), gradient.tolist(), {name: m.value for name, m in token.metrics.items()}, token.metrics


def test_every_registered_loss_has_a_test():
    assert POLICY_LOSSES.names() == LOSSES


def test_ppo_clip_by_hand():
    #                in range, above with A > 0, below with A < 0, above with A < 0, far above with A < 0
    terms = terms_of([1.1, 1.5, 0.5, 1.5, 5.0], [2.0, 2.0, -1.0, -1.0, -1.0])
    loss, gradient, metrics, raw = evaluate(
        "ppo_clip", terms, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0
    )
    assert loss == pytest.approx([-2.2, -2.6, 0.8, 1.5, 3.0])
    assert gradient == pytest.approx([-2.2, 0.0, 0.0, 1.5, 0.0])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 5)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 5)
    assert metrics["actor/ratio_mean"] == pytest.approx(9.6 / 5)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.1 * 1.5 * 0.5 * 1.5 * 5.0) / 5)
    assert raw["actor/ppo_kl"].weight == 5


def test_ppo_clip_without_dual_clip_is_unbounded_for_negative_advantages():
    loss, gradient, metrics, _ = evaluate("ppo_clip", terms_of([5.0], [-1.0], "M"), clip_ratio_c=None)
    assert loss == pytest.approx([5.0]) and gradient == pytest.approx([5.0])
    assert metrics["actor/pg_clipfrac_lower"] == 0.0


def test_gspo_uses_the_ratio_of_the_sequence():
    # row 0: ratios 2 and 8 around a tool's token, geometric mean 4 (clipped at 1.5 as A > 0)
    # row 1: ratios 1.2 and 1.2, geometric mean 1.2
    terms = terms_of([2.0, 1.0, 8.0, 1.2, 1.2], [1.0, 0.0, 1.0, 2.0, 2.0], "M.M MM")
    loss, gradient, metrics, _ = evaluate("gspo", terms, clip_ratio_low=0.5, clip_ratio_high=0.5)
    assert loss == pytest.approx([-1.5, 0, -1.5, -2.4, -2.4], rel=1e-5)
    assert gradient == pytest.approx([0, 0, 0, -2.4, -2.4], rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.5)
    assert metrics["actor/ratio_mean"] == pytest.approx((4 + 4 + 1.2 + 1.2) / 4)


def test_gspo_gradient_is_that_of_the_sequence_objective():
    # GSPO-token with one advantage a sequence equals GSPO: loss -A s averaged over the |y| tokens, s = exp(mean log r)
    terms = terms_of([1.1, 0.9, 1.3], [1.5, 1.5, 1.5], "MMM")
    _, gradient, _, _ = evaluate("gspo", terms, clip_ratio_low=1.0, clip_ratio_high=9.0)
    logprobs = terms.logprobs.detach().requires_grad_()
    (-1.5 * (logprobs - terms.old_logprobs).mean().exp()).backward()
    assert [g / 3 for g in gradient] == pytest.approx(logprobs.grad.tolist())


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    terms = terms_of([0.5, 3.0, 1.0], [1.0, 2.0, -1.0], "MMM", logprobs=[-1.0, -2.0, -4.0])
    loss, gradient, metrics, _ = evaluate("cispo", terms, clip_ratio_low=0.2, clip_ratio_high=0.5)
    assert loss == pytest.approx([0.8, 6.0, -4.0])
    assert gradient == pytest.approx([-0.8, -3.0, 1.0])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)


def test_sapo_by_hand():
    terms = terms_of([1.0, 2.0, 2.0], [1.0, 1.0, -1.0], "MMM")
    loss, gradient, metrics, _ = evaluate("sapo", terms, sapo_tau_pos=1.0, sapo_tau_neg=2.0)
    s1, s2 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert loss == pytest.approx([-2.0, -4 * s1, 2 * s2])
    # d gate / d log p = r 4 s (1 - s)
    assert gradient == pytest.approx([-1.0, -2 * 4 * s1 * (1 - s1), 2 * 4 * s2 * (1 - s2)])
    assert metrics["actor/sapo_gate"] == pytest.approx((1 + 4 * s1 * (1 - s1) + 4 * s2 * (1 - s2)) / 3)


def test_reinforce_by_hand():
    loss, gradient, _, _ = evaluate("reinforce", terms_of([2.0, 1.0], [3.0, -1.0], "MM", logprobs=[-0.5, -2.0]))
    assert loss == [1.5, -2.0]
    assert gradient == [-3.0, 1.0]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_report_over_response_tokens_only(name):
    _, gradient, metrics, raw = evaluate(name, terms_of([1.0, 7.0, 1.0], [1.0, 1.0, 1.0], "M.M"))
    assert gradient[1] == 0.0
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0) and raw["actor/ratio_mean"].weight == 2


@pytest.mark.parametrize("name", LOSSES)
def test_losses_stay_finite_when_the_policy_has_moved_far(name):
    terms = terms_of([1.0, 1.0], [1.0, -1.0], "MM")
    terms.old_logprobs = terms.old_logprobs - 1000.0
    loss, gradient, _, _ = evaluate(name, terms)
    assert all(map(math.isfinite, loss + gradient))


# --- enumerated categorical: every action is a sequence of one token, weighted by its probability ---

ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, -0.25, 3.0], dtype=torch.float64)
LOGITS = torch.tensor([0.3, -0.7, 1.1, 0.0, -2.0], dtype=torch.float64)
OLD = torch.tensor([0.25, 0.05, 0.3, 0.3, 0.1], dtype=torch.float64)


def expected_gradient(name, old, **cfg) -> torch.Tensor:
    """Gradient of the mean loss over actions sampled from `old`, with respect to the policy's logits."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    old = logp.detach().exp() if old is None else old
    terms = PolicyTerms(
        logprobs=logp,
        old_logprobs=old.log(),
        advantages=ADVANTAGES,
        response_mask=torch.ones(5, dtype=torch.bool),
        cu_seqlens=torch.arange(6),
        rollout_logprobs=old.log(),
    )
    (old * POLICY_LOSSES.get(name)(terms, AlgoConfig(loss_mode=name, **cfg)).loss).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(name):
    logits = LOGITS.clone().requires_grad_()
    (-(logits.softmax(0) * ADVANTAGES).sum()).backward()
    torch.testing.assert_close(expected_gradient(name, None), logits.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_off_policy_gradient_is_that_of_the_surrogate(name):
    """sum_a old(a) c(a) grad log p(a), where c is the loss's derivative by log p, written down by hand."""
    low, high = 0.2, 0.3
    p = LOGITS.softmax(0)
    ratio = p / OLD
    clipped_away = ((ADVANTAGES > 0) & (ratio > 1 + high)) | ((ADVANTAGES < 0) & (ratio < 1 - low))
    assert clipped_away.any() and not clipped_away.all()
    tau = torch.where(ADVANTAGES > 0, 1.0, 1.05).double()
    s = torch.sigmoid(tau * (ratio - 1))
    slope = {
        "ppo_clip": torch.where(clipped_away, 0.0, ratio),
        "gspo": torch.where(clipped_away, 0.0, ratio),
        "cispo": ratio.clamp(1 - low, 1 + high),
        "sapo": 4 * s * (1 - s) * ratio,
        "reinforce": torch.ones_like(ratio),
    }[name]
    scores = torch.eye(5, dtype=torch.float64) - p  # row a: grad log p(a) by the logits
    analytic = -(OLD * ADVANTAGES * slope) @ scores
    gradient = expected_gradient(name, OLD, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=None)
    torch.testing.assert_close(gradient, analytic, rtol=1e-6, atol=1e-7)


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 3.0, 0.0, 9.0], requires_grad=True)
    old, returns = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([2.0, 4.0, 0.5, 0.0])
    mask = torch.tensor([True, True, True, False])
    token = value_loss(values, old, returns, mask, cliprange=0.5)
    # held values 1, 1.5, 0.5: losses max(.5, .5), max(.5, 3.125), max(.125, 0)
    assert token.loss[:3].tolist() == [0.5, 3.125, 0.125]
    (gradient,) = torch.autograd.grad(token.loss[:3].sum(), values)
    assert gradient.tolist() == [-1.0, 0.0, -0.5, 0.0]
    assert token.metrics["critic/vf_clipfrac"].value == pytest.approx(1 / 3)
    assert token.metrics["critic/vpred_mean"].value == pytest.approx(4 / 3)


def test_value_loss_without_clip_is_half_the_squared_error():
    token = value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([True]), None)
    assert token.loss.tolist() == [2.0]
    assert token.metrics["critic/vf_clipfrac"].value == 0.0
