"""Dynamic sampling inside `ColocatedSource.take`: what is asked for, kept, discarded, and when the budget ends."""

import asyncio

import numpy as np
import pytest

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig
from rlpost.batch import Group, Prompt, Provenance, Status, Trajectory
from rlpost.metrics import scalars
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.source import BudgetExhausted, RewardFailure, check_rewards


class Stream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self):
        self.cursor = 0

    def next(self, n):
        self.cursor += n
        return [prompt(i) for i in range(self.cursor - n, self.cursor)]

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state):
        self.cursor = state["cursor"]


class Pool:
    """Answers both right, or one of the two where `signal(index)`."""

    def __init__(self, signal):
        self.signal, self.asked = signal, []

    async def run(self, prompts, n, spec):
        self.asked.append(len(prompts))
        return [group(p, [1.0, 0.0 if self.signal(p.index) else 1.0]) for p in prompts]


def prompt(index):
    return Prompt(id=f"d/0/{index}", index=index, token_ids=np.arange(2), text="", data_source="d")


def group(of, accuracies):
    trajectories = [
        Trajectory(
            token_ids=np.arange(3),
            provenance=np.array([Provenance.TEMPLATE, Provenance.TEMPLATE, Provenance.MODEL], np.uint8),
            rollout_logprobs=np.zeros(3, np.float32),
            versions=np.zeros(3, np.int32),
            rewards=np.array([0, 0, accuracy], np.float32),
            status=Status.STOP,
            sample_id=i,
            reward_parts={"accuracy": accuracy},
        )
        for i, accuracy in enumerate(accuracies)
    ]
    return Group(id=of.id, index=of.index, data_source="d", prompt=of, trajectories=trajectories)


def source(signal, **changes):
    filtering = FilterGroupsConfig(**{"enable": True, "max_num_gen_batches": 4} | changes)
    return ColocatedSource(
        stream=Stream(),
        algorithm=Algorithm(AlgoConfig(filter_groups=filtering), updates_per_step=1, max_response_length=4),
        pool=Pool(signal),
        trainers=None,
        sync=None,
        spec=None,
        n=2,
        filter_groups=filtering,
        max_error_rate=0.5,
        sleep=False,
    )


def taken(source, n):
    return [group.index for group in asyncio.run(source.take(n))]


def test_take_keeps_the_first_groups_with_a_signal_in_order_of_issue():
    half = source(lambda index: index % 2 == 0)
    assert taken(half, 4) == [0, 2, 4, 6]
    assert half._pool.asked == [4, 4]  # half of 4 were kept: 2 more need 4 prompts
    assert scalars(half.metrics()) == {"groups/kept": 4, "groups/dropped_all_1": 4, "groups/surplus": 0}
    assert taken(half, 4) == [8, 10, 12, 14]


def test_take_discards_and_counts_the_surplus():
    late = source(lambda index: index != 0)
    assert taken(late, 4) == [1, 2, 3, 4]
    assert scalars(late.metrics())["groups/surplus"] == 1  # 1 of 4 missing at an acceptance of 3/4: 2 prompts


def test_take_without_filter_asks_once_and_keeps_all():
    plain = source(lambda index: False, enable=False)
    assert taken(plain, 4) == [0, 1, 2, 3] and plain._pool.asked == [4]


def test_budget_is_never_passed_and_its_end_says_what_was_dropped():
    poor = source(lambda index: index == 3)
    with pytest.raises(
        BudgetExhausted, match=r"kept 1 of the 4 groups .* from 16 prompts \(dropped_all_1: 15, kept: 1\)"
    ):
        taken(poor, 4)
    assert sum(poor._pool.asked) == 16


def test_exhausted_budget_trains_on_what_there_is_only_if_there_is_any():
    assert taken(source(lambda index: index in (3, 9), on_exhausted="train"), 4) == [3, 9]
    with pytest.raises(BudgetExhausted, match="kept 0 of the 4"):
        taken(source(lambda index: False, on_exhausted="train"), 4)


def failing(index):
    """A group whose answers could not be scored."""
    failed = group(prompt(index), [0.0, 0.0])
    for trajectory in failed.trajectories:
        trajectory.status, trajectory.error = Status.REWARD_ERROR, "out of order"
    return failed


def test_broken_reward_is_named_although_the_filter_would_drop_its_groups():
    broken = source(lambda index: True)

    async def run(prompts, n, spec):
        return [failing(p.index) for p in prompts]

    broken._pool.run = run
    with pytest.raises(
        RewardFailure, match="8 of 8 answers could not be scored, above reward.max_error_rate=0.5; .*out of order"
    ):
        taken(broken, 4)


def test_few_failed_scores_are_tolerated():
    groups = [failing(0), group(prompt(1), [1.0, 0.0])]
    check_rewards(groups, 0.5)
    with pytest.raises(RewardFailure, match="2 of 4"):
        check_rewards(groups, 0.4)


def test_probe_does_not_advance_the_stream():
    half = source(lambda index: True)
    assert [g.index for g in asyncio.run(half.probe(6))] == [0, 1, 2]
    assert taken(half, 2) == [0, 1]


class Device:
    """Plays engine pool, trainer ranks and weight sync on one device; refuses what whoever sleeps cannot do."""

    def __init__(self):
        self.engine: set[str] = set()  # what of the engine's is awake
        self.trainer = True
        self.moves: list[str] = []

    async def call_async(self, method, *args):
        self.moves.append(" ".join([method, *map(str, args)]))
        if method == "offload" and args == (True, True):
            self.trainer = False
        if method == "reload":
            assert not self.engine, "the trainer came back while the engine held the memory"
            self.trainer = True

    async def wake(self, tags=("weights", "kv_cache")):
        assert not self.engine & set(tags), "woken twice"
        assert not (self.trainer and "kv_cache" in tags), "no memory for the KV cache while the trainer is there"
        self.engine |= set(tags)
        self.moves.append("wake " + " ".join(tags))

    async def sleep(self):
        assert self.engine == {"weights", "kv_cache"}
        self.engine = set()
        self.moves.append("sleep")

    async def push(self, version):
        assert "weights" in self.engine
        self.moves.append(f"push {version}")
        return {}

    async def run(self, prompts, n, spec):
        assert self.engine == {"weights", "kv_cache"}, "asked an engine that sleeps"
        return [group(p, [1.0, 0.0]) for p in prompts]


def on_device():
    shared, device = source(lambda index: True), Device()
    shared._pool = shared._trainers = shared._sync = device
    shared._sleep, shared._engine_awake = True, False
    return shared, device


def test_memory_is_with_whoever_works_in_every_order_of_calls():
    async def run(shared, device):
        await shared.publish(0)
        await shared.probe(2)
        assert device.trainer and not device.engine  # the parity gate infers
        await shared.evaluate([prompt(0)], 2, None)  # validation before the first step
        await shared.take(2)
        assert device.trainer and not device.engine
        await shared.publish(1)
        await shared.evaluate([prompt(0)], 2, None)
        await shared.publish(1)  # once more, while the engine is awake
        await shared.take(2)
        await shared.publish(2)  # the parity gate looks for the cause: push again, compare again
        await shared.probe(2)
        assert device.trainer and not device.engine

    shared, device = on_device()
    asyncio.run(run(shared, device))


def test_publish_makes_room_step_by_step():
    shared, device = on_device()
    asyncio.run(shared.publish(3))
    assert device.moves == ["offload False True", "wake weights", "push 3", "offload True True", "wake kv_cache"]


def test_nothing_moves_where_both_fit():
    shared, device = on_device()
    shared._sleep, shared._engine_awake, device.engine = False, True, {"weights", "kv_cache"}

    async def run():
        await shared.publish(0)
        await shared.probe(2)
        await shared.take(2)

    asyncio.run(run())
    assert device.moves == ["push 0"]
