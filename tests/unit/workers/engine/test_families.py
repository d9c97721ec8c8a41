"""Model families whose layers do more than Qwen3's: computed as transformers does, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import make_engine
from ranks import TEMPERATURE, VOCAB
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlpost.batch import Batch

pytestmark = pytest.mark.usefixtures("process_group")

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NOISY = {  # what they drop in training, by default or as some checkpoints have it
    "seed_oss": {},
    "opt": {"word_embed_proj_dim": 64},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.1, "num_local_experts": 4},
}


def write(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint of large random weights."""
    kind = CONFIG_MAPPING[family]
    known = {name for parent in kind.__mro__ for name in getattr(parent, "__annotations__", {})}
    config = kind(**{name: value for name, value in SHAPE.items() if name in known} | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.to(dtype).save_pretrained(folder)
    return folder


def batch(*lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    return Batch(torch.tensor([0, *lengths]).cumsum(0), {"token_ids": torch.cat(ids)})


def by_transformers(path: Path, dtype: torch.dtype, rows: Batch) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    found = []
    for ids in rows["token_ids"].split(rows.seqlens.tolist()):
        log_p = (model(ids[None]).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        found += [torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]]
    return torch.cat(found).detach()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", NOISY)
def test_training_is_without_noise(family, checkpointing, tmp_path):
    path = write(tmp_path, family, **NOISY[family])
    engine = make_engine(path, model={"enable_gradient_checkpointing": checkpointing}, actor={"dtype": "float32"})
    rows, seen = batch(40, 7), []
    expected = engine.forward([rows])[0].logprobs

    def loss(micro: Batch, output: Any):
        seen.append(output.logprobs.detach())
        return output.logprobs.sum(), {}

    engine.accumulate([rows], loss)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(expected, by_transformers(path, torch.float32, rows), rtol=0, atol=2e-5)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("computed", ["float32", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_dtype_of_the_checkpoint_rounds_nothing_but_its_weights(family, computed, saved, tmp_path):
    path, rows = write(tmp_path, family, saved), batch(200)
    engine = make_engine(path, actor={"dtype": computed})
    difference = engine.forward([rows])[0].logprobs - by_transformers(path, getattr(torch, computed), rows)
    assert difference.abs().mean() < 1e-5


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_next", {"num_hidden_layers": 4}),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
        ("recurrent_gemma", {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}),
    ],
)
def test_layers_that_carry_a_state_are_refused(family, changes, tmp_path):
    CONFIG_MAPPING[family](vocab_size=VOCAB, **changes).save_pretrained(tmp_path)  # before any weight is read
    with pytest.raises(ValueError, match="carries a state from token to token.* leak from one packed sequence"):
        make_engine(tmp_path)


def test_softcap_within_a_composite_config_is_refused(tmp_path):
    text = CONFIG_MAPPING["gemma3_text"](**SHAPE, final_logit_softcapping=30.0)
    CONFIG_MAPPING["gemma3"](text_config=text.to_dict()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="final_logit_softcapping=30.0 is not supported by the logprob head"):
        make_engine(tmp_path)


def test_buffer_with_values_of_its_own_is_refused(tmp_path):
    shape = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    shape |= {"topk_group": 1, "first_k_dense_replace": 1}
    write(tmp_path, "glm4_moe", **shape)
    make_engine(tmp_path, actor={"dtype": "float32"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (bias,) = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias.add_(0.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="values of its own for .*e_score_correction_bias, which is no parameter"):
        make_engine(tmp_path, actor={"dtype": "float32"})


def test_adapter_of_the_output_head_is_refused(tmp_path):
    write(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="model.target_modules: 'lm_head' is the output head"):
        make_engine(tmp_path, model={"lora_rank": 4, "target_modules": ["q_proj", "lm_head"]})


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


def test_window_that_attention_is_told_of(tmp_path):
    path, rows = write(tmp_path, "qwen2", **WINDOW), batch(30, 5)
    got = make_engine(path, actor={"dtype": "float32"}).forward([rows])[0].logprobs
    torch.testing.assert_close(got, by_transformers(path, torch.float32, rows), rtol=0, atol=2e-5)


def test_window_that_only_a_mask_knows_of_is_refused_for_longer_sequences(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32, "layer_types": ["sliding_attention"] * 2}
    path = write(tmp_path, "qwen2_moe", **WINDOW, **experts)
    engine, short = make_engine(path, actor={"dtype": "float32"}), batch(8, 5)
    got = engine.forward([short])[0].logprobs
    torch.testing.assert_close(got, by_transformers(path, torch.float32, short), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="sliding window of 8 tokens by a mask alone"):
        engine.forward([batch(9)])
