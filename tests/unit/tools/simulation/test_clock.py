"""The loop whose clock jumps."""

import asyncio

import pytest

from rlpost.tools.simulation.clock import Deadlock, run_virtual


def test_sleepers_wake_in_order_at_the_times_they_asked_for():
    woken = []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        woken.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(*(sleeper(seconds) for seconds in (3600.0, 0.25, 86400.0 * 30)))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(86400.0 * 30)
    assert [seconds for seconds, _ in woken] == [0.25, 3600.0, 86400.0 * 30]
    assert all(time == pytest.approx(seconds) for seconds, time in woken)


def test_a_deadlock_is_an_error_rather_than_a_hang():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="waits for another"):
        run_virtual(main())
