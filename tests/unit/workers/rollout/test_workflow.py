import asyncio

import numpy as np
import pytest

from rlpost.trajectory import Prompt, Provenance, Status
from rlpost.workers.rollout.base import Completion, join, request_seed
from rlpost.workers.rollout.workflow import get_workflow, single_turn


def completion(tokens, status=Status.STOP, version=3) -> Completion:
    return Completion(
        token_ids=np.asarray(tokens, np.int64),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        versions=np.full(len(tokens), version, np.int32),
        status=status,
    )


def test_single_turn_marks_prompt_and_sampled_tokens():
    async def generate(token_ids, n):
        assert token_ids.tolist() == [7, 8]
        return [completion([9]), completion([9, 9, 1], Status.LENGTH)][:n]

    prompt = Prompt(id="p", index=0, token_ids=np.array([7, 8]), text="", data_source="d")
    first, second = asyncio.run(single_turn(prompt, 2, generate))
    assert second.token_ids.tolist() == [7, 8, 9, 9, 1]
    assert second.provenance.tolist() == [Provenance.TEMPLATE] * 2 + [Provenance.MODEL] * 3
    assert second.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert second.versions.tolist() == [-1, -1, 3, 3, 3]
    assert second.rewards.tolist() == [0.0] * 5
    assert (first.status, second.status) == (Status.STOP, Status.LENGTH)
    assert (first.sample_id, second.sample_id) == (0, 1)
    assert first.response_ids.tolist() == [9]


def test_workflow_is_found_by_name_and_by_dotted_path():
    assert get_workflow("single_turn") is single_turn
    assert get_workflow("rlpost.workers.rollout.workflow.single_turn") is single_turn
    with pytest.raises(ValueError, match="rollout.workflow=singel_turn: .*did you mean 'single_turn'"):
        get_workflow("singel_turn")


def test_request_seed_depends_on_its_parts_alone():
    assert request_seed(1, "gsm8k/0/17", "") == 239389990998  # the same in every process and release
    assert request_seed(1, "a", "") != request_seed(2, "a", "") != request_seed(1, "a", "0/1")
    assert request_seed("ab", "c") != request_seed("a", "bc")


def test_join_keeps_the_version_of_each_part():
    joined = join(completion([1, 2], Status.ABORT, 3), completion([5], Status.LENGTH, 4))
    assert joined.token_ids.tolist() == [1, 2, 5]
    assert joined.versions.tolist() == [3, 3, 4]
    assert joined.status is Status.LENGTH
