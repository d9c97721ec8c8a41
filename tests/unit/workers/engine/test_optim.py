"""Learning rates, by hand."""

import pytest

from rlpost.workers.config import OptimConfig
from rlpost.workers.engine.optim import learning_rate


def _rates(kind: str, updates, total: int | None = 12, **overrides) -> list[float]:
    cfg = OptimConfig(**({"lr": 1.0, "lr_warmup_steps": 2, "lr_scheduler_type": kind} | overrides))
    return [learning_rate(i, cfg, total) for i in updates]


def test_warmup_is_linear_and_never_zero():
    assert _rates("constant", range(4), total=None, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays():
    assert _rates("constant", (2, 50), total=None) == [1.0, 1.0]


def test_linear_falls_to_its_floor():
    assert _rates("linear", (2, 7, 12, 20), min_lr_ratio=0.1) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_cosine_is_halfway_in_the_middle():
    assert _rates("cosine", (2, 7, 12)) == pytest.approx([1.0, 0.5, 0.0], abs=1e-12)


def test_decay_needs_the_length_of_the_run():
    with pytest.raises(ValueError, match="lr_scheduler_type=cosine needs the total number of updates"):
        _rates("cosine", (2,), total=None)
