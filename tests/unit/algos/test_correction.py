"""Rollout correction by hand: two sequences, proximal / behaviour ratios (4, [tool], 1) and (1/4, 1/4)."""

import math

import pytest
import torch

from rlpost.algos.config import RolloutCorrectionConfig
from rlpost.algos.correction import rollout_correction
from rlpost.trajectory import NOT_ASKED

MASK = torch.tensor([True, False, True, True, True])
CU = torch.tensor([0, 3, 5])
RATIOS = torch.tensor([4.0, 1000.0, 1.0, 0.25, 0.25])  # the tool's token does not count


def correct(**cfg):
    rollout = torch.full((5,), -2.0)
    return rollout_correction(rollout + RATIOS.log(), rollout, MASK, CU, RolloutCorrectionConfig(**cfg))


def value(correction, name):
    assert correction.metrics[f"rollout_corr/{name}"].weight == 4
    return correction.metrics[f"rollout_corr/{name}"].value


@pytest.mark.parametrize(
    ("level", "threshold", "weights", "truncated"),
    [
        ("token", 2.0, [2, 1, 0.25, 0.25], 1 / 4),
        ("sequence", 3.0, [3, 3, 1 / 16, 1 / 16], 2 / 4),
        ("geometric", 3.0, [2, 2, 0.25, 0.25], 0.0),
    ],
)
def test_truncated_importance_weights(level, threshold, weights, truncated):
    correction = correct(rollout_is=level, rollout_is_threshold=threshold)
    assert correction.weights[MASK].tolist() == pytest.approx(weights)
    assert correction.keep.tolist() == MASK.tolist()
    assert value(correction, "rollout_is_mean") == pytest.approx(sum(weights) / 4)
    assert value(correction, "rollout_is_truncated_fraction") == truncated


@pytest.mark.parametrize(
    ("level", "threshold", "lower", "keep"),
    [
        ("token", 2.0, None, [False, True, False, False]),
        ("token", 4.0, None, [True, True, True, True]),
        ("token", 2.0, 0.2, [False, True, True, True]),
        ("sequence", 4.0, None, [True, True, False, False]),
        ("sequence", 2.0, 0.01, [False, False, True, True]),
        ("geometric", 2.0, None, [True, True, False, False]),
        ("geometric", 1.5, 0.2, [False, False, True, True]),
    ],
)
def test_rejection_by_bounds(level, threshold, lower, keep):
    correction = correct(rollout_rs=level, rollout_rs_threshold=threshold * 1.0001, rollout_rs_threshold_lower=lower)
    assert correction.keep[MASK].tolist() == keep
    assert not correction.keep[~MASK].any()
    assert torch.equal(correction.weights, torch.ones(5))
    assert value(correction, "rollout_rs_masked_fraction") == keep.count(False) / 4


def test_token_veto_rejects_the_whole_sequence():
    rollout = torch.full((5,), -2.0)
    old = rollout + torch.tensor([0.001, 0.0, 1.0, 0.5, 1.0]).log()
    cfg = RolloutCorrectionConfig(rollout_token_veto_threshold=0.01)
    correction = rollout_correction(old, rollout, MASK, CU, cfg)
    assert correction.keep.tolist() == [False, False, False, True, True]
    assert value(correction, "veto_fraction") == 0.5


def test_without_correction_the_mismatch_is_still_measured():
    correction = correct()
    assert torch.equal(correction.weights, torch.ones(5)) and correction.keep.tolist() == MASK.tolist()
    logs = [math.log(4), 0.0, -math.log(4), -math.log(4)]
    assert value(correction, "kl") == pytest.approx(-sum(logs) / 4)
    assert value(correction, "k3_kl") == pytest.approx(sum(math.exp(x) - 1 - x for x in logs) / 4)


def test_correction_has_no_gradient():
    old = torch.full((5,), -1.0, requires_grad=True)
    cfg = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="token")
    assert not rollout_correction(old, torch.zeros(5), MASK, CU, cfg).weights.requires_grad


def test_long_sequence_ratio_stays_finite():
    n = 5000
    cfg = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="sequence")
    correction = rollout_correction(
        torch.zeros(n), torch.full((n,), -1.0), torch.ones(n, dtype=torch.bool), torch.tensor([0, n]), cfg
    )
    assert correction.weights.tolist() == [2.0] * n and not correction.keep.any()


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("rollout_is", "tokens"),
        ("rollout_is_threshold", 0.5),
        ("rollout_rs_threshold", 0.0),
        ("rollout_rs_threshold_lower", 1.5),
        ("rollout_token_veto_threshold", -0.1),
    ],
)
def test_correction_config_names_the_wrong_key(key, wrong):
    with pytest.raises(ValueError, match=f"algo.rollout_correction.{key}={wrong}"):
        RolloutCorrectionConfig(**{key: wrong})


def test_tokens_whose_logprob_was_not_asked_for_are_not_measured_and_not_dropped():
    rollout = torch.full((5,), -2.0)
    rollout[3:] = NOT_ASKED
    correction = rollout_correction(torch.full((5,), -1.9), rollout, MASK, CU, RolloutCorrectionConfig())
    assert correction.keep.tolist() == MASK.tolist() and correction.weights.tolist() == [1.0] * 5
    kl = correction.metrics["rollout_corr/kl"]
    assert (kl.value, kl.weight) == (pytest.approx(-0.1), 2)
