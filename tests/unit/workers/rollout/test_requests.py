import asyncio

import numpy as np
import pytest

from rlpost.trajectory import Status
from rlpost.workers.rollout.base import Completion, SamplingSpec, request_seed
from rlpost.workers.rollout.requests import Requests

SPEC = SamplingSpec(temperature=1.0, max_tokens=6, vocab_size=100)


class Engine:
    """A token is the number of its position. A request that has sampled `allowed` tokens waits."""

    def __init__(self, forgets: int = 0):
        self.requests = Requests(self.submit, self.abort, max_model_len=20)
        self.version, self.submitted, self.allowed = 0, [], 2
        self.aborted: set[str] = set()
        self.forgets = forgets  # the first so many aborts are lost

    async def submit(self, token_ids, spec, seed, request_id, n):
        self.submitted.append((request_id, len(token_ids), seed, n))
        ids: list[int] = []
        while len(ids) < spec.max_tokens and request_id not in self.aborted:
            if len(ids) < self.allowed:
                ids.append(len(token_ids) + len(ids))
            await asyncio.sleep(0)
        status = Status.ABORT if request_id in self.aborted else Status.LENGTH
        self.aborted.discard(request_id)
        one = Completion(
            token_ids=np.asarray(ids, np.int64),
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.full(len(ids), self.version, np.int32),
            status=status,
        )
        return [one] * n

    async def abort(self, request_ids):
        if self.forgets:
            self.forgets -= 1
        else:
            self.aborted |= set(request_ids)

    async def start(self, request_id="r", n=1):
        """A request that has sampled what it may."""
        request = asyncio.ensure_future(self.requests.generate([0, 1], SPEC, 5, request_id, n))
        await turns()
        return request


class SlowestFirst(Engine):
    """What began last is the first to end when it is aborted."""

    async def submit(self, token_ids, spec, seed, request_id, n):
        number = len(self.submitted)
        completions = await super().submit(token_ids, spec, seed, request_id, n)
        for _ in range(max(0, 9 - number)):
            await asyncio.sleep(0)
        return completions


async def turns() -> None:
    """Let every task run until it can do no more."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(body) -> None:
    asyncio.run(body())


@pytest.mark.parametrize("forgets", [0, 3])
def test_kept_request_goes_on_where_it_was_with_the_version_of_then(forgets):
    async def body():
        engine = Engine(forgets)
        request = await engine.start(n=2)
        await engine.requests.pause(keep=True)
        await turns()
        assert not request.done() and engine.submitted == [("r", 2, 5, 2)]
        engine.version, engine.allowed = 1, 6
        engine.requests.resume()
        for completion in await request:
            assert completion.token_ids.tolist() == [2, 3, 4, 5, 6, 7] and completion.status is Status.LENGTH
            assert completion.versions.tolist() == [0, 0, 1, 1, 1, 1]
        # one request for each sample, with a seed for its position
        assert engine.submitted[1:] == [(f"r/{i}", 4, request_seed(5 + i, 2), 1) for i in range(2)]

    run(body)


def test_request_that_is_not_kept_returns_what_it_has():
    async def body():
        engine = Engine()
        request = await engine.start()
        await engine.requests.pause(keep=False)
        (completion,) = await request
        assert completion.status is Status.ABORT and completion.token_ids.tolist() == [2, 3]

    run(body)


def test_abort_reaches_the_continuations_of_a_request_and_no_other():
    async def body():
        engine = Engine()
        mine, other = await engine.start("a"), await engine.start("ab")
        await engine.requests.pause(keep=True)
        engine.requests.resume()
        await turns()
        await engine.requests.abort("a")
        assert (await mine)[0].status is Status.ABORT
        engine.allowed = 6
        assert (await other)[0].status is Status.LENGTH

    run(body)


def test_requests_go_on_in_the_order_in_which_they_came():
    async def body():
        engine = SlowestFirst()
        requests = [await engine.start(name, n=2) for name in "dcba"]
        for _ in range(2):  # the second time each is two requests already
            await engine.requests.pause(keep=True)
            requests.append(await engine.start("new"))
            engine.submitted.clear()
            engine.requests.resume()
            await turns()
        names = [request_id.partition("/")[0] for request_id, *_ in engine.submitted]
        assert names == [*"ddccbbaa", "new", "new"]
        engine.allowed = 6
        assert all(c.status is Status.LENGTH for completions in await asyncio.gather(*requests) for c in completions)

    run(body)


def test_pause_that_overtakes_those_let_in_holds_them_back():
    async def body():
        engine = Engine()
        await engine.requests.pause(keep=True)
        request = await engine.start()
        engine.requests.resume()
        await engine.requests.pause(keep=True)
        engine.requests.begin_update(1)
        await turns()
        assert not engine.submitted
        engine.requests.end_update()
        engine.requests.resume()
        engine.allowed = 6
        assert (await request)[0].status is Status.LENGTH

    run(body)


def test_update_is_refused_while_requests_run_and_holds_new_ones_back():
    async def body():
        engine = Engine()
        request = await engine.start()
        with pytest.raises(RuntimeError, match="weight update 3: 1 requests are running; pause first"):
            engine.requests.begin_update(3)
        engine.allowed = 6
        await request
        engine.requests.begin_update(3)
        waiting = await engine.start("w")
        await engine.requests.pause(keep=True)
        engine.requests.end_update()
        await turns()
        assert len(engine.submitted) == 1  # still paused
        engine.requests.resume()
        assert (await waiting)[0].status is Status.LENGTH

    run(body)


def test_request_beyond_the_engines_length_is_refused():
    async def body():
        with pytest.raises(
            ValueError, match="a prompt of 15 tokens and an answer of up to 6 exceed .*max_model_len=20"
        ):
            await Engine().requests.generate([0] * 15, SPEC, 0, "r", 1)

    run(body)
