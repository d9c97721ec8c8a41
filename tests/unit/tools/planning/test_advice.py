"""Advice: whatever is advised does fit when it is done."""

import pytest

from rlpost.tools.plan import make_plan
from rlpost.tools.planning.advice import LEAST_GAIN, Advice, Faster, advise, changed
from rlpost.tools.planning.hardware import GIB
from rlpost.tools.planning.memory import predict_memory
from rlpost.tools.planning.run import read_run

LONG = ["data.max_prompt_length=1024", "data.max_response_length=7168", "actor.ppo_max_token_len_per_gpu=32768"]
CASES = {
    "activations": ["hardware=h200", "num_gpus=8", "shape=qwen3-8b", *LONG],
    "state": ["hardware=h100", "num_gpus=1", "shape=qwen3-8b"],
    "critic": ["hardware=h100", "num_gpus=4", "shape=qwen3-8b", "algo=ppo"],
    "engine stays": ["hardware=h100", "num_gpus=8", "shape=qwen3-8b", "rollout.free_cache_engine=false", *LONG],
    "share too large": ["hardware=h100", "num_gpus=2", "shape=qwen3-4b", "rollout.gpu_memory_utilization=0.9"],
    "share too small": ["hardware=h100", "num_gpus=8", "shape=qwen3-32b", "rollout.gpu_memory_utilization=0.5"],
    "pools": ["hardware=h100", "shape=qwen3-8b", "trainer=fully_async", "trainer.train_gpus=2",
              "trainer.rollout_gpus=2", *LONG],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_advice_makes_its_phase_fit(case):
    run = read_run(CASES[case])
    phases = predict_memory(run).phases
    broken = {phase.name for phase in phases if not phase.fits}
    advice = advise(run, phases)
    assert broken and {one.phase for one in advice} == broken
    for one in advice:
        after = [phase for phase in predict_memory(changed(run, one.change)).phases if phase.name == one.phase]
        assert any(phase.fits and phase.total_bytes == one.total_bytes for phase in after), str(one)


def test_a_smaller_micro_batch_is_the_largest_that_fits():
    run = read_run(CASES["activations"])
    values = [a.change for a in advise(run, predict_memory(run).phases)]
    assert {"model.enable_gradient_checkpointing": True} in values
    (budget,) = [
        c["actor.ppo_max_token_len_per_gpu"] for c in values if c.keys() == {"actor.ppo_max_token_len_per_gpu"}
    ]
    larger = changed(run, {"actor.ppo_max_token_len_per_gpu": budget + 2048})
    assert run.longest <= budget < 32768 and not predict_memory(larger).phases[0].fits


def test_the_run_itself_is_left_as_it_is():
    run = read_run(CASES["activations"])
    changed(run, {"num_gpus": 16, "actor.ppo_max_token_len_per_gpu": 8192})
    assert run.pools.total == 8 and run.cfg.actor.ppo_max_token_len_per_gpu == 32768


def test_what_fits_needs_no_advice():
    run = read_run(["hardware=mi350x", "num_gpus=8", "shape=qwen3-8b"])
    assert advise(run, predict_memory(run).phases) == []


def test_advice_reads_like_the_command_line():
    advice = Advice(phase="train", change={"a.b": True, "c": 0.25, "d": 8}, total_bytes=3 * GIB)
    assert str(advice) == "train: a.b=true c=0.25 d=8 (3 GiB)"


FAST = [
    "hardware=h200", "num_gpus=2", "rollout.n=8", "data.train_batch_size=128", "actor.ppo_mini_batch_size=128",
    "data.max_prompt_length=256", "data.max_response_length=2048", "mean_length=500", "rollout.max_num_seqs=512",
]  # fmt: skip


@pytest.mark.parametrize("words, wanted, unwanted", [
    (["shape=qwen3-0.6b", "model.enable_gradient_checkpointing=true"], {"model.enable_gradient_checkpointing"}, set()),
    (["shape=qwen3-0.6b", "data.max_response_length=512", "tail=4", "prompt_tokens=66"],
     {"rollout.num_replicas", "rollout.free_cache_engine"}, set()),
    (["shape=qwen3-1.7b", "rollout.num_replicas=4", "mean_length=1000", "data.max_response_length=4096"],
     {"rollout.num_replicas"}, {"model.enable_gradient_checkpointing"}),
    (["shape=qwen3-1.7b", "rollout.tensor_model_parallel_size=2"], {"rollout.tensor_model_parallel_size"}, set()),
    # full to the brim: nothing that needs memory is named
    (["shape=qwen3-8b", "model.enable_gradient_checkpointing=true", "actor.ppo_max_token_len_per_gpu=65536"],
     set(), {"model.enable_gradient_checkpointing", "rollout.free_cache_engine"}),
])  # fmt: skip
def test_what_makes_a_step_faster_fits_and_gives_what_it_says(words, wanted, unwanted):
    plan = make_plan(read_run([*FAST, *words]))
    assert plan.step is not None
    named = {key for change in plan.faster for key in change.change}
    assert wanted <= named and not unwanted & named
    for change in plan.faster:
        after = make_plan(changed(plan.run, change.change))
        assert after.fits and after.step is not None
        assert after.step.step_s == change.step_s <= (1 - LEAST_GAIN) * plan.step.step_s
    assert plan.faster == sorted(plan.faster, key=lambda change: change.step_s)


def test_a_plan_that_does_not_fit_names_nothing_faster():
    assert make_plan(read_run(CASES["state"])).faster == []


def test_a_faster_way_reads_like_the_command_line():
    assert str(Faster(change={"rollout.num_replicas": 2}, step_s=9.81)) == "rollout.num_replicas=2 (9.81 s)"
