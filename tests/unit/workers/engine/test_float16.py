"""Training in float16 on one rank: no update is lost to its range, and none is made twice."""

import json
import math
from pathlib import Path

import pytest
import torch
from one_rank import make_engine, update, weights
from ranks import policy_loss, ragged_batch, value_loss, write_model

from rlpost.workers.engine.fsdp import FSDPEngine
from rlpost.workers.engine.scaling import INITIAL

HALF, EXACT = {"dtype": "float16"}, {"dtype": "float32"}


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def times(factor: float):
    """The policy loss, so many times as large."""

    def loss(micro, output):
        share, metrics = policy_loss(micro, output)
        return share * factor, metrics

    return loss


def first_moments(engine: FSDPEngine) -> torch.Tensor:
    """A tenth of the gradient, after one update."""
    return torch.cat([state["exp_avg"].full_tensor().flatten() for state in engine.optimizer.state.values()])


@pytest.mark.parametrize("factor, retries", [(1.0, 0), (1e5, None), (1e-7, 0)], ids=["plain", "large", "small"])
@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}, {"enable_gradient_checkpointing": True}], ids=str)
def test_update_is_that_of_float32(path, factor, retries, model):
    half, exact = make_engine(path, actor=HALF, model=model), make_engine(path, actor=EXACT, model=model)
    got, want = update(half, times(factor)), update(exact, times(factor))
    assert got["grad_norm"].value == pytest.approx(want["grad_norm"].value, rel=0.01)
    expected = first_moments(exact)
    assert (first_moments(half) - expected).norm() < 0.02 * expected.norm()
    assert got["updates"].value == half.updates == 1 and got["skipped_updates"].value == 0
    assert got["tokens"] == want["tokens"]  # counted once, however often the loss was computed
    made_with, halvings = got["loss_scale"].value, got["scale_retries"].value
    assert made_with == half.scaler.scale == INITIAL / 2**halvings
    assert halvings == retries if retries is not None else halvings > 3


def test_gradient_below_its_range_is_0_without_a_scale(path):
    engine = make_engine(path, actor=HALF)
    engine.scaler.scale = 1.0
    assert update(engine, times(1e-7))["grad_norm"].value == 0.0


def test_gradient_is_clipped_at_its_size_without_the_scale(path):
    limit = 0.01
    half = make_engine(path, actor=HALF | {"grad_clip": limit})
    assert update(half)["grad_norm"].value > limit
    assert first_moments(half).norm() == pytest.approx(0.1 * limit, rel=0.01)


def test_updates_after_an_overflow_begin_at_the_scale_that_it_left(path):
    engine = make_engine(path, actor=HALF)
    retries = [update(engine, times(1e5))["scale_retries"].value for _ in range(3)]
    assert retries[0] > 3 and retries[1:] == [0, 0]


def test_loss_that_is_not_a_number_is_a_fault_at_once(path):
    engine = make_engine(path, actor=HALF)
    before = weights(engine)
    metrics = update(engine, times(math.nan))
    assert engine.skipped and metrics["skipped_updates"].value == 1 and metrics["nonfinite_losses"].value == 2
    assert metrics["scale_retries"].value == 0 and engine.scaler.scale == INITIAL
    assert all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())


def test_gradient_that_is_infinite_at_any_scale_is_a_fault_and_the_scale_stays(path):
    def steep(micro, output):
        share, metrics = policy_loss(micro, output)
        return share + (output.logprobs - output.logprobs.detach()).abs().sqrt().sum(), metrics

    engine = make_engine(path, actor=HALF)
    before = weights(engine)
    metrics = update(engine, steep)
    assert engine.skipped and metrics["nonfinite_losses"].value == 0 and metrics["scale_retries"].value == 16
    assert all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())
    assert engine.scaler.scale == INITIAL
    assert update(engine)["updates"].value == 1 and not engine.skipped


def test_scale_is_saved_and_restored(path, tmp_path):
    engine = make_engine(path, actor=HALF)
    update(engine, times(1e5))
    update(engine, times(1e5))
    engine.save(tmp_path)
    resumed = make_engine(path, actor=HALF)
    resumed.load(tmp_path)
    assert (
        resumed.scaler.state_dict() == engine.scaler.state_dict() != make_engine(path, actor=HALF).scaler.state_dict()
    )
    assert update(resumed, times(1e5)) == update(engine, times(1e5))
    in_float32 = make_engine(path, actor=EXACT)
    in_float32.load(tmp_path)
    assert in_float32.scaler.scale == 1.0


@pytest.mark.parametrize("written", ["before there was a scale", "in float32"])
def test_checkpoint_without_a_scale_is_loaded(path, tmp_path, written):
    exact = make_engine(path, actor=EXACT)
    update(exact)
    exact.save(tmp_path)
    if written == "before there was a scale":
        progress = json.loads((tmp_path / "rank_0.json").read_text())
        del progress["scaler"]
        (tmp_path / "rank_0.json").write_text(json.dumps(progress))
    engine = make_engine(path, actor=HALF)
    engine.load(tmp_path)
    assert engine.scaler.scale == INITIAL and engine.updates == 1
    assert update(engine)["updates"].value == 1


def test_critic_trains_as_in_float32(path):
    half, exact = make_engine(path, actor=HALF, critic=True), make_engine(path, actor=EXACT, critic=True)
    for _ in range(2):  # the value head starts at 0, so that the first update moves nothing else
        got, want = update(half, value_loss), update(exact, value_loss)
        assert got["grad_norm"].value == pytest.approx(want["grad_norm"].value, rel=0.02)


def test_float16_agrees_better_with_float32_than_bfloat16(path):
    exact = make_engine(path, actor=EXACT).forward([ragged_batch()])[0].logprobs
    distance = {
        dtype: float(
            (make_engine(path, actor={"dtype": dtype}).forward([ragged_batch()])[0].logprobs - exact).abs().mean()
        )
        for dtype in ("bfloat16", "float16")
    }
    assert 0 < distance["float16"] < distance["bfloat16"] / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_report_no_scale(path, dtype):
    engine = make_engine(path, actor={"dtype": dtype})
    assert not {"loss_scale", "scale_retries"} & update(engine).keys() and engine.scaler.scale == 1.0
