import pytest

from rlpost.metrics import Metric, Reduce, Timers, merge, scalars


def test_merge_weighs_means_and_reduces_the_rest_as_declared():
    merged = merge(
        [
            {"loss": Metric(1.0, 3), "tokens": Metric(3, reduce=Reduce.SUM), "top": Metric(2, reduce=Reduce.MAX)},
            {"loss": Metric(5.0, 1), "tokens": Metric(1, reduce=Reduce.SUM), "top": Metric(1, reduce=Reduce.MAX)},
        ]
    )
    assert scalars(merged) == {"loss": 2.0, "tokens": 4, "top": 2}


def test_scalars_leaves_out_a_mean_over_nothing():
    assert scalars(merge([{"loss": Metric(0.0, 0)}, {"loss": Metric(0.0, 0)}])) == {}


def test_merge_refuses_two_reductions_of_one_name():
    with pytest.raises(ValueError, match="reduced as"):
        merge([{"a": Metric(1)}, {"a": Metric(1, reduce=Reduce.SUM)}])


def test_timers_add_up_a_phase_and_start_anew_after_pop():
    timers = Timers()
    for _ in range(2):
        with timers("infer"):
            pass
    taken = timers.pop()
    assert list(taken) == ["timing_s/infer"] and taken["timing_s/infer"].value >= 0
    assert timers.pop() == {}
