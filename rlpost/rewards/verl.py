"""Reward functions written for verl, used as they are."""

from collections.abc import Sequence

from rlpost.registry import load_dotted
from rlpost.rewards.base import Answer, Reward, register_reward
from rlpost.trajectory import Prompt


@register_reward("verl", per_answer=True, functions=("path",))
def verl(prompt: Prompt, answers: Sequence[Answer], *, path: str, **kwargs: object) -> list[Reward]:
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`, which returns a number or a dict.

    Of a dict, `score` is the reward and the other numbers are its parts.

    Args:
        path: dotted path of the function.
    """
    compute_score = load_dotted(path, "path")
    rewards = []
    for answer in answers:
        result = compute_score(
            data_source=prompt.data_source,
            solution_str=answer.text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            **kwargs,
        )
        scores = result if isinstance(result, dict) else {"score": result}
        parts = {name: value for name, value in scores.items() if name != "score" and isinstance(value, int | float)}
        rewards.append(Reward(value=scores["score"], parts=parts))
    return rewards
