"""Two trainer ranks, one of which stays away from a collective."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlpost.host import free_port
from rlpost.platform import platform
from rlpost.workers.model_worker import ModelWorker

LIMIT_S = 4.0
FAR_S = 120.0


def exit_code_of_the_rank_that_waits(gpus: bool) -> int:
    """That of rank 0, which waits for rank 1 in an `all_reduce` of a process group whose limit is `LIMIT_S`.

    Raises:
        AssertionError: it waits for `FAR_S`.
    """
    address, context = f"tcp://127.0.0.1:{free_port()}", mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, address, gpus)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        ranks[0].join(FAR_S)
        assert ranks[0].exitcode is not None, f"rank 0 waits for longer than {FAR_S:g} s"
        return ranks[0].exitcode
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _rank(rank: int, address: str, gpus: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank) if gpus else ""
    torch.set_num_threads(1)
    ModelWorker(rank, 2).connect(address, LIMIT_S)
    ones = torch.ones(2, device=platform().device())
    dist.all_reduce(ones)  # both have come, and the connections are made
    platform().synchronize()
    if rank == 1:
        time.sleep(2 * FAR_S)
    dist.all_reduce(ones)
    platform().synchronize()
