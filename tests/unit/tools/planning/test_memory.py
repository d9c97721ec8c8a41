"""Memory: the trainer's peak against the allocator's own record, and sums by hand."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from rlpost.batch import Batch
from rlpost.host import free_port
from rlpost.tools.planning.hardware import GIB
from rlpost.tools.planning.memory import predict_memory
from rlpost.tools.planning.run import read_run
from rlpost.workers.config import ActorConfig, ModelConfig
from rlpost.workers.engine.fsdp import FSDPEngine
from rlpost.workers.engine.head import CHUNK_BYTES
from tests.tiny import write_qwen3

LENGTH, VOCAB, LAYERS = 128, 2048, 6
GPU_8B = ["hardware=h200", "num_gpus=8", "shape=qwen3-8b", "data.max_response_length=2048", "algo.use_kl_loss=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield write_qwen3(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=False,
    )
    dist.destroy_process_group()


def engine_of(folder: Path, checkpointing: bool) -> FSDPEngine:
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing)
    actor = ActorConfig(dtype="bfloat16")
    return FSDPEngine(str(folder), model, actor, vocab_size=VOCAB, temperature=1.0, tokenizer_path=str(folder))


def batch_of(sequences: int) -> Batch:
    total = sequences * LENGTH
    columns = {"token_ids": torch.randint(0, VOCAB, (total,)), "loss_weights": torch.full((total,), 1 / total)}
    return Batch(torch.arange(0, total + 1, LENGTH), columns)


def loss(micro, output):
    return (output.logprobs * micro["loss_weights"]).sum(), {}


def peak_bytes(work, trace: Path) -> int:
    """Most memory that `work` had allocated at a time, from torch's record of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    recorded.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    present = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        present += event["args"]["Bytes"]
        peak = max(peak, present)
    return peak


def planned(folder: Path, sequences: int, num_micro: int, checkpointing: bool, *more: str):
    batch = sequences * num_micro // 2
    words = [
        "num_gpus=1", f"shape={folder}", "allocator=1", f"chunk_bytes={CHUNK_BYTES['cpu']}", "model.compile=off",
        "model.attn_implementation=sdpa", "algo.use_kl_loss=false",
        "rollout.n=2", f"data.train_batch_size={batch}", f"actor.ppo_mini_batch_size={batch}", "prompt_tokens=1",
        f"actor.ppo_max_token_len_per_gpu={sequences * LENGTH}", "data.max_prompt_length=1",
        f"data.max_response_length={LENGTH - 1}", f"mean_length={LENGTH - 1}",
        f"model.enable_gradient_checkpointing={checkpointing}", *more,
    ]  # fmt: skip
    return {phase.name: phase for phase in predict_memory(read_run(words)).phases}


@pytest.mark.parametrize("sequences, num_micro, checkpointing", [(8, 2, False), (16, 1, False), (16, 1, True)])
def test_peak_of_training_is_within_a_tenth(folder, tmp_path, sequences, num_micro, checkpointing):
    engine, batch = engine_of(folder, checkpointing), batch_of(sequences)
    engine.train_step([batch], loss)  # creates the optimizer's state
    state = [value for one in engine.optimizer.state.values() for value in one.values()]
    resident = sum(t.numel() * t.element_size() for t in [*engine.model.parameters(), *state])
    peak = resident + peak_bytes(lambda: engine.train_step([batch] * num_micro, loss), tmp_path / "trace.json")
    assert planned(folder, sequences, num_micro, checkpointing)["train"].trainer_bytes == pytest.approx(peak, rel=0.1)


def test_inference_needs_one_layer_and_a_chunk_of_logits(folder, tmp_path):
    engine, batch = engine_of(folder, False), batch_of(16)
    resident = 4 * sum(p.numel() for p in engine.model.parameters())
    peak = resident + peak_bytes(lambda: engine.forward([batch]), tmp_path / "trace.json")
    phase = planned(folder, 16, 1, False, "algo.use_kl_in_reward=true")["logprob"]
    without = phase.trainer_bytes - phase.parts["actor: optimizer"] - phase.parts["ref: weights"]
    assert without == pytest.approx(peak, rel=0.15)


def phases_of(*words: str):
    return {(p.name, p.devices): p for p in predict_memory(read_run([*GPU_8B, *words])).phases}


def test_state_is_spread_over_the_shards():
    parts = phases_of()["train", "all"].parts
    assert parts["actor: master weights"] == 4 * 8_190_735_360 / 8
    assert parts["actor: optimizer"] == 2 * parts["actor: master weights"]
    assert phases_of("actor.fsdp.fsdp_size=4")["train", "all"].parts["gradients"] == 4 * 8_190_735_360 / 4


def test_lora_trains_little_and_needs_no_reference():
    full, lora = (phases_of("algo.use_kl_loss=true", *more) for more in ([], ["model.lora_rank=16"]))
    assert "ref: weights" in full["logprob", "all"].parts and "ref: weights" not in lora["logprob", "all"].parts
    assert lora["train", "all"].parts["actor: optimizer"] < full["train", "all"].parts["actor: optimizer"] / 100


def test_a_critic_doubles_the_state():
    parts = phases_of("algo=ppo")["generate", "all"].parts
    assert parts["critic: optimizer"] == parts["actor: optimizer"]


def test_engines_that_sleep_leave_and_engines_that_stay_do_not():
    sleeping, staying = phases_of(), phases_of("rollout.free_cache_engine=false")
    assert "engine: KV cache" not in sleeping["train", "all"].parts
    assert staying["train", "all"].parts["engine: KV cache"] > 40 * GIB
    assert "engine: KV cache" not in sleeping["sync", "all"].parts  # it wakes after the weights are there


def test_offloading_moves_state_to_the_host():
    words = ["actor.fsdp.param_offload=true", "actor.fsdp.optimizer_offload=true"]
    assert not [name for name in phases_of(*words)["generate", "all"].parts if name.startswith("actor")]
    host = predict_memory(read_run([*GPU_8B, *words])).host
    assert host["offloaded by the trainer"] == pytest.approx(12 * 8_190_735_360)


def test_disjoint_pools_have_devices_of_their_own():
    phases = phases_of("trainer=fully_async", "trainer.train_gpus=6", "trainer.rollout_gpus=2")
    assert ("sync", "rollout") in phases and ("sync", "train") in phases
    assert not [name for name in phases["train", "train"].parts if name.startswith("engine")]
    assert not [name for name in phases["generate", "rollout"].parts if name.startswith("actor")]


def test_shared_devices_train_and_generate_at_once():
    phases = phases_of("trainer=fully_async", "trainer.share_gpus=true")
    both = {"activations", "engine: KV cache"}
    assert both <= phases["train", "all"].parts.keys() and both <= phases["generate", "all"].parts.keys()


def test_cache_is_what_the_share_leaves_and_bounds_the_slots():
    long = [*GPU_8B, "data.max_prompt_length=256"]
    engine = predict_memory(read_run([*long, "mean_length=1000", "prompt_tokens=24"])).engine
    assert engine.cache_token_bytes == 2 * 36 * 8 * 128 * 2
    assert engine.weights + engine.cache + engine.workspace == pytest.approx(0.5 * 139.8 * GIB)
    small = predict_memory(
        read_run([*long, "mean_length=2000", "prompt_tokens=256", "rollout.gpu_memory_utilization=0.2"])
    ).engine
    assert small.slots == int(small.cache / small.cache_token_bytes / 2256) < engine.slots == 256


def test_engines_of_one_device_share_its_share():
    one, two = (predict_memory(read_run([*GPU_8B, f"rollout.num_replicas={count}"])) for count in (8, 16))
    assert two.engine.parts["engine: weights"] == 2 * one.engine.weights
    held = [sum(m.engine.parts.values()) - m.engine.parts["engine: graphs"] for m in (one, two)]
    assert held == pytest.approx([0.5 * 139.8 * GIB] * 2)
    assert two.engine.cache < one.engine.cache / 2
    assert two.host["weights of sleeping engines"] == 2 * one.host["weights of sleeping engines"]


def test_attention_keeps_a_key_head_for_every_query_head_where_its_kernel_needs_that():
    nvidia, amd = (read_run([*GPU_8B, f"hardware={name}"]).kernel for name in ("h200", "mi350x"))
    assert (nvidia, amd) == ("grouped", "repeated")


def test_an_engine_whose_cache_holds_no_sequence_is_a_problem():
    phase = phases_of("rollout.gpu_memory_utilization=0.11")["generate", "all"]
    assert not phase.fits and "rollout.gpu_memory_utilization needs 0.1" in phase.problem
