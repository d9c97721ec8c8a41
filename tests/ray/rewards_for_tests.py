"""Rewards that tests name by dotted path."""

from rlpost.rewards.base import RewardError


async def length(prompt, answers, **kwargs):
    """The number of sampled tokens; prompts called `bad` cannot be scored."""
    if prompt.text == "bad":
        raise RewardError("no ground truth")
    return [float(len(answer.token_ids)) for answer in answers]
