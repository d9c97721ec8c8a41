"""Shares of tokens, by hand and under any partition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.algos.aggregate import AGGREGATIONS, loss_weights

# response tokens: 2, 1 and none (a failed sequence, which counts for nothing)
MASK = torch.tensor([0, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
CU = torch.tensor([0, 3, 5, 7])
EXPECTED = {
    "token-mean": [0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0],
    "seq-mean-token-mean": [0, 1 / 4, 1 / 4, 1 / 2, 0, 0, 0],
    "seq-mean-token-sum": [0, 1 / 2, 1 / 2, 1 / 2, 0, 0, 0],
    "seq-mean-token-sum-norm": [0, 1 / 20, 1 / 20, 1 / 20, 0, 0, 0],
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_loss_weights_by_hand(mode):
    assert loss_weights(MASK, CU, mode, scale_factor=10).tolist() == pytest.approx(EXPECTED[mode])


def test_every_registered_aggregation_has_a_test():
    assert AGGREGATIONS.names() == sorted(EXPECTED)


@pytest.mark.parametrize("mode", EXPECTED)
def test_sequences_without_response_do_not_change_the_shares(mode):
    shares = loss_weights(MASK, CU, mode, scale_factor=10)
    assert torch.equal(loss_weights(MASK[:5], CU[:3], mode, scale_factor=10), shares[:5])


@pytest.mark.parametrize("mode", EXPECTED)
def test_loss_weights_of_nothing_are_zero(mode):
    nothing = torch.zeros(4, dtype=torch.bool)
    assert loss_weights(nothing, torch.tensor([0, 1, 4]), mode, scale_factor=10).tolist() == [0, 0, 0, 0]
    assert loss_weights(nothing[:0], torch.tensor([0]), mode, scale_factor=10).shape == (0,)


def test_loss_weights_unknown_mode_names_the_near_one():
    with pytest.raises(ValueError, match="algo.loss_agg_mode=token-men.*'token-mean'"):
        loss_weights(MASK, CU, "token-men")


def test_loss_weights_norm_needs_its_constant():
    with pytest.raises(ValueError, match="loss_scale_factor"):
        loss_weights(MASK, CU, "seq-mean-token-sum-norm")


@given(st.data(), st.sampled_from(sorted(EXPECTED)))
@settings(max_examples=60, deadline=None)
def test_loss_weights_give_the_same_gradient_for_any_partition(data, mode):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8), label="lengths")
    bits = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)), label="mask")
    part_of_row = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)), label="parts")
    mask = torch.tensor(bits)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    shares = loss_weights(mask, cu, mode, scale_factor=7)
    features = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    part_of_token = torch.tensor(part_of_row).repeat_interleave(cu.diff())

    def gradient(parts: list[torch.Tensor]) -> torch.Tensor:
        theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        for part in parts:  # micro-batches of any rank; part may be empty
            ((theta * features[part]).exp() * shares[part]).sum().backward()
        assert theta.grad is not None
        return theta.grad

    whole = gradient([torch.arange(len(mask))])
    split = gradient([(part_of_token == p).nonzero().flatten() for p in range(4)])
    torch.testing.assert_close(split, whole)
    # and it is the loss that the mode's name says, computed the plain way
    losses = (0.3 * features).exp()
    rows = [losses[a:b][mask[a:b]] for a, b in zip(cu[:-1], cu[1:], strict=True)]
    rows = [row for row in rows if len(row)]
    plain = {
        "token-mean": lambda: torch.cat(rows).mean(),
        "seq-mean-token-mean": lambda: torch.stack([row.mean() for row in rows]).mean(),
        "seq-mean-token-sum": lambda: torch.stack([row.sum() for row in rows]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack([row.sum() / 7 for row in rows]).mean(),
    }
    expected = plain[mode]() if rows else torch.tensor(0.0, dtype=torch.float64)
    torch.testing.assert_close((losses * shares).sum(), expected, rtol=1e-6, atol=1e-7)
