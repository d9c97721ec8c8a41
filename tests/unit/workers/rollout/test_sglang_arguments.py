import json
from dataclasses import replace

import pytest

from rlpost.platform import Platform
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout import sglang
from rlpost.workers.rollout.sglang import engine_arguments

ACCEPTED = {"model_path", "disable_radix_cache", "max_running_requests", "schedule_policy", "attention_backend"}
MODEL = ModelInfo(
    path="/model",
    tokenizer_path="/model",
    vocab_size=100,
    embedding_size=128,
    stop_token_ids=(1,),
    max_position_embeddings=64,
)


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(sglang, "platform", lambda: Platform("cuda"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"disable_radix": True}, "engine_kwargs.disable_radix: SGLang takes no .*did you mean 'disable_radix_cache'"),
        ({"max_running_requests": 3}, "engine_kwargs.max_running_requests: set rollout.max_num_seqs instead"),
        ({"custom_weight_loader": ["a.b"]}, "engine_kwargs.custom_weight_loader: rlpost sets it"),
    ],
)
def test_engine_kwargs_that_cannot_work_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        engine_arguments(RolloutConfig(engine_kwargs=kwargs), MODEL, 64, ACCEPTED)


def test_engine_kwargs_pass_through_and_win():
    cfg = RolloutConfig(engine_kwargs={"schedule_policy": "lpm", "attention_backend": "triton"})
    arguments = engine_arguments(cfg, MODEL, 64, ACCEPTED)
    assert arguments["schedule_policy"] == "lpm" and arguments["attention_backend"] == "triton"


def test_engine_loads_the_model_as_the_trainer_does():
    model = replace(MODEL, trust_remote_code=True, override_config={"rope_theta": 5.0})
    arguments = engine_arguments(RolloutConfig(), model, 64, ACCEPTED)
    assert arguments["trust_remote_code"] is True
    assert json.loads(arguments["json_model_override_args"]) == {"rope_theta": 5.0}


@pytest.mark.parametrize(("num_seqs", "tokens"), [(1, 72), (4, 288), (100_000, 32768)])
def test_cache_on_cpu_holds_what_can_run_at_once_and_one_request_at_least(num_seqs, tokens):
    arguments = engine_arguments(RolloutConfig(max_num_seqs=num_seqs), MODEL, 64, ACCEPTED)
    assert arguments["max_total_tokens"] == tokens and "mem_fraction_static" not in arguments


def test_gpu_memory_is_given_back_only_when_asked_to(on_cuda):
    cfg = RolloutConfig(gpu_memory_utilization=0.4)
    assert engine_arguments(cfg, MODEL, 64, ACCEPTED)["mem_fraction_static"] == 0.4
    assert engine_arguments(cfg, MODEL, 64, ACCEPTED)["enable_weights_cpu_backup"] is True
    staying = engine_arguments(RolloutConfig(free_cache_engine=False), MODEL, 64, ACCEPTED)
    assert staying["enable_memory_saver"] is False and staying["enable_weights_cpu_backup"] is False


def test_piecewise_graphs_are_turned_off_where_sglang_has_them(on_cuda):
    name = "disable_piecewise_cuda_graph"
    assert name not in engine_arguments(RolloutConfig(), MODEL, 64, ACCEPTED)
    assert engine_arguments(RolloutConfig(), MODEL, 64, ACCEPTED | {name})[name] is True


def test_graphs_are_captured_up_to_the_largest_batch(on_cuda):
    arguments = engine_arguments(RolloutConfig(max_num_seqs=600), MODEL, 64, ACCEPTED | {"cuda_graph_bs"})
    assert arguments["cuda_graph_bs"][-1] == 600
    assert "cuda_graph_bs" not in engine_arguments(RolloutConfig(max_num_seqs=600), MODEL, 64, ACCEPTED)


def test_float32_is_refused_where_its_kernels_have_none(on_cuda):
    with pytest.raises(ValueError, match="rollout.dtype=float32: .*set rollout.dtype=bfloat16"):
        engine_arguments(RolloutConfig(dtype="float32"), MODEL, 64, ACCEPTED)


def test_logits_are_in_float32_only_where_the_user_says_so(on_cuda):
    def head(**changes) -> bool:
        return engine_arguments(RolloutConfig(dtype="bfloat16", **changes), MODEL, 64, ACCEPTED)["enable_fp32_lm_head"]

    assert [head(), head(fp32_lm_head="on"), head(fp32_lm_head="off")] == [False, True, False]
