import pytest

from rlpost.metrics import Metric, Reduce, Timers, mean, merge, scalars


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


def test_what_two_roles_report_alike_is_reduced_and_what_one_reports_stays():
    """As `ModelWorker.train` names them: a role's own under its name, those of the process under one name."""
    actor = {"actor/loss": Metric(1.0, 3), "memory": Metric(5.0, reduce=Reduce.MAX), "rate": Metric(1.0, 6)}
    critic = {"critic/loss": Metric(2.0, 3), "memory": Metric(4.0, reduce=Reduce.MAX), "rate": Metric(0.0, 2)}
    expected = {"actor/loss": 1.0, "critic/loss": 2.0, "memory": 5.0, "rate": 0.75}
    assert scalars(merge([actor, critic])) == scalars(merge([critic, actor])) == expected


def test_mean_weighs_by_count_and_of_nothing_is_left_out():
    assert mean([1.0, 0.0]) + mean([4.0]) == Metric(5.0 / 3, 3)
    assert mean([4.0]) + mean([]) == Metric(4.0, 1)
    assert scalars({"none": mean([])}) == {}
