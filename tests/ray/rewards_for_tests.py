"""Rewards and workflows that `test_rollout_pool.py` names by dotted path."""

import numpy as np

from rlpost.rewards.base import RewardError
from rlpost.workers.rollout.workflow import trajectory


async def length(prompt, answers, **kwargs):
    """The number of sampled tokens; prompts called `bad` cannot be scored."""
    if prompt.text == "bad":
        raise RewardError("no ground truth")
    return [float(len(answer.token_ids)) for answer in answers]


async def two_turns(prompt, n, generate):
    """Each sample asks on its own, twice."""
    trajectories = []
    for i in range(n):
        (first,) = await generate(prompt.token_ids, key=f"{i}/0", max_tokens=2)
        (second,) = await generate(np.concatenate([prompt.token_ids, first.token_ids]), key=f"{i}/1")
        trajectories.append(trajectory(np.concatenate([prompt.token_ids, first.token_ids]), second, i))
    return trajectories


async def too_few(prompt, n, generate):
    """Breaks the contract."""
    return []
