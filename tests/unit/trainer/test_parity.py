import asyncio

import pytest
import torch

from rlpost.batch import Batch
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.parity import Parity, ParityError, compare, likely_cause
from rlpost.trajectory import NOT_ASKED


def batch(old, rollout, versions, mask):
    return Batch(
        torch.tensor([0, len(old)]),
        {
            "old_logprobs": torch.tensor(old),
            "rollout_logprobs": torch.tensor(rollout),
            "versions": torch.tensor(versions),
            "response_mask": torch.tensor(mask),
        },
    )


def test_compare_counts_only_response_tokens_of_the_version():
    parity = compare(
        batch([0.0, -1.0, -2.0, -9.0], [5.0, -1.1, -1.8, 0.0], [-1, 4, 4, 3], [False, True, True, True]), 4
    )
    assert parity.num_tokens == 2
    assert parity.mean == pytest.approx(0.15) and parity.max == pytest.approx(0.2)
    assert parity.signed_mean == pytest.approx(0.05)


def test_compare_of_nothing_reports_nothing():
    parity = compare(batch([0.0], [0.0], [0], [True]), 1)
    assert parity.num_tokens == 0 and parity.metrics() == {}


def test_likely_cause_tells_stale_weights_sampling_and_precision_apart():
    big = Parity(mean=0.5, p99=2, max=3, signed_mean=0.0, num_tokens=100)
    assert likely_cause(big, after_push=1e-5, other_temperature={}, limit=1e-3).startswith("stale weights")
    assert "temperature 1.0" in likely_cause(big, 0.5, {0.7: 0.4, 1.0: 1e-5}, 1e-3)
    higher = Parity(mean=0.5, p99=2, max=3, signed_mean=0.49, num_tokens=100)
    assert "renormalises" in likely_cause(higher, 0.5, {}, 1e-3)
    small = Parity(mean=0.05, p99=0.1, max=0.2, signed_mean=0.0, num_tokens=100)
    assert likely_cause(small, 0.05, {}, 1e-3).startswith("precision")
    assert "tied" in likely_cause(big, 0.5, {}, 1e-3)


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_gate_stops_at_a_logprob_that_is_no_number(wrong):
    bad = batch([0.0, wrong], [0.0, -1.0], [-1, 1], [False, True])

    class Workers:
        async def infer(self, column, batch, temperature=None):
            return Batch(batch.cu_seqlens, {column: batch[column]})

    gate = ParityGate(Workers(), limit=1e-3, probe_size=1, n=1, temperature=1.0)
    with pytest.raises(ParityError, match="overflow.*actor/grad_norm"):
        asyncio.run(gate.check(bad, version=1))


def test_compare_leaves_out_what_the_engine_was_not_asked_for():
    parity = compare(batch([-1.0, -2.0], [NOT_ASKED, -2.5], [1, 1], [True, True]), 1)
    assert parity.num_tokens == 1 and parity.mean == pytest.approx(0.5)


def test_gate_without_old_logprobs_infers_rows_that_it_can_compare():
    """Three rows of one token, of which the engine was asked about the last."""

    class Workers:
        async def infer(self, column, batch, temperature=None):
            self.seen = batch["rollout_logprobs"].tolist()
            return Batch(batch.cu_seqlens, {column: torch.full((batch.num_tokens,), -1.0)})

    rows = Batch(
        torch.tensor([0, 1, 2, 3]),
        {
            "rollout_logprobs": torch.tensor([NOT_ASKED, NOT_ASKED, -1.0]),
            "versions": torch.tensor([1, 1, 1]),
            "response_mask": torch.tensor([True, True, True]),
        },
    )
    workers = Workers()
    metrics = asyncio.run(ParityGate(workers, limit=1e-3, probe_size=2, n=1, temperature=1.0).check(rows, version=1))
    assert workers.seen == [-1.0]
    assert metrics["train_rollout_logprob_abs_diff/mean"].value == 0.0
