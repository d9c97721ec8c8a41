"""The command: runs that it must answer for, its words, its two outputs."""

import json
import sys
import types

import pytest

from rlpost.tools.plan import main
from rlpost.tools.planning.efficiency import Efficiency
from rlpost.tools.planning.hardware import DEVICES, device_of
from rlpost.tools.planning.run import PLAN_KEYS, read_run
from tests.tiny import write_qwen3

SMALL = ["hardware=h200", "num_gpus=2", "shape=smollm2-135m"]
RUNS = {
    "qwen3-8b": [
        "hardware=mi350x", "num_gpus=8", "model=hf", "model.path=Qwen/Qwen3-8B", "rollout=sglang", "rollout.n=5",
        "data.max_prompt_length=1024", "data.max_response_length=2048", "data.train_batch_size=64", "mean_length=600",
    ],
    "qwen2.5-7b": [
        "hardware=mi300x", "algo=dapo", "model=hf", "model.path=Qwen/Qwen2.5-Math-7B", "trainer=fully_async",
        "trainer.train_gpus=16", "trainer.rollout_gpus=16", "trainer.staleness_threshold=0.5", "rollout.n=16",
        "rollout.tensor_model_parallel_size=4", "data.max_prompt_length=2048", "data.max_response_length=8192",
        "data.train_batch_size=32", "actor.ppo_mini_batch_size=32", "mean_length=890", "prompt_tokens=150",
    ],
    "qwen3.5-35b-a3b": [
        "hardware=mi350x", "num_gpus=8", "model=hf", "model.path=Qwen/Qwen3.5-35B-A3B", "rollout.n=8",
        "data.max_prompt_length=1024", "data.max_response_length=2048", "rollout.tensor_model_parallel_size=2",
    ],
}  # fmt: skip


def planned(capsys, words: list[str]) -> tuple[int, dict]:
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("model", RUNS)
def test_runs_of_the_mission_fit_and_have_a_step_time(capsys, model):
    status, plan = planned(capsys, RUNS[model])
    assert (status, plan["fits"], plan["advice"], plan["run"]["model"]) == (0, True, [], model)
    assert all(phase["total_bytes"] == sum(phase["parts"].values()) for phase in plan["phases"])
    assert {"train", "logprob", "sync", "generate"} >= {phase["name"] for phase in plan["phases"]} >= {"train", "sync"}
    assert plan["step"]["step_s"] > sum(plan["step"]["phases"].values()) * 0.99 > 0
    assert plan["hardware"]["source"].startswith("AMD") and plan["host_bytes"]["processes"] > 0


def test_experts_count_in_total_and_active(capsys):
    _, plan = planned(capsys, RUNS["qwen3.5-35b-a3b"])
    assert plan["run"]["parameters"] == 35_114_261_360
    assert 2.5e9 < plan["run"]["active_parameters"] < 3.5e9


def test_text_shows_phases_components_assumptions_and_notes(capsys):
    assert main(RUNS["qwen3.5-35b-a3b"]) == 0
    text = capsys.readouterr().out
    shown = ["35.1e9 parameters, 2.95e9 active", "actor: optimizer", "engine: KV cache", "of 288.0", "tokens/s"]
    shown += ["AMD Instinct data sheet", "matmul=0.8", "Note: what linear attention keeps is an estimate"]
    assert [words for words in shown if words not in text] == []


def test_what_does_not_fit_says_what_to_change(capsys):
    assert main(["hardware=h100", "num_gpus=1", "shape=qwen3-8b"]) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text and "- train: num_gpus=" in text and "model.lora_rank=32" in text


def test_an_engine_that_cannot_work_has_no_step_time(capsys):
    status, plan = planned(capsys, ["hardware=h100", "num_gpus=1", "shape=qwen3-32b"])
    assert status == 1 and plan["step"] is None
    assert "rollout.gpu_memory_utilization needs" in next(p["problem"] for p in plan["phases"] if p["problem"])


def test_a_model_that_a_maker_writes_is_read(tmp_path, capsys, monkeypatch):
    maker = types.ModuleType("maker_of_plan")
    maker.make = lambda folder, seed: write_qwen3(folder)
    monkeypatch.setitem(sys.modules, "maker_of_plan", maker)
    status, plan = planned(capsys, ["num_gpus=1", f"cache_dir={tmp_path}", "model.path=maker:maker_of_plan.make"])
    assert status == 0 and plan["run"]["parameters"] < 1e6


@pytest.mark.parametrize(
    "words, message",
    [
        (["hardware=h2000", *SMALL[1:]], "hardware=h2000: not in the table; .*'h200'"),
        (["num_gpus=17", "shape=qwen3-8b"], "num_gpus=17: must be >= 1, and fill hosts of 8 or fewer alike"),
        (["num_gpus=many", "shape=qwen3-8b"], "num_gpus=many: expected int"),
        (["matmul=-1", *SMALL], "matmul=-1: must be >= 0"),
        (["matmul=0", *SMALL], "matmul=0: must be > 0"),
        (["bandwidth=inf", *SMALL], "bandwidth=inf: must be >= 0, and finite"),
        (["mean_length=0", *SMALL], "mean_length=0: must be >= 1"),
        (["prompt_tokens=0", *SMALL], "prompt_tokens=0: must be >= 1"),
        (["prompt_tokens=1000000", *SMALL], "prompt_tokens=1000000|prompt_tokens=1e.06 exceeds data.max_prompt_length"),
        (["h200"], "'h200': expected key=value"),
        (["rollout.nn=4"], "rollout.nn"),
        (["mean_length=1e6", *SMALL], "mean_length=1e.06 exceeds data.max_response_length"),
        (["rollout.tensor_model_parallel_size=3", *SMALL], "does not divide the 2 GPUs"),
        (["actor.fsdp.fsdp_size=3", *SMALL], "actor.fsdp.fsdp_size=3 does not divide the 2 trainer ranks"),
        (["actor.ppo_mini_batch_size=100000", *SMALL], "ppo_mini_batch_size=100000 is larger"),
    ],
)
def test_wrong_words_are_refused(capsys, words, message):
    assert main(words) == 2
    with pytest.raises(ValueError, match=message):
        read_run(words)
    assert capsys.readouterr().err.startswith("error: ")


def test_constants_are_keys_of_the_command():
    run = read_run([*SMALL, "matmul=0.5", "chunk_bytes=1024", "prefill_tokens=2048"])
    assert (run.efficiency.matmul, run.efficiency.chunk_bytes, run.efficiency.prefill_tokens) == (0.5, 1024, 2048)
    assert set(Efficiency.__dataclass_fields__) < set(PLAN_KEYS)


def test_pools_set_the_number_of_devices_where_nothing_else_does():
    words = ["shape=smollm2-135m", "trainer=fully_async", "trainer.train_gpus=16", "trainer.rollout_gpus=8"]
    run = read_run(words)
    assert (run.cfg.cluster.nnodes, run.pools.total, run.shards) == (3, 24, 16)


def test_every_device_has_a_source_and_aliases_lead_to_one():
    assert all(device.source and device.name == name for name, device in DEVICES.items())
    assert device_of("MI350") is DEVICES["mi350x"]


def test_lengths_of_the_quickstart_are_noted(capsys):
    assert main(["shape=qwen3-8b", "num_gpus=8"]) == 0
    assert "are the quickstart's: set data.max_prompt_length" in capsys.readouterr().out
    assert main(["shape=qwen3-8b", "num_gpus=8", "data.max_response_length=1024"]) == 0
    assert "quickstart" not in capsys.readouterr().out
