"""Prompts, a stream of them, and scored groups, written by hand."""

from collections.abc import Sequence

import numpy as np

from rlpost.trainer.buffer import GroupBuffer, Slot
from rlpost.trajectory import Group, Prompt, Provenance, Status, Trajectory
from rlpost.workers.rollout.base import SamplingSpec

SPEC = SamplingSpec(temperature=1.0, max_tokens=4, vocab_size=32)


def prompt(index: int) -> Prompt:
    """A prompt of two tokens."""
    return Prompt(id=f"d/0/{index}", index=index, token_ids=np.arange(2), text="", data_source="d")


def group(
    of: Prompt,
    accuracies: Sequence[float],
    status: Status = Status.STOP,
    num_tokens: int = 1,
    versions: int | Sequence[int] = 0,
) -> Group:
    """Answers of `num_tokens` tokens, rewarded with their accuracy; `versions` sampled these tokens."""
    all_versions = np.full(2 + num_tokens, -1, np.int32)
    all_versions[2:] = versions
    provenance = np.array([Provenance.TEMPLATE] * 2 + [Provenance.MODEL] * num_tokens, np.uint8)
    trajectories = [
        Trajectory(
            token_ids=np.arange(2 + num_tokens),
            provenance=provenance,
            rollout_logprobs=np.zeros(2 + num_tokens, np.float32),
            versions=all_versions.copy(),
            rewards=np.array([0.0] * (1 + num_tokens) + [accuracy], np.float32),
            status=status,
            sample_id=i,
            reward_parts={"accuracy": accuracy},
        )
        for i, accuracy in enumerate(accuracies)
    ]
    return Group(id=of.id, index=of.index, data_source="d", prompt=of, trajectories=trajectories)


class Stream:
    """Prompts 0, 1, 2, ..., of which there are `length` if it is given."""

    def __init__(self, length: int | None = None):
        self.cursor, self.length = 0, length

    def next(self, n: int) -> list[Prompt]:
        start = self.cursor
        self.cursor = start + n if self.length is None else min(start + n, self.length)
        return [prompt(i) for i in range(start, self.cursor)]

    def state_dict(self) -> dict:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict) -> None:
        self.cursor = state["cursor"]


def finish(buffer: GroupBuffer, slot: Slot, versions: Sequence[int] | None = None) -> None:
    """The group of `slot`, sampled by the weights it started under, or by one token of each of `versions`."""
    versions = [slot.version] if versions is None else versions
    buffer.put(slot, group(slot.prompt, [1.0, 0.0], num_tokens=len(versions), versions=versions))
