"""Old logprobs that are the first update's own in place of inferred ones: the step ends with the same weights."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import SEED, Case, in_ranks, infer, ragged_batch, train, write_model

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, RolloutCorrectionConfig
from rlpost.batch import Batch
from rlpost.trajectory import NOT_ASKED
from rlpost.workers.dispatch import on_policy_rows
from rlpost.workers.model_worker import ModelWorker

CORRECTION = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_threshold=1.05, rollout_rs="sequence", rollout_rs_threshold=3.0
)
TIGHT = {"clip_ratio_low": 1e-3, "clip_ratio_high": 1e-3}  # so that later updates reach it
SHUFFLED = {"ppo_mini_batch_size": 2, "shuffle": True}  # of 5 groups: three updates
STEPS = {
    "clipped": ({**TIGHT}, SHUFFLED),
    "corrected": ({**TIGHT, "rollout_correction": CORRECTION}, SHUFFLED),
    "gspo": ({**TIGHT, "loss_mode": "gspo", "rollout_correction": CORRECTION}, SHUFFLED),
    "kl_loss": ({"use_kl_loss": True, "kl_loss_coef": 0.5}, {"ppo_mini_batch_size": 3}),
    "one_update": ({"rollout_correction": CORRECTION}, {"ppo_mini_batch_size": 5}),
    "two_epochs": ({**TIGHT}, {"ppo_mini_batch_size": 3, "ppo_epochs": 2, "shuffle": True}),
}


@dataclass
class Job:
    """Steps on models like that at `path`, each with all old logprobs, those that are needed, and none."""

    path: str
    steps: dict[str, tuple[dict, dict]]


def run(worker: ModelWorker, job: Job) -> dict[str, dict[str, Any]]:
    """By step: the rows that were not inferred, and of each way weights and metrics of all ranks."""
    results = {}
    for name, (algo, actor) in job.steps.items():
        algorithm = Algorithm(AlgoConfig(**algo), max_response_length=32)
        case = Case(job.path, actor=actor)
        batch = sampled()
        own = on_policy_rows(batch["group"], case.setup().actor, SEED)
        rows = {"all": range(len(batch)), "needed": algorithm.needs(len(batch), own)["old_logprobs"], "none": []}
        results[name] = {"own": own} | {way: step(worker, case, algorithm, sampled(), rows[way]) for way in rows}
    return results


def step(worker: ModelWorker, case: Case, algorithm: Algorithm, batch: Batch, rows: Any) -> dict[str, Any]:
    """Infer old logprobs of `rows`, then all updates."""
    worker.build(case.setup())
    old = infer(worker, "actor", batch)
    noise = 0.1 * torch.randn(len(old), generator=torch.Generator().manual_seed(4))
    batch.update({"rollout_logprobs": torch.where(batch["response_mask"], old + noise, 0.0)})
    batch.update({"ref_logprobs": torch.where(batch["response_mask"], old - noise, 0.0)})
    batch.update({"old_logprobs": infer(worker, "actor", batch, rows)})
    batch.update(algorithm.advantages(batch)[0])
    metrics = train(worker, "actor", batch, algorithm)
    weights = {n: w.clone() for n, w in worker.engines["actor"].named_weights(torch.float32)}
    return {"weights": weights, "metrics": metrics, "unasked": batch.rows_with(batch["old_logprobs"] == NOT_ASKED)}


def sampled() -> Batch:
    """The ragged batch with a reward on the last token of every row that has a response."""
    batch = ragged_batch()
    last = batch.cu_seqlens[1:] - 1
    rewards = torch.zeros(batch.num_tokens)
    rewards[last] = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 3.0, 1.0, 0.0]) * batch["response_mask"][last]
    return batch.update({"rewards": rewards, "usable": torch.ones(len(batch), dtype=torch.bool)})


@pytest.fixture(scope="module", params=[1, 2])
def results(request, tmp_path_factory):
    """On so many data-parallel ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return in_ranks(request.param, run, Job(str(write_model(folder / "model")), STEPS), folder / "result")


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a parameter."""
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


@pytest.mark.parametrize("name", STEPS)
def test_step_ends_with_the_same_weights_and_metrics_as_with_all_old_logprobs_inferred(results, name):
    result = results[name]
    every, needed = result["all"], result["needed"]
    assert not len(every["unasked"]) and needed["unasked"].tolist() == result["own"]
    assert apart(needed["weights"], every["weights"]) < 1e-6
    assert needed["metrics"] == pytest.approx(every["metrics"], rel=1e-4, abs=1e-6)
    assert every["metrics"]["actor/skipped_updates"] == 0


@pytest.mark.parametrize("name", ["clipped", "corrected", "gspo", "two_epochs"])
def test_later_updates_do_need_the_old_logprobs(results, name):
    """Or the test above would show nothing."""
    result = results[name]
    assert result["all"]["metrics"]["actor/pg_clipfrac"] > 0.1
    assert apart(result["none"]["weights"], result["all"]["weights"]) > 1e-4
    if "correct" in name:
        assert result["all"]["metrics"]["rollout_corr/rollout_is_truncated_fraction"] > 0.1


def test_how_many_rows_are_left_out(results):
    left_out = {name: len(result["own"]) for name, result in results.items()}
    assert left_out == {"clipped": 4, "corrected": 4, "gspo": 4, "kl_loss": 6, "one_update": 10, "two_epochs": 0}
