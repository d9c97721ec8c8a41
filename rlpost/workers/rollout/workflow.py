"""How a prompt becomes trajectories: `Workflow`, and the one that asks the model once."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from rlpost.registry import Registry, load_dotted
from rlpost.trajectory import Prompt, Provenance, Trajectory
from rlpost.workers.rollout.base import Completion

# generate(token_ids, n=1, key=""): sample n continuations. Within one run of a workflow calls that may differ need
# different keys (such as "<sample>/<turn>"): a seed, where requests have one, is a hash of (run seed, prompt id, key).
Generate = Callable[..., Awaitable[list[Completion]]]


class Workflow(Protocol):
    """What a user writes to let the model act: token ids in, token ids out."""

    async def __call__(self, prompt: Prompt, n: int, generate: Generate) -> list[Trajectory]:
        """Return `n` trajectories of `prompt`; rewards are added by the worker that runs this."""


WORKFLOWS: Registry[Workflow] = Registry("workflow")


def get_workflow(name: str) -> Workflow:
    """A registered name, or the dotted path of an async function.

    Raises:
        ValueError: neither.
    """
    return load_dotted(name, "rollout.workflow") if "." in name else WORKFLOWS.get(name, "rollout.workflow")


def trajectory(prompt_ids: Sequence[int] | np.ndarray, completion: Completion, sample_id: int) -> Trajectory:
    """Prompt (TEMPLATE) and sampled tokens (MODEL) as one trajectory, without rewards yet."""
    num_prompt, num_sampled = len(prompt_ids), len(completion.token_ids)

    def column(dtype: type, before: Sequence[int] | np.ndarray | float, sampled: np.ndarray | float) -> np.ndarray:
        values: np.ndarray = np.empty(num_prompt + num_sampled, dtype)
        values[:num_prompt], values[num_prompt:] = before, sampled
        return values

    return Trajectory(
        token_ids=column(np.int64, prompt_ids, completion.token_ids),
        provenance=column(np.uint8, Provenance.TEMPLATE, Provenance.MODEL),
        rollout_logprobs=column(np.float32, 0.0, completion.logprobs),
        versions=column(np.int32, -1, completion.versions),
        rewards=np.zeros(num_prompt + num_sampled, np.float32),
        status=completion.status,
        sample_id=sample_id,
        extras=completion.extras,
    )


@WORKFLOWS.register("single_turn")
async def single_turn(prompt: Prompt, n: int, generate: Generate) -> list[Trajectory]:
    """Ask once, n times over."""
    completions = await generate(prompt.token_ids, n=n)
    return [trajectory(prompt.token_ids, completion, i) for i, completion in enumerate(completions)]
