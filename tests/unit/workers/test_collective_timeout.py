"""`trainer.timeouts` reach the process group: a rank does not wait for ever for one that stays away."""

from tests.unit.workers.absent import exit_code_of_the_rank_that_waits


def test_rank_that_waits_for_an_absent_one_gives_up_on_gloo():
    assert exit_code_of_the_rank_that_waits(gpus=False) == 1  # with an error, which the driver reports
