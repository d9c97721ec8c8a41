import asyncio
import itertools

import numpy as np
import pytest

from rlpost.trainer.evaluate import Evaluator, pass_at_k, summarize
from rlpost.trajectory import Group, Prompt, Provenance, Status, Trajectory


def group(accuracies, status=Status.STOP):
    prompt = Prompt(id="p", index=0, token_ids=np.arange(2), text="", data_source="d")
    return Group(
        id="p",
        index=0,
        data_source="d",
        prompt=prompt,
        trajectories=[
            Trajectory(
                token_ids=np.arange(3),
                provenance=np.array([Provenance.TEMPLATE, Provenance.MODEL, Provenance.MODEL], np.uint8),
                rollout_logprobs=np.zeros(3, np.float32),
                versions=np.zeros(3, np.int32),
                rewards=np.array([0, 0, accuracy], np.float32),
                status=status,
                reward_parts={"accuracy": accuracy},
            )
            for accuracy in accuracies
        ],
    )


def test_pass_at_k_equals_the_share_of_subsets_with_a_right_answer():
    outcomes = [1, 0, 0, 1, 0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(5, 2, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_summarize_averages_over_samples_and_prompts():
    report = summarize([group([1.0, 0.0]), group([1.0, 1.0])])
    assert report["accuracy"] == 0.75 and report["pass@2"] == 1.0 and report["response_length"] == 2
    assert report["error_rate"] == 0 and report["num_prompts"] == 2


def test_summarize_never_counts_a_failed_score_as_zero():
    report = summarize([group([1.0]), group([0.0], Status.REWARD_ERROR)])
    assert report["accuracy"] == 1.0 and report["error_rate"] == 0.5
    assert "accuracy" not in summarize([group([0.0], Status.REWARD_ERROR)])


def test_pass_at_k_is_over_groups_with_k_scores():
    failed = group([1.0, 0.0, 0.0, 0.0])
    for t in failed.trajectories[2:]:
        t.status = Status.REWARD_ERROR
    report = summarize([failed, group([0.0, 0.0], Status.REWARD_ERROR)])
    assert report["pass@2"] == 1.0 and "pass@4" not in report
    assert summarize([failed, group([0.0, 0.0, 0.0, 1.0])])["pass@4"] == 1.0


def test_evaluator_summarizes_each_set_and_lists_every_answer(caplog):
    groups = {"a": group([1.0, 0.0]), "b": group([0.0, 0.0], Status.REWARD_ERROR)}

    async def generate(prompts, n, spec):
        assert n == 2 and spec == "spec" and len(prompts) == 1
        return [groups[prompts[0]]]

    groups["b"].trajectories[0].error = "no such function"
    evaluator = Evaluator({"one": ["a"], "two": ["b"]}, 2, "spec", decode=str, batch_size=1)
    report, answered = asyncio.run(evaluator.run(generate))
    assert caplog.messages == ["validation: 2 answers of 'two' have no score: no such function"]
    assert report["val/one/accuracy"] == 0.5 and report["val/two/error_rate"] == 1.0
    assert [row["reward"] for row in evaluator.rows(answered)] == [1.0, 0.0, None, None]
    assert len(evaluator.rows(answered, samples=1)) == 2
