"""The loss scale after sequences of updates, by hand."""

import pytest
import torch

from rlpost.metrics import scalars
from rlpost.workers.engine.scaling import GROWTH_INTERVAL, INITIAL, MOST, LossScaler


def test_only_float16_is_scaled():
    assert LossScaler.of(torch.float16).scale == INITIAL == 65536
    for dtype in (torch.float32, torch.bfloat16):
        scaler = LossScaler.of(dtype)
        for _ in range(2 * GROWTH_INTERVAL):
            assert scaler.settle(made=True) == {}
        assert scaler.scale == 1.0 and not scaler.shrink() and scaler.settle(made=False) == {}
        assert scaler.scale == 1.0 and scaler.state_dict() == {}


def test_overflow_halves_the_scale_for_all_updates_to_come():
    scaler = LossScaler()
    assert scaler.shrink() and scaler.shrink() and scaler.shrink()
    assert scalars(scaler.settle(made=True)) == {"loss_scale": 8192, "scale_retries": 3}
    assert scalars(scaler.settle(made=True)) == {"loss_scale": 8192, "scale_retries": 0}


def test_scale_doubles_after_so_many_updates_in_a_row_and_no_further_than_its_most():
    scaler = LossScaler(MOST / 2)
    scales = [scaler.settle(made=True)["loss_scale"].value for _ in range(GROWTH_INTERVAL)]
    assert set(scales) == {MOST / 2} and scaler.scale == MOST and scaler.good_updates == 0
    for _ in range(GROWTH_INTERVAL):
        scaler.settle(made=True)
    assert scaler.scale == MOST == 2**24


def test_overflow_begins_the_row_anew():
    scaler = LossScaler()
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.settle(made=True)
    assert scaler.shrink()
    scaler.settle(made=True)  # the first at the new scale
    for _ in range(GROWTH_INTERVAL - 2):
        scaler.settle(made=True)
    assert scaler.scale == INITIAL / 2
    scaler.settle(made=True)
    assert scaler.scale == INITIAL


def test_update_that_no_scale_saves_leaves_the_scale_as_it_was():
    scaler = LossScaler(8.0)
    assert [scaler.shrink() for _ in range(5)] == [True, True, True, False, False]
    assert scaler.scale == 1.0
    assert scalars(scaler.settle(made=False)) == {"loss_scale": 1, "scale_retries": 3}
    assert scaler.scale == 8.0 and scaler.retries == scaler.good_updates == 0


def test_state_is_restored_and_that_of_an_unscaled_run_changes_nothing():
    scaler, other, fixed = LossScaler(), LossScaler(), LossScaler.of(torch.bfloat16)
    scaler.shrink()
    for _ in range(3):
        scaler.settle(made=True)
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.good_updates) == (INITIAL / 2, 3)
    other.load_state_dict(fixed.state_dict())
    fixed.load_state_dict(scaler.state_dict())
    assert (other.scale, other.good_updates) == (INITIAL / 2, 3) and fixed.scale == 1.0


@pytest.mark.parametrize("start", [INITIAL, 1.0])
def test_scale_is_a_power_of_two_at_least_1(start):
    scaler = LossScaler(start)
    while scaler.shrink():
        pass
    assert scaler.scale == 1.0
