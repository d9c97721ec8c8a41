"""Rewards that tests name by dotted path."""

from rlpost.rewards.base import RewardError
from rlpost.rewards.limits import ErrorKind


async def length(prompt, answers, **kwargs):
    """The number of sampled tokens; prompts called `bad` cannot be scored."""
    if prompt.text == "bad":
        raise RewardError("no ground truth")
    return [float(len(answer.token_ids)) for answer in answers]


async def first_fails(prompt, answers):
    """No score for the first answer of a group."""
    return [RewardError("no score", ErrorKind.CRASH), *[1.0 for _ in answers[1:]]]
