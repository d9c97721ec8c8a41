"""Merged adapters in the engine's dtype."""

import pytest
import torch

from rlpost.workers.engine.weights import round_stochastically


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_change_below_the_last_bit_is_there_on_average(dtype):
    weights = (torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype).float()
    change = weights * 1e-4  # of a last bit of 5e-4 to 8e-3
    assert torch.equal((weights + change).to(dtype).float(), weights) or dtype == torch.float16
    rounded = [round_stochastically(weights + change, dtype, seed).float() - weights for seed in range(300)]
    assert float((torch.stack(rounded).mean(0) * change.sign()).sum() / change.abs().sum()) == pytest.approx(1, abs=0.1)
    assert all((r.abs() <= torch.finfo(dtype).eps * weights.abs() * 1.01).all() for r in rounded)
    assert torch.equal(rounded[0], round_stochastically(weights + change, dtype, 0).float() - weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_the_dtype_stay(dtype):
    exact = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0, 2.0**-13])
    assert all(torch.equal(round_stochastically(exact, dtype, seed).float(), exact) for seed in range(20))
