"""One rank: checkpoints, exports, LoRA, tied weights, experts, gradients that are not finite."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from one_rank import make_engine as _engine
from one_rank import update as _update
from one_rank import weighed as _weighed
from one_rank import weights as _weights
from ranks import TEMPERATURE, VOCAB, policy_loss, ragged_batch, value_loss, write_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlpost.batch import Batch
from rlpost.files import is_disk_full
from rlpost.workers.engine import checkpoint
from rlpost.workers.engine import weights as engine_weights

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def any_path(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tie=request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("portion", [1, 5000, 64 << 20])
def test_names_and_values_are_the_checkpoints(any_path, portion, monkeypatch):
    monkeypatch.setattr(engine_weights, "PORTION_BYTES", portion)
    saved = load_file(any_path / "model.safetensors")
    weights = _weights(_engine(any_path))
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert {w.dtype for _, w in _engine(any_path).named_weights(torch.bfloat16)} == {torch.bfloat16}


def test_export_loads_in_transformers_with_the_same_logprobs(any_path, tmp_path):
    engine = _engine(any_path)
    _update(engine)
    engine.export_hf(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings == engine.model.model.config.tie_word_embeddings
    batch = ragged_batch().select([6], ["token_ids"])
    ids = batch["token_ids"]
    log_p = (model(ids[None]).logits[0, :-1, :VOCAB] / TEMPERATURE).log_softmax(-1)
    (output,) = engine.forward([batch])
    torch.testing.assert_close(output.logprobs[1:], log_p.gather(1, ids[1:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert output.logprobs[0] == 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reference_is_the_actor_before_training_also_far_into_a_sequence(path, dtype):
    ids = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(1))
    batch = Batch(torch.tensor([0, len(ids)]), {"token_ids": ids})
    actor, reference = (_engine(path, actor={"dtype": dtype}, train=train) for train in (True, False))
    assert torch.equal(reference.forward([batch])[0].logprobs, actor.forward([batch])[0].logprobs)
    assert {buffer.dtype for buffer in reference.model.buffers()} == {torch.float32}


def test_tied_weights_stay_tied(path):
    engine = _engine(path)
    _update(engine)
    model = engine.model.model
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_lora_merges_out_of_place_and_exports_merged(path, tmp_path):
    engine = _engine(path, model={"lora_rank": 4})
    before = _weights(engine)
    assert all(torch.equal(w, load_file(path / "model.safetensors")[n]) for n, w in before.items())
    _update(engine)
    merged = _weights(engine)
    base = {n.replace(".base_layer", ""): p for n, p in engine.model.model.named_parameters() if ".lora_" not in n}
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    assert changed == {n for n in merged if "_proj" in n}
    assert all(torch.equal(base[name].full_tensor(), before[name]) for name in before)
    engine.export_hf(tmp_path)
    plain = _engine(tmp_path)
    batch = ragged_batch()
    torch.testing.assert_close(
        plain.forward([batch])[0].logprobs, engine.forward([batch])[0].logprobs, rtol=1e-5, atol=1e-5
    )
    assert not torch.equal(engine.forward([batch], adapter=False)[0].logprobs, engine.forward([batch])[0].logprobs)
    _update(engine)  # the adapter still trains after it was off
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(_weights(engine)[name], merged[name])


def test_lora_for_a_module_that_is_not_there_is_refused(path):
    with pytest.raises(ValueError, match="target_modules: the model has no module 'v_prj'; did you mean 'v_proj'"):
        _engine(path, model={"lora_rank": 4, "target_modules": ["q_proj", "v_prj"]})


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("updates_before", [0, 2])
def test_resumed_equals_uninterrupted(path, tmp_path, updates_before, model):
    engine = _engine(path, model=model)
    for _ in range(updates_before):
        _update(engine)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    engine.save(tmp_path / "state")
    drawn = random.random(), np.random.rand(), torch.rand(())
    metrics = [_update(engine) for _ in range(2)]
    resumed = _engine(path, model=model)
    _update(resumed)
    resumed.load(tmp_path / "state")
    assert (random.random(), np.random.rand(), torch.rand(())) == drawn
    assert [_update(resumed) for _ in range(2)] == metrics
    expected = _weights(engine)
    assert all(torch.equal(weight, expected[name]) for name, weight in _weights(resumed).items())


def test_state_is_spread_over_files_of_bounded_size(path, tmp_path, monkeypatch):
    engine, largest = _engine(path), 8192
    _update(engine)
    monkeypatch.setattr(checkpoint, "FILE_BYTES", largest)
    digests = engine.save(tmp_path / "state")
    files = {str(file.relative_to(tmp_path / "state")) for file in tmp_path.rglob("*") if file.is_file()}
    assert digests.keys() == files and len(files) > 10
    for file in (tmp_path / "state" / "shards").iterdir():
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= largest
    resumed = _engine(path)
    resumed.load(tmp_path / "state")
    assert all(torch.equal(weight, _weights(engine)[name]) for name, weight in _weights(resumed).items())
    assert _update(resumed) == _update(engine)


def test_a_full_disk_is_an_ordinary_error_that_tells_so(path, tmp_path, monkeypatch):
    engine = _engine(path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match="rank 0 failed to save to .*: OSError: .*No space left on device") as error:
        engine.save(tmp_path / "state")
    assert is_disk_full(error.value) and is_disk_full(RuntimeError(str(error.value)))


def test_a_state_of_another_model_is_refused(path, tmp_path):
    _engine(path, model={"lora_rank": 4}).save(tmp_path / "state")
    with pytest.raises(RuntimeError, match="rank 0 failed to load from .*Missing key"):
        _engine(path).load(tmp_path / "state")


def test_load_of_an_empty_folder_says_so(path, tmp_path):
    with pytest.raises(ValueError, match="holds no engine state"):
        _engine(path).load(tmp_path)


def test_critic_export_keeps_its_head(path, tmp_path):
    critic = _engine(path, critic=True)
    _update(critic, value_loss)
    critic.export_hf(tmp_path)
    batch = ragged_batch()
    values = critic.forward([batch])[0].values
    assert torch.equal(_engine(tmp_path, critic=True).forward([batch])[0].values, values)
    row = batch.select([1])
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        critic.forward([row])[0].values[1:], model(row["token_ids"][None]).logits[0, :-1, 0], rtol=1e-4, atol=1e-5
    )


def test_gradient_that_is_not_finite_changes_nothing(path):
    engine = _engine(path)
    _update(engine)
    before, state = _weights(engine), engine.optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().clone()
    metrics = _update(engine, lambda micro, output: (output.logprobs.sum() * torch.inf, {}))
    assert metrics["skipped_updates"].value == 1 and metrics["grad_norm"].weight == 0
    assert all(torch.equal(weight, before[name]) for name, weight in _weights(engine).items())
    assert torch.equal(engine.optimizer.state_dict()["state"][0]["exp_avg"].full_tensor(), state)
    assert engine.updates == 1
    assert _update(engine)["skipped_updates"].value == 0


def test_gradient_is_clipped_to_its_global_norm(path):
    free, clipped = _engine(path), _engine(path, actor={"grad_clip": 0.01})
    norm = _update(free)["grad_norm"].value
    assert _update(clipped)["grad_norm"].value == norm > 0.01
    for one, other in zip(free.optimizer.state.values(), clipped.optimizer.state.values(), strict=True):
        want = one["exp_avg"].full_tensor() * 0.01 / norm
        torch.testing.assert_close(other["exp_avg"].full_tensor(), want, rtol=1e-5, atol=1e-9)


def test_inference_between_updates_sees_the_new_weights(path):
    engine, batch = _engine(path), ragged_batch()
    outputs = []
    for _ in range(3):
        outputs.append(engine.forward([batch])[0].logprobs)
        _update(engine)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    fresh = _engine(path)
    _update(fresh)
    _update(fresh)
    assert torch.equal(fresh.forward([batch])[0].logprobs, outputs[2])


def test_sampled_id_beyond_the_tokenizer_is_an_error(path):
    batch = ragged_batch()
    batch["token_ids"][5] = VOCAB
    with pytest.raises(ValueError, match=f"token id {VOCAB} has probability 0"):
        _engine(path).forward([batch])


def test_reference_is_kept_in_the_compute_dtype_and_has_no_gradient(path):
    engine = _engine(path, train=False, actor={"dtype": "bfloat16"})
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in engine.model.parameters())


def test_bfloat16_compute_keeps_float32_master_weights(path):
    engine, exact, batch = _engine(path, actor={"dtype": "bfloat16"}), _engine(path), ragged_batch()
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    torch.testing.assert_close(
        engine.forward([batch])[0].logprobs, exact.forward([batch])[0].logprobs, rtol=0.1, atol=0.3
    )
    assert _update(engine)["grad_norm"].value == pytest.approx(_update(exact)["grad_norm"].value, rel=0.1)


def test_expert_weights_leave_under_their_checkpoint_names(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    engine = _engine(tmp_path)
    weights = _weights(engine)
    assert any(".experts.3." in name for name in saved)
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert _update(engine)["grad_norm"].value > 0


def test_checkpoint_that_lacks_weights_is_refused(path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(path)
    state = {n: w for n, w in model.state_dict().items() if "layers.1" not in n}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="the checkpoint lacks .* weights, such as .*layers.1"):
        _engine(tmp_path)


def test_micro_batches_of_one_rank_are_reduced_once(path):
    whole, parts, batch = _engine(path), _engine(path), _weighed()
    whole.train_step([batch], policy_loss)
    parts.train_step([batch.select([i]) for i in range(len(batch))], policy_loss)
    for one, other in zip(whole.optimizer.state.values(), parts.optimizer.state.values(), strict=True):
        torch.testing.assert_close(other["exp_avg"].full_tensor(), one["exp_avg"].full_tensor(), rtol=1e-4, atol=1e-7)
