"""The summary's before and after."""

import pytest

from rlpost.tracking.tracking import Tracking
from rlpost.trainer.report import Reporter


@pytest.mark.parametrize(
    ("steps", "before", "after"), [((0, 10, 20), 0.0, 0.5), ((10, 20), None, 0.5), ((0,), 0.0, None), ((), None, None)]
)
def test_summary_tells_validations_before_and_after_the_first_step_apart(tmp_path, steps, before, after):
    reporter = Reporter(Tracking(), tmp_path, decode=str, rollout_dir=None)
    for step in steps:
        reporter.validation(step, {"val/addition/accuracy": step / 40}, [])
    summary = reporter.summary(20, 1.0, finished=True)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (before, after)


def test_summary_speaks_of_the_sets_of_the_last_validation(tmp_path):
    reporter = Reporter(Tracking(), tmp_path, decode=str, rollout_dir=None)
    reporter.validation(0, {"val/before_the_resume/accuracy": 0.5}, [])
    reporter.validation(10, {"val/now/reward": 3.0, "val/now/accuracy": 0.25}, [])
    summary = reporter.summary(10, 1.0, finished=True)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, 0.25)
