"""KL estimators: values by hand, and gradients against a categorical policy whose actions are all enumerated."""

import math

import pytest
import torch

from rlpost.algos.config import KL_LOSSES, KL_PENALTIES, AlgoConfig, KLControlConfig
from rlpost.algos.kl import kl_controller, kl_estimate

LOGITS = [0.3, -0.7, 1.1, 0.0]
REFERENCE = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("k1", LN2),
        ("k2", LN2**2 / 2),
        ("k3", 0.5 - 1 + LN2),
        ("low_var_kl", 0.5 - 1 + LN2),
        ("abs", LN2),
        ("k1+", LN2),
        ("k3+", 0.5 - 1 + LN2),
    ],
)
def test_kl_value_by_hand(kind, value):
    # the policy gives twice the reference's probability; the second token is not response, and its logprobs are wild
    logprobs, ref = torch.tensor([-1.0, math.nan]), torch.tensor([-1.0 - LN2, -math.inf])
    mask = torch.tensor([True, False])
    assert kl_estimate(kind, logprobs, ref, mask).tolist() == pytest.approx([value, 0.0])


def test_every_kl_kind_of_the_config_is_tested_by_value():
    assert {*KL_PENALTIES, *KL_LOSSES} == {"k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+"}


def test_low_var_kl_is_clamped_and_k3_stays_finite():
    far = torch.tensor([-100.0]), torch.tensor([0.0]), torch.tensor([True])
    assert kl_estimate("low_var_kl", *far).tolist() == [10.0]
    assert kl_estimate("k3", *far).item() == pytest.approx(math.exp(20) - 21)


def gradient_of(objective) -> torch.Tensor:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    objective(logits.log_softmax(0)).backward()
    assert logits.grad is not None
    return logits.grad


def reverse_kl(logp):
    return (logp.exp() * (logp - REFERENCE.log())).sum()


def forward_kl(logp):
    return (REFERENCE * (REFERENCE.log() - logp)).sum()


def nothing(logp):
    return (logp * 0).sum()


def l1_distance(logp):
    return (logp.exp() - REFERENCE).abs().sum()


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("k1", nothing),
        ("k2", reverse_kl),
        ("k3", forward_kl),
        ("low_var_kl", forward_kl),
        ("abs", l1_distance),
        ("k1+", reverse_kl),
        ("k3+", reverse_kl),
    ],
)
def test_kl_loss_gradient_is_that_of_the_tabled_objective(kind, objective):
    def sampled(logp):  # every action, weighted by the probability that the policy samples it (which has no gradient)
        everywhere = torch.ones(len(LOGITS), dtype=torch.bool)
        return (logp.detach().exp() * kl_estimate(kind, logp, REFERENCE.log(), everywhere)).sum()

    torch.testing.assert_close(gradient_of(sampled), gradient_of(objective))


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_kl_value_is_unbiased(kind):
    logp = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(0)
    mean = (logp.exp() * kl_estimate(kind, logp, REFERENCE.log(), torch.ones(4, dtype=torch.bool))).sum()
    torch.testing.assert_close(mean, reverse_kl(logp))


def test_k1_as_a_loss_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"kl_loss_type=k1: .*zero.*k1\+"):
        AlgoConfig(kl_loss_type="k1")


def test_unknown_kl_kinds_are_refused():
    with pytest.raises(ValueError, match="kl_loss_type=k4: expected one of"):
        AlgoConfig(kl_loss_type="k4")
    with pytest.raises(ValueError, match=r"kl_penalty=k3\+: expected one of"):
        AlgoConfig(kl_penalty="k3+")


def test_fixed_controller_stays():
    controller = kl_controller(KLControlConfig(kl_coef=0.2))
    controller.update(5.0, 64)
    assert controller.coef == 0.2


def test_adaptive_controller_follows_ziegler():
    controller = kl_controller(KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=1000))
    controller.update(0.11, 50)  # error 0.1
    assert controller.coef == pytest.approx(0.2 * 1.005)
    controller.update(9.0, 50)  # error clipped to 0.2
    assert controller.coef == pytest.approx(0.2 * 1.005 * 1.01)
    controller.update(0.0, 50)  # error clipped to -0.2
    assert controller.coef == pytest.approx(0.2 * 1.005 * 1.01 * 0.99)
