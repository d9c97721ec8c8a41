"""The term that asks a reward model; `workers/reward_model.py` serves it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlpost.rewards.base import Answer, register_reward
from rlpost.trajectory import Prompt

Messages = list[dict[str, Any]]
Score = Callable[[list[str | Messages]], Awaitable[list[float]]]  # the model, wherever it is served


@register_reward("reward_model")
async def reward_model(
    prompt: Prompt, answers: Sequence[Answer], *, reward_model: Score, chat: bool = False
) -> list[float]:
    """The score of the reward model that `reward.reward_model` describes.

    Args:
        chat: score the conversation in the reward model's own chat template, rather than the policy's text.

    Raises:
        ValueError: `chat` with a prompt that is not a list of messages.
    """
    if not chat:
        return await reward_model([prompt.text + answer.text for answer in answers])
    messages = prompt.extra_info.get("messages")
    if messages is None:
        raise ValueError("reward_model: chat=true needs a prompt of messages, but this one is a string")
    return await reward_model([[*messages, {"role": "assistant", "content": answer.text}] for answer in answers])
