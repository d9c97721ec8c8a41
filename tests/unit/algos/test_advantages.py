"""Every estimator against arithmetic done by hand."""

import math

import pytest
import torch

from rlpost.algos.advantages import ESTIMATORS, discounted_sums, masked_whiten
from rlpost.algos.config import AlgoConfig

# four answers of two prompts, groups interleaved; the third has a tool's text between its tokens
ROWS, GROUP = ".MM .M M.M ..M", [7, 3, 7, 3]
REWARDS = [0, 0, 1, 0, 2, 0, 0, 3, 0, 0, 6]  # scores 1, 2, 3, 6


def estimate(name, batch, **cfg):
    return ESTIMATORS.get(name)(batch, AlgoConfig(adv_estimator=name, **cfg))


def test_gae_ragged_rows_by_hand(make_batch):
    batch = make_batch(
        ".MM M.M",
        [0, 1],
        rewards=[0, 0, 1, 0, 0, 2],
        values=[9, 0.5, 0.25, 1, 9, 0.5],
    )
    out = estimate("gae", batch, gamma=0.5, lam=0.5)
    # row 0: delta = (0 + .5*.25 - .5, 1 - .25) = (-.375, .75); A = (-.375 + .25*.75, .75)
    # row 1: the tool's token (value 9) is skipped: delta = (0 + .5*.5 - 1, 2 - .5) = (-.75, 1.5); A = (-.375, 1.5)
    assert out["advantages"].tolist() == [0, -0.1875, 0.75, -0.375, 0, 1.5]
    assert out["returns"].tolist() == [0, 0.3125, 1.0, 0.625, 0, 2.0]


def test_gae_undiscounted_is_return_minus_value(make_batch):
    batch = make_batch("MMM", [0], rewards=[1, 2, 4], values=[0.5, 0.25, 8])
    out = estimate("gae", batch)
    assert out["advantages"].tolist() == [6.5, 5.75, -4]
    assert out["returns"].tolist() == [7, 6, 4]


def test_gae_unusable_row_gets_zero(make_batch):
    batch = make_batch("MM MM", [0, 1], [True, False], rewards=[0, 1, 0, math.nan], values=[0, 0, 5, 5])
    out = estimate("gae", batch)
    assert out["advantages"].tolist() == [1, 1, 0, 0]
    assert out["returns"].tolist() == [1, 1, 0, 0]


def test_gae_whitens_advantages_but_not_returns(make_batch):
    batch = make_batch(".MM", [0], rewards=[0, 1, 2], values=[0, 0, 0])
    out = estimate("gae", batch, whiten_advantages=True)
    assert out["advantages"].tolist() == pytest.approx([0, math.sqrt(0.5), -math.sqrt(0.5)])
    assert out["returns"].tolist() == [0, 3, 2]


def test_grpo_groups_by_id_with_std(make_batch):
    out = estimate("grpo", make_batch(ROWS, GROUP, rewards=REWARDS))
    # group 7: (1, 3), mean 2, sample deviation sqrt(2); group 3: (2, 6), mean 4, sample deviation sqrt(8)
    a = 1 / (math.sqrt(2) + 1e-6)
    b = 2 / (math.sqrt(8) + 1e-6)
    assert out["advantages"].tolist() == pytest.approx([0, -a, -a, 0, -b, a, 0, a, 0, 0, b])


def test_grpo_without_std(make_batch):
    out = estimate("grpo", make_batch(ROWS, GROUP, rewards=REWARDS), norm_adv_by_std_in_grpo=False)
    assert out["advantages"].tolist() == [0, -1, -1, 0, -2, 1, 0, 1, 0, 0, 2]


def test_grpo_equal_scores_give_exactly_zero(make_batch):
    out = estimate("grpo", make_batch("M M M", [0, 0, 0], rewards=[0.1, 0.1, 0.1]))
    assert out["advantages"].tolist() == [0, 0, 0]


def test_rloo_subtracts_the_mean_of_the_others(make_batch):
    out = estimate("rloo", make_batch("M .M MM", [5, 5, 5], rewards=[1, 0, 2, 0, 6]))
    # 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2
    assert out["advantages"].tolist() == [-3, 0, -1.5, 4.5, 4.5]


def test_reinforce_plus_plus_whitens_discounted_returns(make_batch):
    batch = make_batch(".MM M.M", [0, 1], rewards=[0, 1, 2, 0, 0, 4])
    out = estimate("reinforce_plus_plus", batch, gamma=0.5)
    # returns-to-go 2, 2, 2, 4: mean 2.5, sample variance 1
    assert out["advantages"].tolist() == pytest.approx([0, -0.5, -0.5, -0.5, 0, 1.5])


def test_reinforce_plus_plus_baseline_whitens_over_tokens(make_batch):
    out = estimate("reinforce_plus_plus_baseline", make_batch(ROWS, GROUP, rewards=REWARDS))
    # centred tokens: -1 -1 -2 1 1 2: mean 0, sample variance 12/5
    s = math.sqrt(12 / 5)
    assert out["advantages"].tolist() == pytest.approx([x / s for x in [0, -1, -1, 0, -2, 1, 0, 1, 0, 0, 2]])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_group_estimators_leave_unusable_rows_out(make_batch, name):
    whole = make_batch("M M M", [1, 1, 1], [True, False, True], rewards=[1, math.nan, 3])
    without = make_batch("M M", [1, 1], rewards=[1, 3])
    with_gap = estimate(name, whole)["advantages"].tolist()
    low, high = estimate(name, without)["advantages"].tolist()
    assert with_gap == [low, 0, high]
    assert low < 0 < high


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("whiten", [False, True])
def test_group_with_one_usable_row_gets_zero(make_batch, name, whiten):
    batch = make_batch("M M M M", [0, 0, 1, 1], [True, False, True, True], rewards=[5, 5, 1, 4])
    advantages = estimate(name, batch, whiten_advantages=whiten)["advantages"].tolist()
    assert advantages[:2] == [0, 0]
    assert advantages[2] == -advantages[3] != 0


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimators_do_not_see_rewards_and_values_outside_the_response(make_batch, name):
    values = [0.1] * 11
    clean = make_batch(ROWS, GROUP, rewards=REWARDS, values=values)
    dirty = make_batch(ROWS, GROUP, rewards=REWARDS, values=values)
    outside = ~dirty["response_mask"]
    dirty["rewards"][outside] = 100.0
    dirty["values"][outside] = math.nan
    assert torch.equal(estimate(name, clean)["advantages"], estimate(name, dirty)["advantages"])


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimators_do_not_depend_on_the_order_of_rows(make_batch, name):
    batch = make_batch(ROWS, GROUP, rewards=REWARDS, values=[x / 10 for x in range(11)])
    order = [2, 0, 3, 1]
    here = batch.update(estimate(name, batch)).select(order)["advantages"]
    there = batch.select(order)
    torch.testing.assert_close(estimate(name, there)["advantages"], here)


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimators_accept_a_batch_without_response_tokens(make_batch, name):
    batch = make_batch(".. .", [0, 0], [False, False], rewards=[0, 0, 0], values=[0, 0, 0])
    assert estimate(name, batch)["advantages"].tolist() == [0, 0, 0]


def test_every_registered_estimator_has_a_test():
    assert ESTIMATORS.names() == ["gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"]


def test_discounted_sums_by_hand():
    assert discounted_sums(torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]]), 0.5).tolist() == [[3, 4, 4], [1, 0, 0]]


def test_masked_whiten_counts_masked_values_only():
    out = masked_whiten(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    assert out.tolist() == pytest.approx([-math.sqrt(0.5), 0, math.sqrt(0.5)])


def test_masked_whiten_single_value_is_zero():
    assert masked_whiten(torch.tensor([5.0, 1.0]), torch.tensor([True, False])).tolist() == [0, 0]
