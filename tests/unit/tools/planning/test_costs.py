"""Costs and step times: figures that were measured on an H200, and how they scale."""

import pytest

from rlpost.tools.planning.costs import predict_costs
from rlpost.tools.planning.hardware import GIB
from rlpost.tools.planning.memory import predict_memory
from rlpost.tools.planning.run import read_run
from rlpost.tools.planning.steps import predict_step, scenario_of

SMALL = ["num_gpus=1", "shape=qwen3-0.6b", "algo.use_kl_loss=false", "prompt_tokens=1", "data.max_response_length=1024"]
LARGE = [
    "hardware=h200", "shape=qwen3-8b", "rollout.n=4", "data.max_prompt_length=256", "data.max_response_length=1024",
    "data.train_batch_size=32", "actor.ppo_mini_batch_size=16", "mean_length=400", "prompt_tokens=100",
]  # fmt: skip
TWO = [
    "hardware=h200", "num_gpus=2", "shape=qwen3-1.7b", "algo.use_kl_loss=false", "rollout.n=8",
    "rollout.logprobs_every=16", "rollout.free_cache_engine=false", "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=32", "actor.ppo_max_token_len_per_gpu=8192", "data.max_prompt_length=256",
    "data.max_response_length=2048", "prompt_tokens=76", "mean_length=512", "tail=4.6",
]  # fmt: skip
# one H200: model, tokens of a pack, packs, not trained and trained tokens of a sequence
QWEN3, SMOLLM2 = ("qwen3-1.7b", 16384, 4, 128, 896), ("smollm2-135m", 32768, 3, 48, 48)
TRAINED = [(QWEN3, "auto", 1.450, 77.3), (QWEN3, "off", 2.314, 95.5), (SMOLLM2, "auto", 0.359, 23.3),
           (SMOLLM2, "off", 0.609, 33.5)]  # fmt: skip
INFERRED = [(QWEN3, "auto", 0.484, 27.4), (SMOLLM2, "auto", 0.133, 5.5)]


def bench(load, compile: str):
    """The run that `benchmarks.train_step` measures, its memory, and its costs."""
    shape, packed, packs, prompt, answer = load
    groups = packed * packs // (prompt + answer) // 2
    run = read_run([
        "hardware=h200", "num_gpus=1", f"shape={shape}", f"model.compile={compile}", "algo.use_kl_loss=false",
        "rollout.n=2", f"data.train_batch_size={2 * groups}", f"actor.ppo_mini_batch_size={groups}",
        f"actor.ppo_max_token_len_per_gpu={packed}", f"data.max_prompt_length={prompt}", f"prompt_tokens={prompt}",
        f"data.max_response_length={4 * answer}", f"mean_length={answer}",
    ])  # fmt: skip
    memory = predict_memory(run)
    phases = {phase.name: phase.trainer_bytes / GIB for phase in memory.phases}
    return packed * packs, phases, predict_costs(run, memory.engine)


def plan(*words: str):
    run = read_run(words)
    engine = predict_memory(run).engine
    return run, predict_costs(run, engine), engine


def step(*words: str):
    run, costs, engine = plan(*words)
    return predict_step(run, costs, engine)


@pytest.mark.parametrize("load, compile, seconds, reserved_gib", TRAINED)
def test_training_is_near_what_was_measured(load, compile, seconds, reserved_gib):
    tokens, phases, costs = bench(load, compile)
    assert tokens * costs.train_token_s + costs.update_s == pytest.approx(seconds, rel=0.1)
    assert phases["train"] == pytest.approx(reserved_gib, rel=0.1)


@pytest.mark.parametrize("load, compile, seconds, reserved_gib", INFERRED)
def test_inference_is_near_what_was_measured(load, compile, seconds, reserved_gib):
    tokens, phases, costs = bench(load, compile)
    assert tokens * costs.infer_token_s["old_logprobs"] == pytest.approx(seconds, rel=0.15)
    assert phases["logprob"] == pytest.approx(reserved_gib, rel=0.25)


def test_a_colocated_step_on_two_gpus_is_near_what_was_measured():
    found = step(*TWO)
    # its weight sync was slower than today's, and the rows of its first update were inferred too: 1.4 s in all
    measured = {"generate": 8.3, "old logprobs": 0.7, "update": 4.5}
    assert {name: found.phases[name] for name in measured} == pytest.approx(measured, rel=0.15)
    assert found.step_s == pytest.approx(13.7, rel=0.1)


@pytest.mark.parametrize("words, shares", [
    (["actor.ppo_mini_batch_size=32"], {}),
    (["actor.ppo_mini_batch_size=8"], {"old_logprobs": 0.75}),
    (["actor.ppo_mini_batch_size=8", "actor.shuffle=true", "algo=ppo", "critic.ppo_mini_batch_size=8"],
     {"old_logprobs": 0.75, "values": 1.0}),
    (["actor.ppo_mini_batch_size=32", "actor.ppo_epochs=2"], {"old_logprobs": 1.0}),
    (["actor.ppo_mini_batch_size=8", "algo.use_kl_in_reward=true"], {"old_logprobs": 1.0, "ref_logprobs": 1.0}),
])  # fmt: skip
def test_old_logprobs_take_time_for_the_rows_that_the_first_update_does_not_train(words, shares):
    run, costs, engine = plan(*LARGE, "algo.use_kl_loss=false", *words)
    assert run.inferred == shares
    passes = sum(costs.infer_token_s[column] * share for column, share in shares.items())
    assert scenario_of(run, costs, engine).infer_token_s == pytest.approx(passes)
    phases = predict_step(run, costs, engine).phases
    names = {"old_logprobs": "old logprobs", "ref_logprobs": "reference", "values": "values"}
    inferring = {name: phases.get(name, 0.0) for name in names.values()}
    seconds = {c: costs.infer_token_s[c] * share * run.tokens / run.pools.train for c, share in shares.items()}
    assert inferring == {name: pytest.approx(seconds.get(column, 0.0)) for column, name in names.items()}


@pytest.mark.parametrize("shape, longest, mean, engines, phases, step_s, reserved_gib, card_gib", [
    ("qwen3-0.6b", 512, 512, 1, {"generate": 7.5, "update": 3.0, "sync": 0.1}, 10.9, 40.3, 81.1),
    ("qwen3-0.6b", 512, 512, 2, {"generate": 6.4, "update": 3.0, "sync": 0.1}, 9.8, 42.1, 83.4),
    ("qwen3-1.7b", 4096, 1032, 1, {"generate": 27.8, "update": 12.7, "sync": 0.1}, 41.1, 76.5, 92.9),
    ("qwen3-1.7b", 4096, 1032, 2, {"generate": 41.2, "update": 13.8, "sync": 0.1}, 55.8, None, 97.6),
])  # fmt: skip
def test_a_colocated_step_on_one_gpu_is_near_what_was_measured(
    shape, longest, mean, engines, phases, step_s, reserved_gib, card_gib
):
    """benchmarks/results/2026-11-30-h200-alone.md; the last row, in packs of 8,192, 2026-11-30-h200-side-by-side.md."""
    run = read_run([
        "hardware=h200", "num_gpus=1", f"shape={shape}", "algo.use_kl_loss=false", "rollout.n=8", "tail=4",
        "model.enable_gradient_checkpointing=false", "rollout.logprobs_every=16", "data.train_batch_size=64",
        "actor.ppo_max_token_len_per_gpu=16384", "actor.ppo_mini_batch_size=64", "data.max_prompt_length=256",
        f"data.max_response_length={longest}", "prompt_tokens=66", f"mean_length={mean}", "rollout.max_num_seqs=512",
        "rollout.gpu_memory_utilization=0.5", f"rollout.num_replicas={engines}",
    ])  # fmt: skip
    memory = predict_memory(run)
    found = predict_step(run, predict_costs(run, memory.engine), memory.engine)
    assert {name: found.phases[name] for name in phases} == pytest.approx(phases, rel=0.2)
    assert found.step_s == pytest.approx(step_s, rel=0.1)
    peaks = {phase.name: phase for phase in memory.phases}
    assert sum(peaks["generate"].parts.values()) / GIB == pytest.approx(card_gib, rel=0.1)
    if reserved_gib is not None:
        assert peaks["train"].trainer_bytes / GIB == pytest.approx(reserved_gib, rel=0.1)


@pytest.mark.parametrize("asked, measured_s", [(1, 0.0448), (16, 0.0211)])
def test_a_decoding_step_of_many_sequences_takes_its_host_as_long_as_was_measured(asked, measured_s):
    words = ["num_gpus=1", "shape=smollm2-135m", "rollout.free_cache_engine=false"]
    _, costs, _ = plan(*words, f"rollout.logprobs_every={asked}")
    assert costs.decode_step_s + 1024 * costs.decode_sequence_s == pytest.approx(measured_s, rel=0.1)


def test_compiling_saves_time_and_memory():
    (_, plain, slow), (_, phases, fast) = bench(QWEN3, "off"), bench(QWEN3, "on")
    assert phases["train"] < plain["train"] and fast.train_token_s < slow.train_token_s


def test_engines_that_share_a_device_share_what_decoding_takes_of_it():
    """But each has a host process of its own, so that as many sequences decode at once in each."""
    host = [plan(*SMALL, f"rollout.num_replicas={count}") for count in (1, 2)]
    assert host[0][1].decode_step_s == host[1][1].decode_step_s
    assert scenario_of(*host[1]).replicas(1) == (2, 1.0)
    words = ["num_gpus=1", "host_step_s=0", "host_sequence_s=0", "logprob_s=0", "rollout.max_num_seqs=16"]
    one, two = (plan(*LARGE, *words, f"rollout.num_replicas={count}")[1] for count in (1, 2))
    assert two.device_step_s == pytest.approx(2 * one.device_step_s / 0.74) and two.bound == "device"


def test_reading_weights_and_cache_bounds_a_decoding_step_from_below():
    run, costs, engine = plan(*LARGE, "num_gpus=1", "host_step_s=0", "host_sequence_s=0", "logprob_s=0")
    assert costs.bound == "device"
    assert costs.device_step_s > 2 * run.shape.parameters / run.device.memory_bytes_s
    assert costs.device_sequence_s > 300 * engine.cache_token_bytes / run.device.memory_bytes_s


def test_an_engine_that_waits_for_its_host_says_so():
    run, costs, _ = plan(*SMALL)
    constants = run.efficiency
    assert costs.bound == "host"
    assert costs.decode_step_s == constants.host_step_s
    assert costs.decode_sequence_s == constants.host_sequence_s + constants.logprob_s / run.cfg.logprobs_every


def test_few_sequences_read_few_experts():
    words = ["num_gpus=1", "hardware=mi350x", "shape=qwen3-30b-a3b", "host_step_s=0", "host_sequence_s=0"]
    one, many = (plan(*words, f"rollout.max_num_seqs={slots}")[1].device_step_s for slots in (1, 256))
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
