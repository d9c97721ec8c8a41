"""`ColocatedSource`: dynamic sampling inside `take`, what it reports, and whose memory the device is."""

import asyncio

import pytest

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig
from rlpost.metrics import scalars
from rlpost.rewards.config import RewardConfig
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.source import BudgetExhausted, RewardFailure
from rlpost.trajectory import Status
from rlpost.workers.config import ActorConfig, FSDPConfig
from rlpost.workers.model_worker import ModelWorker, WorkerSetup
from rlpost.workers.rollout.base import EngineLost
from tests.unit.trainer.rollouts import SPEC, Stream, group, prompt


class Pool:
    """Answers both right, or one of the two where `signal(index)`."""

    def __init__(self, signal):
        self.signal, self.asked = signal, []

    async def run(self, prompts, n, spec):
        self.asked.append(len(prompts))
        return [group(p, [1.0, 0.0 if self.signal(p.index) else 1.0]) for p in prompts]


def source(signal, **changes):
    filtering = FilterGroupsConfig(**{"enable": True, "max_num_gen_batches": 4} | changes)
    return ColocatedSource(
        stream=Stream(),
        algorithm=Algorithm(AlgoConfig(filter_groups=filtering), max_response_length=4),
        pool=Pool(signal),
        trainers=None,
        sync=None,
        spec=SPEC,
        n=2,
        filter_groups=filtering,
        reward=RewardConfig(),
        sleep=False,
    )


def taken(source, n):
    return [group.index for group in asyncio.run(source.take(n))]


def test_take_keeps_the_first_groups_with_a_signal_in_order_of_issue():
    half = source(lambda index: index % 2 == 0)
    assert taken(half, 4) == [0, 2, 4, 6]
    assert half._pool.asked == [4, 4]  # half of 4 were kept: 2 more need 4 prompts
    counts = {name: value for name, value in scalars(half.metrics()).items() if name.startswith("groups/")}
    assert counts == {"groups/kept": 4, "groups/dropped_all_1": 4, "groups/surplus": 0}
    assert taken(half, 4) == [8, 10, 12, 14]


def test_take_discards_and_counts_the_surplus():
    late = source(lambda index: index != 0)
    assert taken(late, 4) == [1, 2, 3, 4]
    assert scalars(late.metrics())["groups/surplus"] == 1  # 1 of 4 missing at an acceptance of 3/4: 2 prompts


def test_metrics_cover_every_generated_group_once_whether_it_was_kept_or_not():
    """Kept groups have one right answer of two by definition; the policy has three of four."""
    half = source(lambda index: index % 2 == 0)
    taken(half, 4)
    assert scalars(half.metrics())["reward/mean"] == 0.75
    assert half.metrics() == {}
    half._pool.signal = lambda index: True
    taken(half, 4)
    asyncio.run(half.evaluate([prompt(0)], 2, None))
    reading = half.metrics()["reward/accuracy"]
    assert (reading.value, reading.weight) == (0.5, 8)  # without validation's answers


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


def test_broken_reward_is_named_although_the_filter_would_drop_its_groups():
    broken = source(lambda index: True)

    async def run(prompts, n, spec):
        return [group(p, [0.0, 0.0], Status.REWARD_ERROR) for p in prompts]

    broken._pool.run = run
    with pytest.raises(RewardFailure, match="8 of 8 answers could not be scored, above reward.stop_error_rate=0.5"):
        taken(broken, 4)


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


class Frail(Device):
    """A device whose only engine dies when it is told to, and is rebuilt as often as `restarts` says."""

    def __init__(self, restarts: int):
        super().__init__()
        self.live, self.restarts = {0: "engine"}, restarts
        self.dies: set[str] = set()  # at the next of these moments
        self.on_loss = None

    def lose(self, moment):
        if moment in self.dies:
            self.dies.remove(moment)
            self.live, self.engine = {}, set()
            self.on_loss()

    async def wake(self, tags=("weights", "kv_cache")):
        self.lose("wake")
        if self.live:
            await super().wake(tags)

    async def sleep(self):
        self.lose("sleep")
        if self.live:
            await super().sleep()

    async def push(self, version):
        self.lose("push")
        if not self.live:
            raise EngineLost("no rollout replica is left")
        return await super().push(version)

    async def run(self, prompts, n, spec):
        self.lose("run")
        while not self.live or not self.engine:  # requests wait for an engine
            await asyncio.sleep(0)
        return await super().run(prompts, n, spec)

    async def rebuild(self, asleep):
        assert asleep and not self.trainer, "an engine starts while the trainer holds the memory"
        if not self.restarts:
            raise RuntimeError("the engine's own error")
        self.restarts -= 1
        self.moves.append("rebuild")

    def join(self):
        self.live = {0: "engine"}


def on_frail_device(restarts=9):
    shared, device = on_device()
    device = Frail(restarts)
    shared._pool = shared._trainers = shared._sync = device
    device.on_loss = shared._note_loss
    return shared, device


@pytest.mark.parametrize("moment", ["wake", "push", "run", "sleep"])
def test_memory_is_with_whoever_works_also_when_the_engine_dies(moment):
    async def steps(shared, device):
        await shared.publish(0)
        await shared.take(2)
        device.dies = {moment}
        await shared.publish(1)
        await shared.evaluate([prompt(0)], 2, None)
        assert len(await shared.take(2)) == 2
        assert device.trainer and not device.engine
        await shared.publish(2)
        assert len(await shared.take(2)) == 2
        assert device.moves.count("rebuild") == 1 and not device.dies
        assert [move for move in device.moves if move.startswith("push")][-1] == "push 2"

    asyncio.run(asyncio.wait_for(steps(*on_frail_device()), 10))


def test_engine_that_dies_while_generating_gets_the_same_weights_again():
    async def steps(shared, device):
        await shared.publish(3)
        device.dies, device.moves = {"run"}, []
        await shared.take(2)

    shared, device = on_frail_device()
    asyncio.run(asyncio.wait_for(steps(shared, device), 10))
    again = ["offload False True", "wake weights", "push 3", "offload True True", "wake kv_cache"]
    assert device.moves == ["reload", "offload True True", "rebuild", "reload", *again, "sleep", "reload"]


@pytest.mark.parametrize("moment", ["wake", "push", "run"])
def test_engine_that_cannot_be_rebuilt_ends_the_run_with_its_own_error(moment):
    async def steps(shared, device):
        await shared.publish(0)
        await shared.take(2)
        device.dies = {moment}
        await shared.publish(1)
        await shared.take(2)

    with pytest.raises(RuntimeError, match="the engine's own error"):
        asyncio.run(asyncio.wait_for(steps(*on_frail_device(restarts=0)), 10))


class Recorder:
    """Notes in which order memory really moves: engine pool, weight sync, and one real `ModelWorker` with a role."""

    def __init__(self, params, optimizer):
        self.moves: list[str] = []
        self.away: set[str] = set()
        fsdp = FSDPConfig(param_offload=params, optimizer_offload=optimizer)
        self.worker = ModelWorker(0, 1)
        self.worker.setup = WorkerSetup(model=None, model_cfg=None, actor=ActorConfig(fsdp=fsdp))
        self.worker.engines = {"actor": self}

    async def call_async(self, method, *args):
        getattr(self.worker, method)(*args)

    def to(self, device, *, params=True, optimizer=True):
        for part, asked in (("params", params), ("optimizer", optimizer)):
            if asked and (device == "cpu") != (part in self.away):
                self.moves.append(f"{part} to {device}")
                self.away ^= {part}

    async def wake(self, tags):
        self.moves.append("wake " + " ".join(tags))

    async def sleep(self):
        self.moves.append("sleep")

    async def push(self, version):
        self.moves.append("push")
        return {}

    async def run(self, prompts, n, spec):
        self.moves.append("generate")
        return [group(p, [1.0, 0.0]) for p in prompts]


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("params", [False, True])
@pytest.mark.parametrize("sleep", [False, True])
def test_memory_moves_in_the_order_that_free_cache_engine_and_offload_allow(sleep, params, optimizer):
    shared, recorder = source(lambda index: True), Recorder(params, optimizer)
    shared._pool = shared._trainers = shared._sync = recorder
    shared._sleep, shared._engine_awake = sleep, not sleep

    async def steps():
        await shared.publish(0)
        await shared.take(2)  # and train
        await shared.evaluate([prompt(0)], 2, None)
        await shared.take(2)
        await shared.publish(1)

    asyncio.run(steps())
    p_out, p_back = (["params to cpu"], ["params to device"]) if params else ([], [])
    o_out, o_back = (["optimizer to cpu"], ["optimizer to device"]) if optimizer else ([], [])
    publish = [*o_out, "wake weights", "push", *p_out, "wake kv_cache"]
    take = ["generate", "sleep", *p_back, *o_back]
    evaluate = [*p_out, *o_out, "wake weights kv_cache", "generate"]
    both_fit = ["push", "generate", "generate", "generate", "push"]
    assert recorder.moves == ([*publish, *take, *evaluate, *take, *publish] if sleep else both_fit)
