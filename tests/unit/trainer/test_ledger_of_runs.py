"""What the sources of groups write into the ledger, over runs that die and are resumed."""

import asyncio
import contextlib
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig
from rlpost.rewards.config import RewardConfig
from rlpost.tools.simulation.clock import run_virtual
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.history import History
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.limits import OnStale
from rlpost.trainer.objects import prompts_in
from rlpost.trainer.state import CheckpointStore
from tests.unit.trainer.rollouts import SPEC, Stream, group
from tests.unit.trainer.virtual_rollout import SETTINGS, TRAIN_S, G, random_lengths, run

STEPS = 8


class Pool:
    """Answers at once; two of three groups have a signal."""

    async def run(self, prompts, n, spec):
        await asyncio.sleep(0)
        return [group(p, [1.0, 0.0 if p.index % 3 else 1.0]) for p in prompts]


class Sync:
    async def push(self, version):
        return {}


def colocated(ledger):
    filtering = FilterGroupsConfig(enable=True, max_num_gen_batches=4)
    return ColocatedSource(
        stream=Stream(),
        algorithm=Algorithm(AlgoConfig(filter_groups=filtering), max_response_length=4),
        pool=Pool(),
        trainers=None,
        sync=Sync(),
        spec=SPEC,
        n=2,
        filter_groups=filtering,
        reward=RewardConfig(),
        sleep=False,
        ledger=ledger,
    )


class Killed(Exception):
    """The driver is gone."""


async def drive(source, ledger, store, die, save_every):
    """The trainer's part, from the newest checkpoint to `STEPS`; `die(moment)` ends the run at some moments."""
    folder, step = store.find("auto"), 0
    if folder is None:
        ledger.resumed(0)
    else:
        state = store.read(folder)
        source.load_state_dict(state["source"])
        step = state["step"]
        ledger.resumed(step, state["ledger"], folder / "ledger.jsonl")
    await source.publish(step)
    while step < STEPS:
        step += 1
        groups = await source.take(G)
        die("taken")
        if die.again():  # the engines had to be mended
            source.rewind()
            groups = await source.take(G)
        await asyncio.sleep(TRAIN_S)
        ledger.trained(step, groups)
        die("trained")
        await source.publish(step)
        if step % save_every and step != STEPS:
            continue
        state = source.state_dict()
        mark = ledger.saved(step, prompts_in(state))
        die("mark made")

        async def write(folder):
            await asyncio.sleep(1.0)  # groups go on
            ledger.copy(folder / "ledger.jsonl")
            return {}

        await store.save(step, {"source": state, "ledger": mark}, write)
        die("saved")


class Die:
    """Ends the run at every moment with the given chance."""

    def __init__(self, seed, chance):
        self._random, self._chance = random.Random(seed), chance

    def __call__(self, moment):
        if self._random.random() < self._chance:
            raise Killed(moment)

    def again(self):
        return self._random.random() < self._chance


def check(history, folder):
    """Nothing was lost, repeated or skipped."""
    assert history.problems() == []
    assert sorted(history.steps) == list(range(1, STEPS + 1)) and history.saved == STEPS
    assert set(history.trained.values()) == {1} and all(len(ids) == G for ids in history.steps.values())
    assert not list(folder.glob("*.old"))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), save_every=st.integers(1, 4))
def test_colocated_runs_that_die_leave_the_ledger_of_one_that_did_not(seed, save_every):
    histories = []
    for chance in (0.0, 0.15):
        with tempfile.TemporaryDirectory() as folder:
            die, store = Die(seed, chance), CheckpointStore(Path(folder) / "checkpoints", keep=2)
            while not store.complete() or store.complete()[-1].name != f"global_step_{STEPS}":
                ledger = Ledger(Path(folder) / "ledger.jsonl")
                with contextlib.suppress(Killed):
                    run_virtual(drive(colocated(ledger), ledger, store, die, save_every))
                ledger.close()
            histories.append(History.read(Path(folder)))
            check(histories[-1], Path(folder))
    whole, resumed = histories
    assert whole.steps == resumed.steps and whole.groups == resumed.groups


@pytest.mark.parametrize(
    "options", [*SETTINGS, {"staleness_threshold": 2.0, "max_staleness": 0, "on_stale": OnStale.ABORT}], ids=str
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_async_runs_that_die_lose_no_group_and_train_none_twice(options, seed):
    draw = random.Random(seed)
    signal = [draw.random() < 0.7 for _ in range(1000)]
    pool_options = {
        "length": random_lengths(seed),
        "accuracies": lambda index: [1.0, 0.0 if signal[index] else 1.0],
    }
    save_every = draw.randint(1, 4)
    with tempfile.TemporaryDirectory() as folder:
        die, store = Die(seed, 0.1), CheckpointStore(Path(folder) / "checkpoints", keep=2)
        while not store.complete() or store.complete()[-1].name != f"global_step_{STEPS}":
            ledger = Ledger(Path(folder) / "ledger.jsonl")

            async def main(source, pool, ledger=ledger):
                if source.buffer.limits.sync_every > 1:
                    die.again = lambda: False  # a rewind needs the engines' weights to be pushed anew
                await drive(source, ledger, store, die, save_every)

            with contextlib.suppress(Killed):
                run(main, pool_options, ledger=ledger, filter=True, budget=8, window=3, sampler=_backwards, **options)
            ledger.close()
        history = History.read(Path(folder))
        check(history, Path(folder))
        assert history.counts()["dropped"] > 0


def _backwards(prompts):
    return list(range(len(prompts)))[::-1]


def test_a_group_whose_workflow_fails_is_dropped_for_good(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    fails = {2, 5}

    async def main(source, pool):
        await source.publish(0)
        return [g.index for g in await source.take(G)]

    pool_options = {"error": lambda prompt: RuntimeError("no tool") if prompt.index in fails else None}
    taken = run(main, pool_options, ledger=ledger, stop_on_error=False, staleness_threshold=1.0)
    assert taken == [0, 1, 3, 4]
    states = {g.index: (str(g.state), g.reason) for g in History.read(tmp_path).groups.values()}
    assert states[2] == ("dropped", "failed") and states[3] == ("scored", None)


def test_surplus_groups_are_dropped_as_such(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    asyncio.run(colocated(ledger).take(4))  # of 0 to 3 two have a signal, of 4 to 7 three
    reasons = {g.index: g.reason for g in History.read(tmp_path).groups.values()}
    assert reasons == {0: "all_1", 1: None, 2: None, 3: "all_1", 4: None, 5: None, 6: "all_1", 7: "surplus"}
