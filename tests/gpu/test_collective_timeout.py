"""`trainer.timeouts` reach NCCL and RCCL."""

import pytest
import torch

from tests.unit.workers.absent import exit_code_of_the_rank_that_waits


@pytest.mark.gpu
def test_rank_that_waits_for_an_absent_one_gives_up_on_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two ranks on one")
    assert exit_code_of_the_rank_that_waits(gpus=True) != 0  # torch's own watchdog ends the process
