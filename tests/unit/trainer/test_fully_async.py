"""`AsyncSource`: order, staleness, syncs, errors and dynamic sampling."""

import asyncio

import numpy as np
import pytest

from rlpost.metrics import scalars
from rlpost.trainer.fully_async import MAX_FAILURES
from rlpost.trainer.limits import Limits, OnStale
from rlpost.trainer.source import BudgetExhausted, PromptsExhausted, RewardFailure
from rlpost.trajectory import Status
from tests.unit.trainer.rollouts import Stream, group, prompt
from tests.unit.trainer.virtual_rollout import SETTINGS, TRAIN_S, G, flat, oldest, random_lengths, run, train

# --- order and staleness ---


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_groups_are_trained_in_the_order_of_issue_within_the_bound(options, seed):
    """So long answers have the same share in what is trained as in what is issued."""
    length = random_lengths(seed)

    async def main(source, pool):
        def check(step, groups):
            assert all(0 <= step - 1 - oldest(g) <= source.buffer.limits.bound for g in groups)

        trained = flat(await train(source, 12, check=check))
        assert trained == list(range(12 * G))
        assert pool.submitted == list(range(len(pool.submitted)))
        assert pool.most_at_once <= source.buffer.limits.capacity
        mean_trained = np.mean([length(i) for i in trained])
        assert mean_trained == np.mean([length(i) for i in pool.submitted[: 12 * G]])

    run(main, {"length": length}, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_stale", [OnStale.DROP, OnStale.ABORT])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_every_prompt_is_trained_once_whole_and_fresh_where_stale_groups_are_reissued(on_stale, max_staleness, seed):
    async def main(source, pool):
        def check(step, groups):
            assert all(0 <= step - 1 - oldest(g) <= max_staleness for g in groups)
            assert all(len(t.response_ids) == pool.length(g.index) for g in groups for t in g.trajectories)
            assert all(t.status is Status.STOP for g in groups for t in g.trajectories)

        trained = flat(await train(source, 10, check=check))
        assert sorted(trained) == list(range(10 * G))
        counts = scalars(source.metrics())
        reissued = counts.get("groups/dropped_stale", 0) + counts.get("groups/aborted_stale", 0)
        assert len(pool.submitted) == 10 * G + reissued > 10 * G
        aborts = [event for event in pool.events if event.startswith("abort")]
        assert len(aborts) == counts.get("groups/aborted_stale", 0) and bool(aborts) == (on_stale is OnStale.ABORT)
        with pytest.raises(PromptsExhausted, match="the prompts ended: step 11 needs 4 more groups"):
            await source.take(G)

    options = {"staleness_threshold": 2.0, "max_staleness": max_staleness, "on_stale": on_stale}
    run(main, {"length": random_lengths(seed)}, stream=Stream(10 * G), **options)


def test_an_abort_does_not_meet_the_new_group_of_its_prompt():
    """While 4 is aborted, 11 arrives, which makes room: 5, still to be aborted, must not run again yet."""

    async def main(source, pool):
        submit, abort, released = pool.submit, pool.abort, asyncio.Event()

        async def scored_late(of, n, spec):
            group = await submit(of, n, spec)
            if of.index == 11:
                await released.wait()
            return group

        async def releasing(prompt_id):
            released.set()
            await abort(prompt_id)

        pool.submit, pool.abort = scored_late, releasing

        def check(step, groups):
            assert all(t.status is Status.STOP for g in groups for t in g.trajectories)

        assert sorted(flat(await train(source, 3, check=check))) == list(range(3 * G))
        assert "abort d/0/5" in pool.events

    options = {"staleness_threshold": 2.0, "max_staleness": 0, "on_stale": OnStale.ABORT}
    run(main, {"length": lambda i: 9 if 4 <= i < 11 else 2}, stream=Stream(3 * G), **options)


def test_rollout_goes_on_while_the_trainer_works():
    """Two steps of 3 s of rollout and 2 s of training each: one after the other, or at once."""

    async def main(source, pool):
        await train(source, 4)
        await source.evaluate([], 2, None)  # which waits for the last push
        return asyncio.get_running_loop().time()

    assert run(main, {"length": lambda index: 3}, sync_s=0.0) == 4 * (3 + TRAIN_S)
    assert run(main, {"length": lambda index: 3}, sync_s=0.0, staleness_threshold=1.0) < 4 * (3 + TRAIN_S) - 3


# --- weight syncs ---


def test_every_push_is_between_a_pause_and_a_resume():
    async def main(source, pool):
        await train(source, 3)
        await source.evaluate([], 2, None)
        assert pool.events == [e for v in range(4) for e in ("pause", f"push {v}", "resume")]

    run(main, {"length": random_lengths(0)}, staleness_threshold=1.0)


@pytest.mark.parametrize("partial_rollout", [True, False])
def test_groups_run_through_a_sync_or_are_waited_for(partial_rollout):
    async def main(source, pool):
        mixed = []

        def check(step, groups):
            mixed.extend(g.index for g in groups for t in g.trajectories[:1] if len(set(t.versions[2:])) > 1)

        await train(source, 6, check=check)
        assert bool(mixed) == partial_rollout

    run(main, {"length": lambda i: 7}, staleness_threshold=1.0, partial_rollout=partial_rollout)


def pushes(pool):
    return [int(event.removeprefix("push ")) for event in pool.events if event.startswith("push")]


def test_weights_are_pushed_every_so_many_steps_and_the_buffer_frees_slots_then():
    async def main(source, pool):
        in_flight = []
        trained = await train(source, 6, check=lambda step, groups: in_flight.append(source.buffer.in_flight))
        await source._synced()
        assert pushes(pool) == [0, 2, 4, 6]
        assert in_flight == [8, 8] * 3  # capacity 8: none is freed in between
        assert flat(trained) == list(range(6 * G))

    run(main, sync_every=2)


def test_validation_and_probes_see_the_trainers_weights_also_between_syncs():
    async def main(source, pool):
        await train(source, 1)
        (seen,) = await source.evaluate([prompt(9)], 2, None)
        assert oldest(seen) == 1 and pushes(pool) == [0, 1]
        await source.take(G)
        await source.publish(2)
        assert {oldest(g) for g in await source.probe(4)} == {2}
        assert pushes(pool) == [0, 1, 2]
        await source.publish(3)
        await source.publish(3)  # the parity gate asks for the same weights once more
        await source._synced()
        assert pushes(pool) == [0, 1, 2, 3]

    run(main, sync_every=3)


def test_a_push_ends_before_the_trainer_ranks_are_occupied():
    async def main(source, pool):
        await source.take(G)
        await source.publish(1)
        async with source.without_push():
            assert pool.events == ["pause", "push 1", "resume"]

    run(main)


def test_a_push_that_waits_for_running_groups_leaves_the_trainer_ranks_until_they_are_free():
    async def main(source, pool):
        await source.take(G)
        await source.publish(1)
        async with source.without_push():
            assert pool.sampling and not pool.events
            await asyncio.sleep(100.0)
            assert not pool.sampling and not pool.events
        await source._synced()
        assert pool.events == ["pause", "push 1", "resume"]

    run(main, {"length": lambda i: 9 if i == 5 else 1}, partial_rollout=False, staleness_threshold=1.0)


def test_a_shorter_sync_interval_takes_effect_at_the_next_step():
    async def main(source, pool):
        await train(source, 2)
        source.buffer.limits = Limits(groups_per_step=G)
        assert [g.index for g in await source.take(G)] == [8, 9, 10, 11]
        assert pushes(pool) == [0, 2]

    run(main, sync_every=3)


def test_a_push_that_fails_ends_whatever_needs_the_engines_next():
    async def main(source, pool):
        await train(source, 1)
        await source.evaluate([], 2, None)
        source._sync.error = RuntimeError("wrong digest")
        await source.take(G)
        await source.publish(2)
        for call in (source.take(G), source.take(G), source.evaluate([], 2, None), source.probe(2), source.publish(3)):
            with pytest.raises(RuntimeError, match="wrong digest"):
                await call

    run(main, staleness_threshold=1.0)


def test_validation_and_probe_run_beside_training_groups_and_change_nothing():
    async def main(source, pool):
        first = await source.take(G)
        await source.publish(1)
        groups = await source.evaluate([prompt(100), prompt(101)], 2, None)
        assert [g.index for g in groups] == [100, 101]
        state = source.prompts.state_dict()
        assert [g.index for g in await source.probe(4)] == [10, 11]  # 0..3 are trained, 4..9 in flight
        assert source.prompts.state_dict() == state
        assert [s.prompt.index for s in source.buffer.slots if s.running] == [4, 5, 6, 7]
        assert flat([[g.index for g in first], *await train(source, 2, first=2)]) == list(range(12))
        assert pool.submitted == list(range(len(pool.submitted)))

    run(main, {"length": lambda i: 9 if 4 <= i < 8 else 1}, staleness_threshold=0.5)


# --- errors ---


def fail_at(*indices):
    return lambda prompt: ValueError(f"workflow of {prompt.index}") if prompt.index in indices else None


@pytest.mark.parametrize("on_stale", list(OnStale))
def test_a_workflow_that_raises_ends_the_run_with_its_error(on_stale):
    async def main(source, pool):
        submitted = []

        def error(prompt):
            if prompt.index == 6:
                submitted.extend(pool.submitted)
                return ValueError("workflow of 6")

        pool.error = error
        with pytest.raises(ValueError, match="workflow of 6"):
            await train(source, 3)
        await asyncio.sleep(10)
        assert pool.submitted == submitted  # nothing is started any more
        assert 6 in [slot.prompt.index for slot in source.buffer.slots]  # a resumed run makes it again

    options = {"staleness_threshold": 1.0, "max_staleness": 0, "on_stale": on_stale}
    run(main, {"length": random_lengths(6)}, **options)


def test_a_workflow_that_raises_is_dropped_and_counted():
    async def main(source, pool):
        assert flat(await train(source, 2)) == [0, 1, 3, 4, 5, 7, 8, 9]
        assert scalars(source.metrics())["groups/failed_dropped"] == 2

    run(main, {"length": random_lengths(3), "error": fail_at(2, 6)}, staleness_threshold=0.5, stop_on_error=False)


def test_workflows_that_all_raise_end_the_run_although_it_was_told_to_go_on():
    async def main(source, pool):
        with pytest.raises(ValueError, match="workflow of"):
            await source.take(G)
        assert MAX_FAILURES <= len(pool.submitted) <= MAX_FAILURES + G

    run(main, {"error": lambda p: ValueError(f"workflow of {p.index}")}, stop_on_error=False)


def test_a_sampler_that_raises_ends_the_run_whoever_asked_it():
    def sampler(prompts):
        if prompts[0].index >= 6:
            raise KeyError("difficulty")
        return range(len(prompts))

    async def main(source, pool):
        with pytest.raises(KeyError, match="difficulty"):
            await train(source, 3)

    run(main, sampler=sampler, window=3, max_running=1)


def test_broken_rewards_end_the_run():
    async def main(source, pool):
        async def submit(of, n, spec):
            failed = group(of, [0.0, 0.0], Status.REWARD_ERROR)
            for trajectory in failed.trajectories:
                trajectory.error = "out of order"
            return failed

        pool.submit = submit
        with pytest.raises(RewardFailure, match="8 of 8 .*for example: out of order"):
            await source.take(G)

    run(main)


def test_prompts_that_end_are_trained_as_far_as_they_make_whole_steps():
    async def main(source, pool):
        assert flat(await train(source, 2)) == list(range(8))
        with pytest.raises(PromptsExhausted, match="step 3 needs 2 more groups. Lower trainer.total_training_steps"):
            await source.take(G)

    run(main, stream=Stream(10), staleness_threshold=1.0)


def test_the_users_hook_adds_prompts_and_its_error_ends_the_run():
    async def hook(prompts):
        await asyncio.sleep(TRAIN_S)
        prompts.add(prompt(1000))
        await asyncio.sleep(100)
        raise OSError("no more mail")

    async def main(source, pool):
        with pytest.raises(OSError, match="no more mail"):
            await train(source, 100)
        assert pool.submitted.count(-1) == 1

    run(main, hook=hook)


# --- dynamic sampling ---


def right_or_mixed(index):
    return [1.0, 0.0] if index % 2 == 0 else [1.0, 1.0]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_dynamic_sampling_replaces_groups_without_a_signal(options):
    async def main(source, pool):
        assert flat(await train(source, 4)) == list(range(0, 8 * G, 2))
        counts = scalars(source.metrics())
        assert counts["groups/kept"] == 4 * G and counts["groups/dropped_all_1"] == 4 * G - 1  # the last one is kept
        assert counts["reward/accuracy"] == pytest.approx((4 * G * 0.5 + 4 * G - 1) / (8 * G - 1))

    run(main, {"length": random_lengths(1), "accuracies": right_or_mixed}, filter=True, **options)


def test_a_spent_budget_ends_the_run_or_the_step():
    async def fails(source, pool):
        with pytest.raises(BudgetExhausted, match=r"kept 2 of the 4 .* from 8 prompts \(dropped_all_0: 6, kept: 2\)"):
            await source.take(G)

    async def goes_on(source, pool):
        assert await train(source, 2) == [[3, 7], [11, 15]]

    pool = {"accuracies": lambda index: [1.0, 0.0] if index % 4 == 3 else [0.0, 0.0]}
    run(fails, pool, filter=True, budget=2)
    run(goes_on, pool, filter=True, budget=2, on_exhausted="train")
