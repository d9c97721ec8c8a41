"""`AsyncSource`: what a resumed or repaired run goes on with, what is left at the end, and what is reported."""

import asyncio
import pickle

import pytest

from rlpost.metrics import scalars
from rlpost.trainer.fully_async import staleness_metrics
from rlpost.trainer.limits import Limits
from rlpost.trainer.state import CheckpointStore
from rlpost.trajectory import Status
from tests.unit.trainer.rollouts import group, prompt
from tests.unit.trainer.virtual_rollout import SETTINGS, G, flat, oldest, random_lengths, run, train

# --- restarts ---


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_resumed_run_keeps_finished_groups_and_trains_none_twice(tmp_path, options, seed):
    lengths, store = random_lengths(seed), CheckpointStore(tmp_path, None)

    async def until_saved(source, pool):
        trained = await train(source, 3)
        await store.save(3, {"source": source.state_dict()}, lambda folder: asyncio.sleep(0, {}))
        finished = [slot.prompt.index for slot in source.buffer.slots if slot.group is not None]
        return flat(trained), finished, source.buffer.in_flight

    trained, finished, _ = run(until_saved, {"length": lengths}, **options)

    async def resumed(source, pool):
        source.load_state_dict(store.read(store.find("auto"))["source"])
        again = flat(await train(source, 3, first=4))
        assert trained + again == list(range(6 * G))
        assert not set(finished) & set(pool.submitted)
        assert sorted(set(again) - set(finished)) == sorted(i for i in pool.submitted if i < 6 * G)

    run(resumed, {"length": lengths}, **options)


@pytest.mark.parametrize("delay_s", [0.0, 0.25, 3.0])
def test_a_state_loaded_into_a_run_cuts_off_what_runs_and_the_run_goes_on(delay_s):
    async def main(source, pool):
        first = await train(source, 1)
        await asyncio.sleep(delay_s)  # the push is not begun, under way, or done
        state = pickle.loads(pickle.dumps(source.state_dict()))
        second = await source.take(G)
        source.load_state_dict(state)
        again = await source.take(G)
        assert flat(first) + [g.index for g in again] == list(range(2 * G))
        assert [g.index for g in second] == [g.index for g in again]
        await source.publish(2)
        assert flat(await train(source, 2, first=3)) == list(range(2 * G, 4 * G))

    run(main, {"length": random_lengths(2)}, staleness_threshold=0.0)
    run(main, {"length": random_lengths(2)}, staleness_threshold=1.0, partial_rollout=False)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_step_is_sampled_anew_by_restarted_engines(options):
    async def hook(prompts):
        await asyncio.sleep(20)
        prompts.add(prompt(1000))
        await asyncio.Event().wait()

    async def main(source, pool):
        trained = flat(await train(source, 2))
        groups = await source.take(G)
        for _ in range(2):  # the first restart does not help
            await source.restart_engines(None)
            await source.publish(2)
            await source.probe(2)
        source.rewind()
        assert source.buffer.in_flight <= source.buffer.limits.capacity
        again = await source.take(G)
        assert [g.index for g in again] == [g.index for g in groups] and not set(map(id, again)) & set(map(id, groups))
        assert {oldest(g) for g in again} == {2}
        await source.publish(3)
        trained += [g.index for g in again] + flat(await train(source, 5, first=4))
        assert [i for i in trained if i >= 0] == list(range(8 * G - 1)) and trained.count(-1) == 1
        assert pool.most_at_once <= source.buffer.limits.capacity

    run(main, {"length": random_lengths(5)}, hook=hook, **options)


@pytest.mark.parametrize("delay_s", [0.0, 0.25, 1.0])
def test_close_ends_groups_pushes_and_hook(delay_s):
    async def hook(prompts):
        await asyncio.Event().wait()

    async def main(source, pool):
        before = asyncio.all_tasks()
        await train(source, 2)
        await asyncio.sleep(delay_s)
        assert asyncio.all_tasks() - before - pool.tasks, "there is nothing to end"
        await source.close()
        assert asyncio.all_tasks() - before - pool.tasks == set()

    run(main, {"length": random_lengths(1)}, hook=hook, staleness_threshold=2.0)


# --- metrics ---


def test_idle_shares_by_hand():
    """One group of 3 s a step, 2 s of training, a sync of 1 s, and room for two groups."""

    async def main(source, pool):
        source.buffer.limits = Limits(groups_per_step=1)
        await source.publish(0)
        await asyncio.sleep(100)  # before the first step: nobody's idle time
        for step in (1, 2):
            await source.take(1)
            await asyncio.sleep(2)
            await source.publish(step)
            shares = {k: v for k, v in scalars(source.metrics()).items() if k.startswith("async/")}
            total = {1: 3 + 2, 2: 1 + 3 + 2}[step]  # the push of step 1 is part of step 2
            assert shares == pytest.approx(
                {
                    "async/trainer_idle": 3 / total,
                    "async/rollout_idle": 1 - 3 / 2 / total,
                    "async/blocked_capacity": 5 / total,  # one may be in flight: it runs, or it is trained
                    **({"async/blocked_sync": 1 / total} if step == 2 else {}),
                    **{"async/in_flight": 1, "async/running": 0},
                    **{f"async/{name}_lag_0": 1.0 for name in ("groups", "tokens")},
                    **{"async/staleness/mean": 0, "async/staleness/max": 0},
                }
            )

    run(main, {"length": lambda index: 3}, room=2, sync_s=1.0)


def test_metrics_report_what_happened_since_the_last_call():
    async def main(source, pool):
        await train(source, 2)
        await source._synced()
        metrics = scalars(source.metrics())
        assert metrics["groups/kept"] == 2 * G and metrics["response_length/mean"] == 3
        assert metrics["weight_sync/seconds_s"] == 3 * 0.5
        assert not {"groups/kept", "response_length/mean", "weight_sync/seconds_s"} & set(source.metrics())

    run(main, {"length": lambda index: 3})


def test_staleness_metrics_by_hand():
    """Trained at step 13 (weights 12): lags 0, 1, 1, 10, and 0, 0; both answers of a group are alike."""
    groups = [
        group(prompt(0), [1.0, 0.0], num_tokens=4, versions=[12, 11, 11, 2]),
        group(prompt(1), [1.0, 0.0], num_tokens=2, versions=12),
        group(prompt(2), [1.0, 0.0], Status.ABORT, num_tokens=0),  # never began
    ]
    metrics = scalars(staleness_metrics(groups, 12))
    shown = {name: value for name, value in metrics.items() if value}
    assert shown == pytest.approx(
        {
            "async/staleness/mean": 5.0,
            "async/staleness/max": 10.0,
            "async/groups_lag_0": 1 / 2,
            "async/groups_lag_8": 1 / 2,
            "async/tokens_lag_0": 3 / 6,
            "async/tokens_lag_1": 2 / 6,
            "async/tokens_lag_8": 1 / 6,
        }
    )
    assert staleness_metrics(groups[2:], 12) == {}
