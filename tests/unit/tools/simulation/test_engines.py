"""Simulated engines against times that were computed by hand."""

import asyncio

import numpy as np
import pytest

from rlpost.tools.simulation.clock import run_virtual
from rlpost.tools.simulation.engines import SimulatedPool
from rlpost.tools.simulation.scenario import Scenario
from tests.unit.trainer.rollouts import prompt

HAND = {"devices_per_replica": 1, "n": 2, "prompt_tokens": 10, "decode_step_s": 1.0, "decode_sequence_s": 0.5}


def lengths(*groups):
    return lambda index, n: np.array(groups[index], np.int64)


def ends(scenario, devices, groups, act=None):
    """When each group ends, its tokens by version, and the pool; `act(pool)` runs beside them."""

    async def main():
        loop, pool = asyncio.get_running_loop(), SimulatedPool(scenario, devices, lengths(*groups))

        async def one(index):
            group = await pool.submit(prompt(index), 2, None)
            return round(loop.time(), 6), dict(group.trajectories[0].extras["tokens"])

        tasks = [asyncio.create_task(one(i)) for i in range(len(groups))]
        if act is not None:
            await act(pool)
        return await asyncio.gather(*tasks)

    return run_virtual(main())


def test_a_step_takes_as_long_as_its_batch_is_large():
    """Two sequences: 4 steps of 1 + 2/2 s, then 6 of 1 + 1/2 s."""
    scenario = Scenario(**HAND, prefill_token_s=0.0)
    assert ends(scenario, 1, [(4, 10)]) == [(4 * 2.0 + 6 * 1.5, {0: 14})]


def test_device_counts_while_it_takes_longer_than_its_host():
    """Two sequences: 4 steps of 0.4 + 2 x 1.2 s on the device (host: 2 s); one: 6 of 1.6 s (host: 1.5 s)."""
    scenario = Scenario(**HAND, prefill_token_s=0.0, device_step_s=0.4, device_sequence_s=1.2)
    assert ends(scenario, 1, [(4, 10)]) == [(pytest.approx(4 * 2.8 + 6 * 1.6), {0: 14})]
    faster = Scenario(**HAND, prefill_token_s=0.0, device_step_s=0.4, device_sequence_s=0.9)
    assert ends(faster, 1, [(4, 10)]) == [(pytest.approx(4 * 2.2 + 6 * 1.5), {0: 14})]


def test_prompts_are_read_before_the_next_step():
    scenario = Scenario(**HAND, prefill_token_s=0.1)
    assert ends(scenario, 1, [(4, 4)]) == [(2 * 10 * 0.1 + 4 * 2.0, {0: 8})]


def test_sequences_beyond_the_slots_wait_for_their_turn():
    scenario = Scenario(**HAND, prefill_token_s=0.0, slots=2)
    assert ends(scenario, 1, [(3, 3), (5, 5)]) == [(3 * 2.0, {0: 6}), (8 * 2.0, {0: 10})]


def test_groups_go_to_the_replica_with_the_least_load():
    scenario = Scenario(**HAND, prefill_token_s=0.0)
    assert [end for end, _ in ends(scenario, 2, [(3, 3), (5, 5)])] == [6.0, 10.0]


def test_pause_keeps_requests_reads_them_again_and_tokens_know_their_version():
    """2.5 steps at 2 s, 3 s of pause; prompt and 2.5 tokens of both are read again; then the other 1.5 steps."""

    async def sync(pool):
        await asyncio.sleep(5.0)
        await pool.pause(keep=True)
        pool.version = 1
        await asyncio.sleep(3.0)
        await pool.resume()

    scenario = Scenario(**HAND, prefill_token_s=0.0)
    assert ends(scenario, 1, [(4, 4)], sync) == [(5 + 3 + 1.5 * 2, {0: 4, 1: 4})]
    scenario = Scenario(**HAND, prefill_token_s=0.1)  # 2 s of prompts come first: 1.5 steps until the pause
    assert ends(scenario, 1, [(4, 4)], sync)[0][0] == pytest.approx(5 + 3 + 2 * 11.5 * 0.1 + 2.5 * 2)


def test_abort_frees_the_slots_of_one_prompt():
    async def main():
        pool = SimulatedPool(Scenario(**HAND, prefill_token_s=0.0, slots=2), 1, lengths((100, 100), (3, 3)))
        cut = asyncio.create_task(pool.submit(prompt(0), 2, None))
        other = asyncio.create_task(pool.submit(prompt(1), 2, None))
        await asyncio.sleep(10.0)
        cut.cancel()
        await pool.abort(prompt(0).id)
        await other
        assert pool.replicas[0].load == 0
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10.0 + 3 * 2.0)
