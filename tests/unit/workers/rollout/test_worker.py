"""Workflow workers and their routing, with engines played by objects in this process."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlpost import heartbeat
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.trajectory import Prompt, Status
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import portable_tokenizer
from rlpost.workers.rollout.base import ENGINES, Completion, EngineLost, SamplingSpec
from rlpost.workers.rollout.router import MAX_RESENDS, Request, Router
from rlpost.workers.rollout.worker import RolloutWorker
from rlpost.workers.rollout.workflow import WORKFLOWS, trajectory
from rlpost.workers.rollout.workflow_worker import WorkflowWorker
from tests.e2e import engine_contract as contract

SPEC = SamplingSpec(temperature=1.0, max_tokens=4, vocab_size=32)


class Engine:
    """Plays the handle of a `RolloutWorker`; answers with `max_tokens` copies of a token that its seed chooses."""

    def __init__(self, error: Exception | None = None, status: Status = Status.STOP):
        self.calls: list[list[Request]] = []
        self.error, self.status = error, status

    @property
    def generate(self):
        return self

    def options(self, num_returns):
        return self

    async def remote(self, requests: list[Request]):
        """One moment for each request, as a reference to it."""
        self.calls.append(requests)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

        async def reference(position: int, request: Request):
            return [(position, [self.answer(request, i) for i in range(request.n)])]

        for position, request in enumerate(requests):
            yield reference(position, request)

    def answer(self, request: Request, i: int) -> Completion:
        length = request.spec.max_tokens
        return Completion(
            token_ids=np.full(length, 3 + (request.seed + i) % 20),
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            status=self.status,
        )


@WORKFLOWS.register("test_two_turns")
async def two_turns(prompt, n, generate):
    trajectories = []
    for i in range(n):
        (first,) = await generate(prompt.token_ids, key=f"{i}/0", max_tokens=2)
        so_far = np.concatenate([prompt.token_ids, first.token_ids])
        (second,) = await generate(so_far, key=f"{i}/1")
        trajectories.append(trajectory(so_far, second, i))
    return trajectories


@WORKFLOWS.register("test_one_is_silent")
async def one_is_silent(prompt, n, generate):
    (spoken,) = await generate(prompt.token_ids)
    silent = Completion(
        token_ids=np.empty(0, np.int64), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int32),
        status=Status.STOP,
    )  # fmt: skip
    return [trajectory(prompt.token_ids, spoken, 0), trajectory(prompt.token_ids, silent, 1)]


@WORKFLOWS.register("test_too_few")
async def too_few(prompt, n, generate):
    return []


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return contract.make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


def run(info, engines: list[Engine], *, text: str = "", n: int = 2, workflow: str = "single_turn", seed: int | None = 1,
        fn: str = "length", on_error: str = "mask"):  # fmt: skip
    async def main():
        term = RewardTermConfig(fn=f"tests.ray.rewards_for_tests.{fn}")
        reward = RewardConfig(terms={"length": term}, on_error=on_error)
        worker = WorkflowWorker(RolloutConfig(workflow=workflow), portable_tokenizer(info), reward, engines, seed, 8)
        asked = [Prompt(id=f"p{i}", index=i, token_ids=np.array([5, 6]), text=text, data_source="d") for i in range(4)]
        await worker.start()
        try:
            return await worker.run(asked, n, SPEC)
        finally:
            await worker.close()

    return asyncio.run(main())


def test_requests_of_one_moment_travel_in_one_call_to_each_engine(info):
    engines = [Engine(), Engine()]
    run(info, engines, n=3)
    assert [[len(call) for call in engine.calls] for engine in engines] == [[2], [2]]
    assert {request.n for engine in engines for call in engine.calls for request in call} == {3}


def test_seeds_follow_run_seed_and_prompt(info):
    def seeds(seed: int) -> list[int]:
        engine = Engine()
        run(info, [engine], seed=seed)
        return [request.seed for call in engine.calls for request in call]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 4


def test_requests_have_no_seed_where_the_run_gives_none(info):
    class Seedless(Engine):
        def answer(self, request: Request, i: int) -> Completion:
            assert request.seed is None
            return super().answer(dataclasses.replace(request, seed=0), i)

    engine = Seedless()
    run(info, [engine], seed=None)
    assert sum(len(call) for call in engine.calls) == 4


def test_reward_sits_on_the_last_sampled_token(info):
    for group in run(info, [Engine()]):
        for t in group:
            assert t.rewards.tolist() == [0, 0, 0, 0, 0, 4.0]
            assert t.reward_parts == {"length": 4.0}


def test_failed_score_is_marked_and_never_a_zero(info):
    for t in (t for group in run(info, [Engine()], text="bad") for t in group):
        assert t.status is Status.REWARD_ERROR
        assert "no ground truth" in t.error and t.reward_parts == {}
        assert t.error_kind == "exception"


def test_failed_score_costs_its_answer_or_its_group(info):
    for group in run(info, [Engine()], fn="first_fails"):
        assert [t.status for t in group] == [Status.REWARD_ERROR, Status.STOP]
        assert [t.error_kind for t in group] == ["crash", None] and group[1].reward == 1.0
    for group in run(info, [Engine()], fn="first_fails", on_error="drop_group"):
        assert [t.status for t in group] == [Status.REWARD_ERROR] * 2
        assert [t.error_kind for t in group] == ["crash", "group"]
        assert [t.reward for t in group] == [0.0, 0.0]
        assert "reward.on_error=drop_group" in group[1].error


def test_aborted_answers_are_not_scored(info):
    for t in (t for group in run(info, [Engine(status=Status.ABORT)]) for t in group):
        assert t.status is Status.ABORT and t.reward_parts == {}


def test_workflow_may_ask_more_than_once(info):
    engine = Engine()
    groups = run(info, [engine], workflow="test_two_turns")
    assert [len(t.token_ids) for t in groups[0]] == [8, 8]
    mine = [r for call in engine.calls for r in call if r.request_id.startswith("p0/")]
    assert len({request.seed for request in mine}) == len({request.request_id for request in mine}) == 4


def test_workflow_that_returns_too_few_is_an_error(info):
    with pytest.raises(ValueError, match=r"returned 0 trajectories of prompt 'p\d', expected 2"):
        run(info, [Engine()], workflow="test_too_few")


def test_error_of_an_engine_reaches_every_waiting_request(info):
    with pytest.raises(RuntimeError, match="the engine died"):
        run(info, [Engine(RuntimeError("the engine died"))])


def test_router_prefers_the_replica_with_fewer_samples():
    async def main():
        engines = [Engine(), Engine()]
        router = Router(engines)

        def request(n: int) -> Request:
            return Request(token_ids=np.array([1]), spec=SPEC, seed=0, request_id="r", n=n)

        await asyncio.gather(*(router.generate(request(n)) for n in (6, 2, 2, 2, 1)))
        assert [[r.n for call in engine.calls for r in call] for engine in engines] == [[6, 1], [2, 2, 2]]
        await router.generate(request(1))
        assert len(engines[0].calls) == 2, "finished requests no longer count"

    asyncio.run(main())


def ask(n: int = 1, seed: int = 0) -> Request:
    return Request(token_ids=np.array([1]), spec=SPEC, seed=seed, request_id=f"r{seed}", n=n)


def test_requests_of_a_lost_replica_are_done_by_the_others():
    async def main():
        engines = [Engine(EngineLost("gone")), Engine(), Engine()]
        router = Router(engines)
        answers = await asyncio.gather(*(router.generate(ask(seed=seed)) for seed in range(6)))
        assert [int(answer[0].token_ids[0]) for answer in answers] == [3 + seed for seed in range(6)]
        assert [sum(map(len, engine.calls)) for engine in engines] == [2, 3, 3]
        await asyncio.gather(*(router.generate(ask()) for _ in range(4)))
        assert len(engines[0].calls) == 1, "a lost replica gets no more work"

    asyncio.run(main())


def test_excluded_replica_gets_no_work():
    async def main():
        engines = [Engine(), Engine()]
        router = Router(engines)
        router.exclude(0)
        await asyncio.gather(*(router.generate(ask()) for _ in range(4)))
        assert [len(engine.calls) for engine in engines] == [0, 1]

    asyncio.run(main())


def test_requests_wait_for_a_replica_to_be_admitted_where_none_is_left():
    async def main():
        router = Router([Engine(EngineLost("first"))])
        waiting = [asyncio.ensure_future(router.generate(ask(seed=seed))) for seed in range(3)]
        await asyncio.sleep(0.01)
        waiting.append(asyncio.ensure_future(router.generate(ask(seed=3))))
        await asyncio.sleep(0.01)
        assert not any(answer.done() for answer in waiting) and [why for _, why in router.lost] == ["first"]
        engine = Engine()
        router.admit(0, engine)
        answers = await asyncio.gather(*waiting)
        assert [int(answer[0].token_ids[0]) for answer in answers] == [3, 4, 5, 6]
        assert [len(call) for call in engine.calls] == [4]

    asyncio.run(main())


class Silent(Engine):
    """Takes requests, and never answers."""

    async def remote(self, requests: list[Request]):
        self.calls.append(requests)
        await asyncio.Event().wait()
        yield


@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
def test_exclusion_ends_the_wait_for_a_replica_that_hangs(begun):
    """Also where the call to it is not under way yet."""

    async def main():
        hangs, other = Silent(), Engine()
        router = Router([hangs, other])
        waiting = asyncio.gather(*(router.generate(ask(seed=seed)) for seed in range(4)))
        while not (hangs.calls if begun else router._calls):
            await asyncio.sleep(0)
        router.exclude(0)
        answers = await asyncio.wait_for(waiting, 5)
        assert [int(answer[0].token_ids[0]) for answer in answers] == [3, 4, 5, 6]
        assert sorted(request.seed for call in other.calls for request in call) == [0, 1, 2, 3]
        router.admit(0, engine := Engine())
        await asyncio.gather(*(router.generate(ask()) for _ in range(4)))
        assert [len(call) for call in engine.calls] == [2], "what it had before no longer counts"

    asyncio.run(main())


def test_request_that_outlives_no_replica_is_given_up():
    """It may be what kills them: the rest of the replicas are spared."""

    async def main():
        engines = [Engine(EngineLost(f"gone {i}")) for i in range(MAX_RESENDS + 1)] + [Engine()]
        router = Router(engines)
        with pytest.raises(EngineLost, match=f"gone {MAX_RESENDS}"):
            await router.generate(ask())
        assert engines[-1].calls == []
        assert (await router.generate(ask()))[0].status is Status.STOP

    asyncio.run(main())


def test_a_request_that_nobody_waits_for_any_more_costs_the_others_nothing():
    async def run():
        router = Router([Engine()])
        requests = [
            Request(token_ids=np.arange(2), spec=SPEC, seed=seed, request_id=str(seed), n=1) for seed in range(2)
        ]
        given_up, waiting = (asyncio.ensure_future(router.generate(request)) for request in requests)
        await asyncio.sleep(0)
        given_up.cancel()
        return await waiting

    (completion,) = asyncio.run(run())
    assert completion.status is Status.STOP


@pytest.mark.parametrize(
    ("on_error", "kinds"), [("mask", [None, "empty"]), ("drop_group", ["group", "empty"])], ids=["mask", "drop_group"]
)
def test_answer_without_a_token_is_an_error_and_no_0(info, on_error, kinds):
    groups = run(info, [Engine()], workflow="test_one_is_silent", on_error=on_error)
    assert [[t.error_kind for t in group] for group in groups] == [kinds] * 4
    assert all(
        group[1].status is Status.REWARD_ERROR and "without a sampled token" in group[1].error for group in groups
    )


def test_engine_is_in_pause_until_it_goes_on_and_in_publish_within(monkeypatch):
    seen = []

    class Held:
        def __getattr__(self, method):
            async def call():
                seen.append((method, heartbeat.current().pulse().phase))

            return call

    monkeypatch.setattr(ENGINES, "get", lambda *_: lambda *_: Held())

    async def body():
        worker = RolloutWorker(RolloutConfig(), None, 8)
        for method in ("ping", "pause", "begin_update", "finish_update", "pause", "resume", "ping"):
            await worker.call(method)
            seen.append(heartbeat.current().pulse().phase)

    asyncio.run(body())
    assert seen == [
        *(("ping", ""), ""),
        *(("pause", "pause"), "pause"),
        *(("begin_update", "publish"), "pause"),
        *(("finish_update", "publish"), "pause"),
        *(("pause", "pause"), "pause"),
        *(("resume", ""), ""),
        *(("ping", ""), ""),
    ]
