"""Metrics of token tensors, on the host and on their way to it."""

import torch

from rlpost.algos.ragged import fetch, weighted_means
from rlpost.metrics import Metric, Reduce


def test_weighted_mean_leaves_out_what_weighs_nothing():
    columns = {"a": torch.tensor([1.0, torch.nan, 3.0]), "b": torch.tensor([True, True, False])}
    found = weighted_means(columns, torch.tensor([1.0, 0.0, 3.0]))
    assert found == {"a": Metric(2.5, 4.0), "b": Metric(0.25, 4.0)}
    assert weighted_means(columns, torch.zeros(3, dtype=torch.bool))["a"] == Metric(0.0, 0.0)


def test_fetch_gives_numbers_in_place_of_tensors():
    waiting = [
        {"a": Metric(torch.tensor(2.0), torch.tensor(4.0)), "count": Metric(3.0, reduce=Reduce.SUM)},
        {"a": Metric(torch.tensor(1.0), torch.tensor(0.5), Reduce.MAX)},
    ]
    plain = [{"a": Metric(2.0, 4.0), "count": Metric(3.0, reduce=Reduce.SUM)}, {"a": Metric(1.0, 0.5, Reduce.MAX)}]
    assert fetch(waiting) == plain
    assert fetch(plain) == plain and fetch([]) == []
    assert not any(isinstance(m.value, torch.Tensor) for part in fetch(waiting) for m in part.values())
