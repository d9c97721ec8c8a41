"""The same batch on any arrangement of ranks gives the same gradient, and that of plain autograd."""

from pathlib import Path

import pytest
import torch
from ranks import TEMPERATURE, VOCAB, Case, in_ranks, optim_config, ragged_batch, run_cases, write_model
from transformers import AutoModelForCausalLM

from rlpost.algos.aggregate import AGGREGATIONS, loss_weights
from rlpost.workers.config import FSDPConfig

MODES = AGGREGATIONS.names()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def _cases(path: Path, **arrangement) -> dict[str, Case]:
    cases = {mode: Case(str(path), mode, **arrangement) for mode in MODES}
    cases["critic"] = Case(str(path), critic=True, **arrangement)
    return cases


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def alone(path, saved, tmp_path_factory):
    cases = _cases(path)
    cases["token-mean"].save_to = saved
    cases["resumed"] = Case(str(path), load_from=saved)
    return in_ranks(1, run_cases, cases, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(path, saved, alone, tmp_path_factory):
    """Two ranks: data parallel, with more and smaller micro-batches, and sequence parallel, also with checkpointing."""
    cases = _cases(path)
    cases["small"] = Case(str(path), max_tokens=31)
    cases["sequence"] = Case(str(path), sequence=2, critic=True)
    cases["checkpointed"] = Case(str(path), model={"enable_gradient_checkpointing": True})
    cases["sequence_checkpointed"] = Case(str(path), sequence=2, model={"enable_gradient_checkpointing": True})
    cases["resumed"] = Case(str(path), load_from=saved)
    cases["lora"] = Case(str(path), model={"lora_rank": 4})
    cases["kept"] = Case(str(path), max_tokens=31, actor={"fsdp": FSDPConfig(reshard_after_forward=False)})
    return in_ranks(2, run_cases, cases, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(path, tmp_path_factory):
    """Four ranks: two replicas of two shards, and packs sliced over two ranks."""
    cases = {
        "hsdp": Case(str(path), fsdp_size=2, max_tokens=31),
        "hsdp_sequence": Case(str(path), fsdp_size=2, sequence=2, critic=True),
        "sequence_of_four": Case(str(path), sequence=4),
    }
    return in_ranks(4, run_cases, cases, tmp_path_factory.mktemp("four"))


def _assert_same(result, expected, role: str = "actor") -> None:
    for what in ("before", "after"):
        torch.testing.assert_close(result[f"{role}_{what}"], expected[f"{role}_{what}"], rtol=1e-5, atol=1e-5)
    for what in ("gradients", "weights"):
        assert result[f"{role}_{what}"].keys() == expected[f"{role}_{what}"].keys()
        for name, want in expected[f"{role}_{what}"].items():
            got = result[f"{role}_{what}"][name]
            assert (got - want).norm() <= 1e-5 * want.norm() + 1e-9, f"{what} of {name}"
    for name, want in expected[f"{role}_metrics"].items():
        assert result[f"{role}_metrics"][name] == pytest.approx(want, rel=1e-5), name


def _padded_logprobs(model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropy `[N]` of response tokens, from a right-padded batch and a full softmax."""
    rows = batch["token_ids"].split(batch.seqlens.tolist())
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention_mask = torch.arange(ids.shape[1]) < batch.seqlens[:, None]
    logits = model(ids, attention_mask=attention_mask.long()).logits[..., :VOCAB] / TEMPERATURE
    log_p = logits.log_softmax(-1)[:, :-1]
    entropy = torch.nn.functional.pad(-(log_p.exp() * log_p).sum(-1), (1, 0))
    logprobs = torch.nn.functional.pad(log_p.gather(2, ids[:, 1:, None]).squeeze(2), (1, 0))
    return tuple(x[attention_mask] * batch["response_mask"] for x in (logprobs, entropy))


@pytest.mark.parametrize("mode", MODES)
def test_update_equals_plain_autograd_on_padded_rows(alone, path, mode):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    batch, cfg = ragged_batch(), optim_config()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, eps=cfg.eps, weight_decay=cfg.weight_decay)
    torch.testing.assert_close(alone[mode]["actor_before"], _padded_logprobs(model, batch)[0], rtol=1e-5, atol=1e-5)
    for rows in (range(6), range(6, 10)):
        mini = batch.select(rows)
        logprobs, entropy = _padded_logprobs(model, mini)
        shares = loss_weights(mini["response_mask"], mini.cu_seqlens, mode, scale_factor=7.0)
        optimizer.zero_grad()
        (-(mini["advantages"] * logprobs + 0.05 * entropy) * shares).sum().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        got = alone[mode]["actor_weights"][name]
        assert (got - parameter).norm() <= 1e-5 * parameter.norm(), name
    assert alone[mode]["actor_metrics"]["actor/tokens"] == float(batch["response_mask"].sum())
    torch.testing.assert_close(alone[mode]["ref"], alone[mode]["actor_before"], rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_update_is_the_same_on_two_ranks(alone, two, mode):
    _assert_same(two[mode], alone[mode])


@pytest.mark.parametrize("case", ["small", "kept", "sequence", "checkpointed", "sequence_checkpointed"])
def test_update_is_the_same_however_two_ranks_share_it(alone, two, case):
    _assert_same(two[case], alone["token-mean"])


@pytest.mark.parametrize("case", ["critic", "sequence"])
def test_critic_update_is_the_same_on_two_ranks(alone, two, case):
    _assert_same(two[case], alone["critic"], role="critic")
    assert alone["critic"]["critic_before"].abs().max() == 0.0
    assert alone["critic"]["critic_after"].abs().max() > 0.0


@pytest.mark.parametrize("case", ["hsdp", "hsdp_sequence", "sequence_of_four"])
def test_update_is_the_same_on_four_ranks(alone, four, case):
    _assert_same(four[case], alone["token-mean"])


def test_critic_update_is_the_same_under_replicas_and_slices(alone, four):
    _assert_same(four["hsdp_sequence"], alone["critic"], role="critic")


def test_state_of_one_rank_resumes_on_two(alone, two):
    assert torch.equal(alone["resumed"]["actor_before"], alone["token-mean"]["actor_after"])
    _assert_same(two["resumed"], alone["resumed"])


def test_lora_trains_the_adapter_alone_and_keeps_the_reference(alone, two):
    lora, full = two["lora"], alone["token-mean"]
    assert all(".lora_" in name for name in lora["actor_gradients"])
    torch.testing.assert_close(lora["actor_before"], full["actor_before"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lora["ref"], lora["actor_before"], rtol=0, atol=0)
    assert (lora["actor_after"] - lora["actor_before"]).abs().max() > 1e-3
    assert lora["actor_weights"].keys() == full["actor_weights"].keys()
