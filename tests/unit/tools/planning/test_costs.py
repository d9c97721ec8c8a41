"""Costs and step times: figures that were measured on an H200, and how they scale."""

import pytest

from rlpost.tools.planning.costs import predict_costs
from rlpost.tools.planning.memory import predict_memory
from rlpost.tools.planning.run import read_run
from rlpost.tools.planning.steps import predict_step, scenario_of

SMALL = ["num_gpus=1", "shape=qwen3-0.6b", "algo.use_kl_loss=false", "prompt_tokens=1", "data.max_response_length=1024"]
LARGE = [
    "hardware=h200", "shape=qwen3-8b", "rollout.n=4", "data.max_prompt_length=256", "data.max_response_length=1024",
    "data.train_batch_size=32", "actor.ppo_mini_batch_size=16", "mean_length=400", "prompt_tokens=100",
]  # fmt: skip
SMOLLM2 = ["num_gpus=1", "experiment=smollm2_reasoning_gym", "algo.use_kl_loss=false", "mean_length=30",
           "prompt_tokens=57"]  # fmt: skip


def plan(*words: str):
    run = read_run(words)
    engine = predict_memory(run).engine
    return run, predict_costs(run, engine), engine


def step(*words: str):
    run, costs, engine = plan(*words)
    return predict_step(run, costs, engine)


@pytest.mark.parametrize("checkpointing, tokens_per_s", [(False, 37_000), (True, 30_000)])
def test_training_is_as_fast_as_was_measured(checkpointing, tokens_per_s):
    _, costs, _ = plan(*SMALL, f"model.enable_gradient_checkpointing={checkpointing}")
    assert 1 / costs.train_token_s == pytest.approx(tokens_per_s, rel=0.1)


def test_inference_is_as_fast_as_was_measured():
    _, costs, _ = plan(*SMALL, "data.train_batch_size=64", "actor.ppo_mini_batch_size=32")
    assert 1 / costs.infer_token_s["old_logprobs"] == pytest.approx(126_000, rel=0.1)


def test_another_model_than_the_one_that_was_fitted_is_near_what_was_measured():
    """SmolLM2-135M, 178,000 tokens a step: 0.40 to 0.47 s for old logprobs, 1.3 to 2.2 s for two updates, 51 GB."""
    run = read_run(SMOLLM2)
    found = step(*SMOLLM2)
    assert 0.36 < found.phases["old logprobs"] < 0.5 and 1.2 < found.phases["update"] < 2.2
    assert predict_memory(run).phases[0].trainer_bytes / 2**30 == pytest.approx(51, rel=0.1)


def test_reading_weights_and_cache_bounds_a_decoding_step_from_below():
    run, costs, engine = plan(*LARGE, "num_gpus=1", "host_step_s=0", "host_sequence_s=0", "logprob_s=0")
    assert costs.bound == "device"
    assert costs.decode_step_s > 2 * run.shape.parameters / run.device.memory_bytes_s
    assert costs.decode_sequence_s > 300 * engine.cache_token_bytes / run.device.memory_bytes_s


def test_an_engine_that_waits_for_its_host_says_so():
    run, costs, _ = plan(*SMALL)
    assert costs.bound == "host"
    assert costs.decode_step_s == run.efficiency.host_step_s
    assert costs.decode_sequence_s == run.efficiency.host_sequence_s + run.efficiency.logprob_s


def test_few_sequences_read_few_experts():
    words = ["num_gpus=1", "hardware=mi350x", "shape=qwen3-30b-a3b", "host_step_s=0", "host_sequence_s=0"]
    one, many = (plan(*words, f"rollout.max_num_seqs={slots}")[1].decode_step_s for slots in (1, 256))
    assert one < many / 4


def test_gathering_over_a_slow_network_bounds_training():
    near, far = (plan(*LARGE, f"num_gpus={gpus}")[1].train_token_s for gpus in (8, 16))
    assert far > 2 * near


def test_phases_of_a_colocated_step_add_up():
    found = step(*LARGE, "num_gpus=4")
    assert sum(found.phases.values()) == pytest.approx(found.step_s)
    assert {"generate", "old logprobs", "reference", "update", "sync", "sleep and wake"} == found.phases.keys()
    assert found.tokens_per_s == pytest.approx(128 * 500 / found.step_s)
    assert step(*LARGE, "num_gpus=4", "rollout.free_cache_engine=false").phases.keys() == found.phases.keys() - {
        "sleep and wake"
    }


def test_scenario_is_the_runs_own():
    words = ["trainer=fully_async", "trainer.train_gpus=6", "trainer.rollout_gpus=2", "trainer.staleness_threshold=0.5"]
    scenario = scenario_of(*plan(*LARGE, *words, "rollout.tensor_model_parallel_size=2", "keep_rate=0.5"))
    assert (scenario.devices, scenario.rollout_share, scenario.devices_per_replica) == (8, 0.25, 2)
    assert (scenario.groups, scenario.n, scenario.updates, scenario.keep_rate) == (32, 4, 2, 0.5)
    assert (scenario.staleness_threshold, scenario.recompute_logprobs) == (0.5, True)


def test_an_asynchronous_step_waits_less_than_a_colocated_one_generates():
    words = ["num_gpus=8", "rollout.max_num_seqs=64", "data.train_batch_size=64"]
    together = step(*LARGE, *words, "trainer=fully_async", "trainer.train_gpus=4", "trainer.rollout_gpus=4")
    in_turn = step(*LARGE, *words)
    assert together.phases["generate"] < in_turn.phases["generate"]
    assert 0 <= together.trainer_idle < 1 and together.rollout_idle is not None and in_turn.rollout_idle is None
