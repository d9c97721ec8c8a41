"""reasoning-gym tasks: their data sets, and the reward that asks a data set's own scorer."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from rlpost.registry import near
from rlpost.rewards.base import Answer, register_reward
from rlpost.trajectory import Prompt


def make_dataset(name: str, options: dict[str, Any]) -> Any:
    """The procedural data set `name`.

    Raises:
        ValueError: reasoning-gym is not installed, or has no such task, or the task has no such option.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"reasoning-gym does not import ({error}): pip install 'rlpost[rewards]'") from error
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no task '{name}'; {near(name, DATASETS)}")
    known = DATASETS[name][1].__dataclass_fields__
    for option in options:
        if option not in known:
            raise ValueError(f"reasoning-gym task '{name}' has no option '{option}'; {near(option, known)}")
    return create_dataset(name, **options)


@functools.lru_cache(maxsize=64)
def _scorer(name: str, options: str) -> Any:
    return make_dataset(name, json.loads(options)).score_answer


@register_reward("reasoning_gym", per_answer=True, imports=("reasoning_gym",))
def reasoning_gym(prompt: Prompt, answers: Sequence[Answer], *, tag: str = "answer") -> list[float]:
    """The task's own score, between 0 and 1, of what stands in the last `<tag>...</tag>`, else of the whole answer.

    Raises:
        ValueError: the prompt does not come from a `reasoning-gym://` source.
    """
    info = prompt.extra_info.get("reasoning_gym")
    if info is None:
        raise ValueError("reasoning_gym: the prompt does not come from a reasoning-gym:// source")
    score = _scorer(info["name"], json.dumps(info["options"], sort_keys=True))
    return [float(score(answer=_tagged(answer.text, tag), entry=info["entry"])) for answer in answers]


def _tagged(text: str, tag: str) -> str:
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return (found[-1] if found else text).strip()
