import asyncio

import pytest
import torch

from rlpost.batch import Batch
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.nonfinite import NonFinite
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


class Inferring:
    """Trainer ranks that find one logprob for all tokens; `seen`: the engine's logprobs of the rows first asked for."""

    def __init__(self, logprob=-1.0):
        self.logprob, self.seen = logprob, None

    async def infer(self, column, batch, *, temperature=None):
        self.seen = self.seen or batch["rollout_logprobs"].tolist()
        return Batch(batch.cu_seqlens, {column: torch.full((batch.num_tokens,), self.logprob)})


def check(workers, old, rollout, version=1, limit=1e-3, probe_size=2):
    """What a gate reports of rows of one token each, sampled by version 1."""
    rows = Batch(
        torch.arange(len(old) + 1),
        {
            "old_logprobs": torch.tensor(old),
            "rollout_logprobs": torch.tensor(rollout),
            "versions": torch.ones(len(old)),
            "response_mask": torch.ones(len(old), dtype=torch.bool),
        },
    )
    gate = ParityGate(workers, limit=limit, probe_size=probe_size, n=1, temperature=1.0)
    return asyncio.run(gate.check(rows, version))


def test_gate_without_old_logprobs_infers_rows_that_it_can_compare():
    """The engine was asked about the last two of four rows, the trainer about none, or the others."""
    for old in ([NOT_ASKED] * 4, [-9.0, -9.0, NOT_ASKED, NOT_ASKED]):
        workers = Inferring()
        metrics = check(workers, old, [NOT_ASKED, NOT_ASKED, -1.0, -1.0], probe_size=1)
        assert workers.seen == [-1.0]
        assert metrics["train_rollout_logprob_abs_diff/mean"].value == 0.0


def test_gate_compares_the_rows_of_which_both_logprobs_are_there_and_infers_none():
    workers = Inferring()
    metrics = check(workers, [NOT_ASKED, -1.5, -7.0, NOT_ASKED], [-1.0, -1.0, NOT_ASKED, NOT_ASKED], limit=1.0)
    assert {name.partition("/")[2]: metric.value for name, metric in metrics.items()} == {
        "mean": 0.5,
        "p99": 0.5,
        "max": 0.5,
        "tokens": 1.0,
    }
    assert workers.seen is None


def test_gate_tries_other_temperatures_on_the_tokens_that_it_compared():
    """The trainer's logprob would be right for the first row, which was not compared."""
    workers = Inferring(-1.0)
    with pytest.raises(ParityError, match="over 1 tokens .*higher throughout"):
        check(workers, [NOT_ASKED, -9.0], [-1.0, -3.0], limit=1.5)
    assert workers.seen == [-3.0]


def test_gate_infers_nothing_where_the_engine_has_nothing_to_compare_with():
    workers = Inferring()
    assert check(workers, [NOT_ASKED, -1.0], [NOT_ASKED, NOT_ASKED]) == {} and workers.seen is None
    assert check(workers, [NOT_ASKED, NOT_ASKED], [-1.0, -1.0], version=2) == {} and workers.seen is None


def test_gate_stops_where_the_rows_that_it_had_to_infer_differ():
    with pytest.raises(ParityError, match="is 2.00e\\+00 over 1 tokens"):
        check(Inferring(), [NOT_ASKED, -1.0], [-3.0, NOT_ASKED])


def test_gate_stops_where_a_logprob_that_it_had_to_infer_is_no_number():
    with pytest.raises(NonFinite, match="old_logprobs is nan"):
        check(Inferring(float("nan")), [NOT_ASKED, NOT_ASKED], [-3.0, -3.0])
