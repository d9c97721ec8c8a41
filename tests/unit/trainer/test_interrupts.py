"""Signals while a run trains."""

import asyncio
import signal
import threading
import time

import pytest

from rlpost.endings import RESUMABLE
from rlpost.trainer import interrupts
from rlpost.trainer.interrupts import Interrupts


class Trainer:
    stop_requested = False


class Run:
    """`body(self)` as a run whose signals are `Interrupts`; `notes` and `ends` are what they said and did."""

    def __init__(self, grace_period_s=None):
        self.trainer, self.notes, self.ends = Trainer(), [], []
        self.ended = threading.Event()
        self.interrupts = Interrupts(grace_period_s, self.end)

    def end(self, status, message):
        self.ends.append((status, message))
        self.ended.set()

    def __call__(self, body):
        async def run():
            with self.interrupts.stop(self.trainer, self.notes.append):
                await body(self)

        try:
            asyncio.run(run())
        finally:
            self.interrupts.close()


@pytest.fixture(autouse=True)
def handlers():
    """Those of before are there again."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def mine(number, frame):
        pytest.fail("handlers were restored too early")

    before = {number: signal.signal(number, mine) for number in numbers}
    yield
    now = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == dict.fromkeys(numbers, mine)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_first_signal_asks_for_the_end_of_the_step():
    async def body(run):
        signal.raise_signal(signal.SIGINT)
        await until(lambda: run.trainer.stop_requested)

    run = Run()
    run(body)
    assert run.interrupts.stopped_by == "SIGINT" and "once more to stop at once" in run.notes[0]


def test_second_ctrl_c_ends_the_run_and_one_that_arrives_twice_does_not(monkeypatch):
    async def body(run):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        await until(lambda: run.trainer.stop_requested)
        await asyncio.sleep(0.01)  # both were handled, and it goes on
        monkeypatch.setattr(interrupts, "AT_ONCE_S", 0.0)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60.0)

    run = Run()
    with pytest.raises(asyncio.CancelledError):
        run(body)
    assert not run.interrupts.expired


def test_sigterm_gives_the_step_up_when_the_grace_period_is_over():
    async def body(run):
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60.0)

    run = Run(grace_period_s=0.05)
    with pytest.raises(asyncio.CancelledError):
        run(body)
    assert run.interrupts.expired and run.interrupts.stopped_by == "SIGTERM" and run.trainer.stop_requested
    assert "within trainer.grace_period_s=0.05" in run.notes[0] and run.ends == []


def test_repeated_sigterm_leaves_the_grace_period_as_it_is(monkeypatch):
    monkeypatch.setattr(interrupts, "AT_ONCE_S", 0.0)

    async def body(run):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.01)

    run = Run(grace_period_s=100.0)
    run(body)
    assert run.trainer.stop_requested and not run.interrupts.expired and len(run.notes) == 1


def test_sigterm_after_ctrl_c_is_what_ended_the_run():
    async def body(run):
        signal.raise_signal(signal.SIGINT)
        await until(lambda: run.trainer.stop_requested)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60.0)

    run = Run(grace_period_s=0.05)
    with pytest.raises(asyncio.CancelledError):
        run(body)
    assert run.interrupts.expired and run.interrupts.stopped_by == "SIGTERM"


def test_driver_whose_loop_hangs_is_ended_after_sigterm(monkeypatch):
    monkeypatch.setattr(interrupts, "CLEAN_UP_S", 0.05)

    async def body(run):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.0)  # the handler has run; the loop has not
        assert not run.trainer.stop_requested and run.ended.wait(30.0)

    run = Run(grace_period_s=0.05)
    run(body)
    assert run.ends[0][0] == RESUMABLE and "did not end within its grace period" in run.ends[0][1]
