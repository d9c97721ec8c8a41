"""Whole simulated runs: times by hand, and what no schedule may break."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.tools.simulation.runs import simulate_async, simulate_colocated
from rlpost.tools.simulation.scenario import Scenario

SMALL = Scenario(
    devices=4,
    devices_per_replica=1,
    slots=8,
    batch=8,
    n=2,
    prompt_tokens=10,
    mean_length=50,
    tail=1.0,  # all answers have 50 tokens
    max_length=200,
    decode_step_s=0.1,
    decode_sequence_s=0.0,
    prefill_token_s=0.0,
    infer_token_s=0.01,
    train_token_s=0.03,
    update_s=0.5,
    updates=2,
    sync_s=1.0,
    weight_bytes=2e9,
    sync_bytes_per_s=1e9,
    steps_per_batch=1,
    trigger_parameter_sync_step=1,
    batches=4,
    warmup=2,
)
TOKENS = 8 * 2 * 60


def test_colocated_times_add_up():
    """50 steps; 960 tokens on 4 devices, 2 updates; 3 s of sync; memory moves out and in."""
    outcome = simulate_colocated(dataclasses.replace(SMALL, move_s=2.0))
    training = TOKENS * 0.04 / 4 + 2 * 0.5
    assert outcome.batch_s == pytest.approx(5.0 + training + 3.0 + 2.0)
    assert outcome.groups_lag == {0: 1.0} and outcome.tokens_lag == {0: 1.0}
    assert outcome.tokens_per_s_per_device == pytest.approx(TOKENS / outcome.batch_s / 4)
    assert outcome.trainer_idle == pytest.approx((5.0 + 1.0) / outcome.batch_s)  # it waits for memory, too
    assert outcome.rollout_idle == pytest.approx(1 - 5.0 / outcome.batch_s)


def test_async_takes_as_long_as_its_slower_side():
    """2 of 4 devices train: 960 tokens take 19.2 s, 2 updates 1 s, and the sync 3 s."""
    trainer_bound = simulate_async(dataclasses.replace(SMALL, staleness_threshold=1.0))
    assert trainer_bound.batch_s == pytest.approx(19.2 + 1 + 3)
    assert trainer_bound.trainer_idle == pytest.approx(0.0, abs=1e-6) and trainer_bound.rollout_idle > 0.5
    fast_trainer = dataclasses.replace(SMALL, train_token_s=0.0, infer_token_s=0.0, update_s=0.0, sync_s=0.0)
    rollout_bound = simulate_async(dataclasses.replace(fast_trainer, staleness_threshold=1.0, weight_bytes=0.0))
    assert rollout_bound.batch_s == pytest.approx(5.0) and rollout_bound.trainer_idle == pytest.approx(1.0, abs=0.01)


def test_async_without_staleness_takes_turns():
    """Generation and training of 2 + 2 devices one after the other, on weights of the step before."""
    outcome = simulate_async(dataclasses.replace(SMALL, staleness_threshold=0.0, recompute_logprobs=False))
    assert outcome.batch_s == pytest.approx(5.0 + TOKENS * 0.03 / 2 + 1.0 + 3.0)
    assert outcome.groups_lag == {0: 1.0}
    assert outcome.rollout_idle + outcome.trainer_idle == pytest.approx(1.0)


def test_growing_answers_make_growing_steps():
    growing = dataclasses.replace(SMALL, tail=2.0, grow_to=150, batches=10, warmup=0)
    for outcome in (simulate_colocated(growing), simulate_async(growing)):
        assert sum(outcome.batches_s) == pytest.approx(10 * outcome.batch_s)
        assert np.mean(outcome.batches_s[-3:]) > 1.5 * np.mean(outcome.batches_s[:3])


def test_dynamic_sampling_generates_more_than_it_trains():
    half = dataclasses.replace(SMALL, keep_rate=0.5, batches=20)
    for simulated in (simulate_colocated(half), simulate_async(half)):
        assert simulated.dropped["dropped_all_1"] == pytest.approx(20 * 8, rel=0.4)


def test_no_order_costs_less_than_the_order_of_issue_where_tails_are_long():
    tailed = dataclasses.replace(SMALL, tail=6.0, batch=64, batches=6, staleness_threshold=0.5, train_token_s=0.004)
    seconds = {
        delivery: simulate_async(dataclasses.replace(tailed, delivery=delivery)).batch_s
        for delivery in ("issued", "bounded", "finished")
    }
    assert seconds["finished"] <= seconds["bounded"] <= seconds["issued"]
    assert seconds["finished"] < 0.9 * seconds["issued"]


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 3),
    every=st.integers(1, 4),
    threshold=st.floats(0, 2),
    extra=st.none() | st.integers(0, 3),
    on_stale=st.sampled_from(["wait", "drop", "abort"]),
    running=st.none() | st.integers(1, 30),
    partial=st.booleans(),
    autobalance=st.booleans(),
    keep_rate=st.sampled_from([1.0, 0.6]),
    share=st.sampled_from([0.25, 0.5, 0.75]),
)
def test_no_schedule_stops_or_passes_its_bound(
    steps, every, threshold, extra, on_stale, running, partial, autobalance, keep_rate, share
):
    scenario = dataclasses.replace(
        SMALL,
        tail=3.0,
        batch=4 * steps,
        steps_per_batch=steps,
        trigger_parameter_sync_step=every,
        staleness_threshold=threshold,
        max_staleness=None if extra is None else every - 1 + extra,
        on_stale=on_stale,
        max_concurrent_groups=running,
        partial_rollout=partial,
        autobalance=autobalance,
        keep_rate=keep_rate,
        rollout_share=share,
    )
    outcome = simulate_async(scenario)
    assert max(outcome.groups_lag) <= scenario.limits.bound
    assert sum(outcome.groups_lag.values()) == pytest.approx(1) and sum(outcome.tokens_lag.values()) == pytest.approx(1)
    assert outcome.capacity <= scenario.limits.capacity
