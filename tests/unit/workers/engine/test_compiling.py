"""torch.compile of layers and head: the same numbers, one program for all layers of a kind."""

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from one_rank import make_engine, update, weighed, weights
from ranks import policy_loss, ragged_batch, write_model
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from rlpost.workers.engine import compiling

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def compiles_with(monkeypatch):
    """All of torch.compile but the generation of C++, which takes minutes here; tests/gpu has the whole of it."""

    def choose(backend: str | Callable) -> None:
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))

    compiling.compiled.cache_clear()
    yield choose
    compiling.compiled.cache_clear()
    torch.compiler.reset()


def test_compiled_layers_and_head_give_the_same_update(tmp_path, compiles_with):
    path = write_model(tmp_path)
    plain = make_engine(path, model={"compile": "off"})
    compiles_with("aot_eager")
    compiled = make_engine(path, model={"compile": "on"})
    for _ in range(2):  # the weights of the second come from the first
        want, got = update(plain), update(compiled)
        assert got["grad_norm"].value == pytest.approx(want["grad_norm"].value, rel=1e-5)
    for one, other in zip(plain.optimizer.state.values(), compiled.optimizer.state.values(), strict=True):
        expected = one["exp_avg"].full_tensor()
        assert (other["exp_avg"].full_tensor() - expected).norm() <= 1e-4 * expected.norm() + 1e-9
    batch = ragged_batch()
    torch.testing.assert_close(
        compiled.forward([batch])[0].logprobs, plain.forward([batch])[0].logprobs, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "family, kinds",
    [
        (Qwen3Config, ["full_attention"]),
        (Gemma3TextConfig, ["sliding_attention", "full_attention"]),
    ],
)
def test_layers_of_a_kind_share_what_is_compiled(family, kinds, tmp_path, compiles_with):
    compiles_with("eager")

    def programs(num_layers: int) -> int:
        config = family(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, num_hidden_layers=num_layers, layer_types=kinds * (num_layers // len(kinds)),
        )  # fmt: skip
        folder = tmp_path / str(num_layers)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        engine = make_engine(folder, model={"compile": "on"})
        for rows in (range(3), range(3, 6), range(5, 9)):
            micro = weighed().select(rows)
            engine.forward([micro])
            engine.train_step([micro], policy_loss)
        return torch._dynamo.utils.counters["frames"]["ok"]

    few = programs(2)
    assert 0 < few == programs(6)


def test_another_number_of_sequences_compiles_nothing_new(tmp_path, compiles_with):
    compiles_with("eager")
    engine = make_engine(write_model(tmp_path), model={"compile": "on"})

    def programs(rows: range) -> int:
        engine.forward([weighed().select(rows)])
        engine.train_step([weighed().select(rows)], policy_loss)
        return torch._dynamo.utils.counters["frames"]["ok"]

    programs(range(3))
    seen = programs(range(3, 6))  # as many sequences, other lengths
    assert programs(range(2, 7)) == programs(range(8)) == programs(range(5, 7)) == seen


def test_what_is_given_up_is_told(tmp_path, compiles_with, monkeypatch, caplog):
    compiles_with("eager")
    monkeypatch.setattr(compiling, "RECOMPILE_LIMIT", 1)
    engine = make_engine(write_model(tmp_path), model={"compile": "on"})
    for rows in (range(3), range(3, 6)):
        engine.forward([weighed().select(rows)])
    assert "training is slower than it could be, parts of it are not compiled: " in caplog.text


def test_what_does_not_compile_is_told_and_runs_as_it_is(tmp_path, compiles_with, caplog):
    def backend(graph, inputs):
        if len(graph.graph.nodes) > 20:  # not the sample by which compilation is tried
            raise RuntimeError("no such kernel")
        return graph.forward

    path, rows = write_model(tmp_path), [weighed().select(range(3))]
    want = make_engine(path, model={"compile": "off"}).forward(rows)
    compiles_with(backend)
    engine = make_engine(path, model={"compile": "on"})
    with torch._dynamo.config.patch(suppress_errors=True):  # as `auto` has it on a GPU
        got = engine.forward(rows)
    torch.testing.assert_close(got[0].logprobs, want[0].logprobs)
    assert "training is slower than it could be, parts of it are not compiled: WON'T CONVERT" in caplog.text
    assert "no such kernel" in caplog.text


@pytest.mark.parametrize("setting", ["off", "on"])
def test_passes_leave_no_tensor_to_the_garbage_collector(setting, tmp_path, compiles_with):
    """Memory is handed to the engine every step without running it."""
    compiles_with("aot_eager")
    engine, batch = make_engine(write_model(tmp_path), model={"compile": setting}), weighed()

    def step() -> None:
        engine.forward([batch.select(range(3)), batch.select(range(3, 8))], entropy=True)
        update(engine)
        weights(engine)

    step()  # compiles
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        left = [x for x in gc.garbage if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def test_where_nothing_compiles_auto_warns_and_on_is_an_error(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    assert not compiling.wanted("auto", torch.device("cpu")) and not caplog.records
    with pytest.raises(ValueError, match="model.compile=on, but torch.compile fails on cpu: no compiler"):
        compiling.wanted("on", torch.device("cpu"))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # a device that is not here
    assert not compiling.wanted("auto", torch.device("cuda"))
    assert "torch.compile fails on cuda (no compiler)" in caplog.text
