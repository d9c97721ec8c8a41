"""What makes a run hang, found by its dotted path."""

import time

import torch.distributed as dist

from rlpost.algos.losses import POLICY_LOSSES


def rank_1_sleeps(terms, cfg):
    """A policy loss in which one rank stays away from the collective that the other waits in."""
    if dist.get_rank() == 1:
        time.sleep(600)
    return POLICY_LOSSES.get("ppo_clip")(terms, cfg)


async def block_the_loop(prompts):
    """A hook that holds up the driver's event loop."""
    time.sleep(600)


async def leave(prompts):
    """A hook that ends the driver with a status that says all is well."""
    raise SystemExit(0)
