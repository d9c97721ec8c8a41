"""Costs that are known come back out of metrics that were computed with them."""

import json
import math
from statistics import NormalDist

import numpy as np
import pytest

from rlpost.tools.simulation.calibrate import SKIPPED, alike, calibrate, nonnegative_fit, tail_of
from rlpost.tools.simulation.lengths import LogNormal, solve_mu
from rlpost.tools.simulation.runs import simulate_colocated
from rlpost.tools.simulation.scenario import Scenario
from rlpost.trainer.config import AsyncTrainerConfig

TRUE = {
    "decode_step_s": 0.02,
    "decode_sequence_s": 1e-4,
    "prefill_token_s": 3e-5,
    "infer_token_s": 2e-4,
    "train_token_s": 5e-4,
    "update_s": 0.7,
    "move_s": 1.5,
}
CONFIG = """
actor: {ppo_mini_batch_size: 16}
rollout: {max_num_seqs: 512, tensor_model_parallel_size: 2}
cluster: {nnodes: 1, n_gpus_per_node: 8}
"""


def write_run(folder, groups, n, seed, noise=0.0, prompt=60, updates=2, steps=12):
    """A colocated run on 8 devices, 4 engines; its first steps take ten times as long."""
    rng = np.random.default_rng(seed)
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(CONFIG.replace("16", str(groups // updates)))
    rows = []
    for step in range(steps):
        mean, longest = rng.uniform(100, 300), rng.integers(800, 1600)
        answers = groups * n
        tokens = answers * (prompt + mean)
        slow = (10 if step < SKIPPED else 1) * (1 + noise * rng.standard_normal())
        generate = 0.02 * longest + 1e-4 * answers * mean / 4 + 3e-5 * answers * prompt / 4
        rows.append(
            {
                "step": step + 1,
                "response_length/mean": mean,
                "response_length/max": float(longest),
                "response_length/truncated": 0.0,
                "prompt_length/mean": float(prompt),
                "throughput/tokens": tokens,
                "groups/kept": float(groups),
                "timing_s/generate": generate * slow,
                "timing_s/infer": 2e-4 * tokens / 8,
                "timing_s/train": 5e-4 * tokens / 8 + 0.7 * updates,
                "timing_s/publish": 2.0 + 1.5,
                "timing_s/step": generate + 7e-4 * tokens / 8 + 0.7 * updates + 3.5,
                "weight_sync/seconds_s": 2.0,
                "weight_sync/bytes": 4e9,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_known_costs_are_recovered(tmp_path):
    runs = [
        write_run(tmp_path / "a", 32, 8, 1),
        write_run(tmp_path / "b", 128, 16, 2, prompt=600, updates=4),
    ]
    found = calibrate(runs, {})
    assert {key: found.values[key] for key in TRUE} == pytest.approx(TRUE, rel=1e-6)
    assert found.values["sync_s"] == pytest.approx(2.0) and found.values["weight_bytes"] == 0
    assert max(found.errors.values()) < 1e-6
    workload = ("devices", "devices_per_replica", "slots", "batch", "n", "prompt_tokens", "updates")
    assert [found.values[key] for key in workload] == [8, 2, 512, 128, 16, 600, 4]
    assert found.notes == ["sync: all steps are alike, so sync_s, sync_byte_s cannot be told apart"]


def test_noise_is_averaged_out(tmp_path):
    runs = [write_run(tmp_path / "a", 32, 8, 1, noise=0.05), write_run(tmp_path / "b", 128, 16, 2, noise=0.05)]
    found = calibrate(runs, {"prefill_token_s": 3e-5})
    assert found.values["decode_step_s"] == pytest.approx(0.02, rel=0.1)
    assert found.values["decode_sequence_s"] == pytest.approx(1e-4, rel=0.1)
    assert 0.01 < found.errors["generate"] < 0.06


def test_the_simulated_run_takes_as_long_as_the_one_it_was_fitted_to(tmp_path):
    found = calibrate([write_run(tmp_path / "a", 64, 8, 1, steps=30)], {})
    simulated = simulate_colocated(Scenario(**found.values | {"steps_per_batch": 1, "trigger_parameter_sync_step": 1}))
    assert simulated.batch_s == pytest.approx(found.measured_step_s, rel=0.1)


def test_what_it_gives_is_run_asynchronously_as_rlpost_would(tmp_path):
    write_run(tmp_path / "run", 64, 8, seed=0)
    values = calibrate([tmp_path / "run"], {}).values
    scenario, default = Scenario(**values), AsyncTrainerConfig()
    assert (scenario.steps_per_batch, scenario.trigger_parameter_sync_step) == (1, default.trigger_parameter_sync_step)
    assert scenario.staleness_threshold == default.staleness_threshold
    assert calibrate([tmp_path / "run"], {"staleness_threshold": 0.5}).values["staleness_threshold"] == 0.5


def test_runs_that_tell_nothing_are_named(tmp_path):
    run = write_run(tmp_path / "a", 32, 8, 1)
    with pytest.raises(ValueError, match="no such file; name the run folder"):
        calibrate([tmp_path / "none"], {})
    with pytest.raises(ValueError, match="add devices=<number>"):
        calibrate([run / "metrics.jsonl"], {})
    rows = [json.loads(line) | {"async/staleness/mean": 1.0} for line in open(run / "metrics.jsonl")]
    (tmp_path / "async.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="of an asynchronous run"):
        calibrate([tmp_path / "async.jsonl"], {"devices": 8})
    rows = [json.loads(line) | {"groups/dropped_all_1": 3.0} for line in open(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="filter_groups.enable=false"):
        calibrate([run], {})


def test_one_usable_step_cannot_tell_costs_apart(tmp_path):
    found = calibrate([write_run(tmp_path / "a", 32, 8, 1, steps=SKIPPED + 1)], {})
    assert [note.partition(":")[0] for note in found.notes] == ["generate", "train", "sync"]
    assert Scenario(**found.values).batch == 32


def test_longest_tail_can_be_simulated():
    assert Scenario(tail=tail_of(100, 10**9, 10**6, 0.5)) and LogNormal(100, tail_of(100, 10**9, 10**6, 0.5), 10**9)


def test_fit_never_uses_a_negative_cost_or_one_without_need():
    x = np.linspace(1, 2, 20)
    assert nonnegative_fit(np.stack([x, x**2, x**3], 1), 3 * x) == pytest.approx([3, 0, 0])
    assert (nonnegative_fit(np.stack([np.ones(20), x], 1), 5 - 2 * x) >= 0).all()
    assert alike(np.stack([x, 2 * x], 1)) and not alike(np.stack([x, x**3], 1))


@pytest.mark.parametrize("tail", [2.0, 4.0, 8.0])
def test_tail_comes_back_from_the_share_that_reaches_a_length(tail):
    z = NormalDist().inv_cdf(0.99)
    sigma = z - math.sqrt(z * z - 2 * math.log(tail))
    mu = solve_mu(500, sigma, 4096)
    for length in (2000, 4096):
        reached = 1 - NormalDist().cdf((math.log(length) - mu) / sigma)
        assert tail_of(500, 4096, length, reached) == pytest.approx(tail, rel=1e-3)
