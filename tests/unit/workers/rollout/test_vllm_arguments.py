from dataclasses import replace

import pytest

from rlpost.platform import Platform
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout import served, vllm
from rlpost.workers.rollout.vllm import engine_arguments

ACCEPTED = {"model", "enable_prefix_caching", "enable_chunked_prefill", "max_num_seqs", "kv_cache_memory_bytes"}


def info(embedding_size: int) -> ModelInfo:
    return ModelInfo(
        path="/model",
        tokenizer_path="/model",
        vocab_size=100,
        embedding_size=embedding_size,
        stop_token_ids=(1,),
        max_position_embeddings=64,
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_prefix_cache": True}, "engine_kwargs.enable_prefix_cache: .*did you mean 'enable_prefix_caching'"),
        ({"max_num_seqs": 3}, "engine_kwargs.max_num_seqs: set rollout.max_num_seqs instead"),
        ({"logprobs_mode": "raw_logits"}, "engine_kwargs.logprobs_mode: rlpost sets it"),
    ],
)
def test_engine_kwargs_that_cannot_work_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        engine_arguments(RolloutConfig(engine_kwargs=kwargs), info(100), 64, ACCEPTED)


def test_engine_kwargs_pass_through():
    cfg = RolloutConfig(engine_kwargs={"kv_cache_memory_bytes": 1 << 20}, max_num_batched_tokens=512)
    arguments = engine_arguments(cfg, info(100), 64, ACCEPTED)
    assert arguments["kv_cache_memory_bytes"] == 1 << 20
    assert arguments["max_num_batched_tokens"] == 512


def test_only_a_padded_embedding_is_masked():
    assert "additional_config" not in engine_arguments(RolloutConfig(), info(100), 64, ACCEPTED)
    assert engine_arguments(RolloutConfig(), info(128), 64, ACCEPTED)["additional_config"] == {"rlpost_vocab_size": 100}


def test_engine_loads_the_model_as_the_trainer_does():
    model = replace(info(100), trust_remote_code=True, override_config={"rope_theta": 5.0})
    arguments = engine_arguments(RolloutConfig(), model, 64, ACCEPTED)
    assert arguments["trust_remote_code"] is True and arguments["hf_overrides"] == {"rope_theta": 5.0}


@pytest.mark.parametrize(
    ("kind", "dtype", "switch", "expected"),
    [
        ("cuda", "bfloat16", "auto", True),
        ("cuda", "float16", "off", False),
        ("cuda", "float32", "on", False),  # it is in float32 already
        ("rocm", "bfloat16", "auto", False),  # the trainer's head rounds there too
        ("rocm", "bfloat16", "on", True),
        ("cpu", "bfloat16", "auto", False),
    ],
)
def test_logits_are_in_float32_where_the_trainer_has_them_so_or_the_user_says_so(
    monkeypatch, kind, dtype, switch, expected
):
    for module in (vllm, served):
        monkeypatch.setattr(module, "platform", lambda: Platform(kind))
    cfg = RolloutConfig(dtype=dtype, fp32_lm_head=switch)
    overrides = engine_arguments(cfg, info(100), 64, ACCEPTED)["hf_overrides"]
    assert overrides == ({"head_dtype": "float32"} if expected else {})
    additional = engine_arguments(cfg, info(100), 64, ACCEPTED).get("additional_config", {})
    assert additional == ({"rlpost_float32_logits": True} if expected and switch == "on" else {})


def test_every_batch_size_that_occurs_is_captured_unless_the_user_says_which(monkeypatch):
    monkeypatch.setattr(vllm, "platform", lambda: Platform("cuda"))
    sizes = engine_arguments(RolloutConfig(max_num_seqs=1024), info(100), 64, ACCEPTED)["cudagraph_capture_sizes"]
    assert sizes[0] == 1 and sizes[-1] == 1024 and len(sizes) < 30
    padding = {size: next(s for s in sizes if s >= size) - size for size in range(1, 1025)}
    assert all(added <= max(7, size / 4) for size, added in padding.items())
    cfg = RolloutConfig(engine_kwargs={"compilation_config": {"max_cudagraph_capture_size": 64}})
    accepted = ACCEPTED | {"compilation_config"}
    assert "cudagraph_capture_sizes" not in engine_arguments(cfg, info(100), 64, accepted)
    eager = RolloutConfig(enforce_eager=True)
    assert "cudagraph_capture_sizes" not in engine_arguments(eager, info(100), 64, ACCEPTED)


def test_tensor_parallel_ranks_are_processes_of_the_engine():
    cfg = RolloutConfig(tensor_model_parallel_size=2)
    assert engine_arguments(cfg, info(100), 64, ACCEPTED)["distributed_executor_backend"] == "mp"
