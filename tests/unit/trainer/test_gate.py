"""When the gate has the engines mended, and what the loop does afterwards. Engines and trainers are numbers here."""

import asyncio
from contextlib import nullcontext

import pytest
import torch

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig
from rlpost.batch import Batch, collate
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.gate import PASSING_TOKENS, ParityGate
from rlpost.trainer.parity import ParityError
from rlpost.trainer.repair import RepairError
from rlpost.trajectory import NOT_ASKED
from tests.unit.trainer.rollouts import group, prompt
from tests.unit.trainer.whole_trainer import make_trainer


class World:
    """Engines report logprob 0; the trainer computes `-error`, or nearly 0 at temperature `right_temperature`."""

    def __init__(self, error, right_temperature=None):
        self.error, self.right_temperature = error, right_temperature
        self.calls = []

    async def probe(self, num_sequences, max_tokens=None):
        self.calls.append("probe" if max_tokens is None else f"probe of {max_tokens} tokens")
        return [group(prompt(0), [1.0, 0.0])]

    async def take(self, n):
        self.calls.append("take")
        return [group(prompt(0), [1.0, 0.0])]

    async def publish(self, version):
        self.calls.append(f"publish {version}")
        return {}

    def rewind(self):
        self.calls.append("rewind")

    def metrics(self):
        return {}

    def without_push(self):
        return nullcontext()

    def state_dict(self):
        return {}

    def on_policy_rows(self, batch, step):
        return range(len(batch))

    async def infer(self, column, batch, rows=None, *, temperature=None):
        error = 0.0 if temperature is not None and temperature == self.right_temperature else self.error
        value = -error if rows is None else NOT_ASKED
        return Batch(batch.cu_seqlens, {column: torch.full((batch.num_tokens,), value)})

    async def train(self, role, batch, objective, step):
        return {}

    async def call_async(self, method, *args):
        return [{}]


def gate(world, mend):
    return ParityGate(world, limit=1e-3, probe_size=2, n=2, temperature=1.0, mend=mend)


def sampled_by(version):
    """The batch of a step of one update: no old logprobs."""
    batch = collate([group(prompt(0), [1.0, 0.0], versions=version)], 2)
    return batch.update({"old_logprobs": torch.full((batch.num_tokens,), NOT_ASKED)})


def mender(world, result=True):
    """Sets the error right, if it is to succeed."""

    async def mend(agree):
        world.calls.append("mend")
        if result:
            world.error = 0.0
        assert await agree() is result
        return result

    return mend


def test_probe_goes_on_with_mended_engines_after_publishing_again():
    world = World(error=0.5)
    metrics = asyncio.run(gate(world, mender(world)).probe(world, 0))
    assert metrics["train_rollout_logprob_abs_diff/mean"].value == 0.0
    after = world.calls[world.calls.index("mend") :]
    assert after == ["mend", "publish 0", "probe", "probe"]


def test_steps_without_tokens_of_the_trainers_version_are_followed_by_a_short_probe():
    world = World(error=0.0)
    gate = ParityGate(world, limit=1e-3, probe_size=2, n=2, temperature=1.0, probe_freq=3)
    stale = sampled_by(0)
    own = sampled_by(7)

    async def body():
        await gate.probe(world, 0)
        for version, batch in ((5, stale), (6, stale), (7, own), (8, stale), (9, stale)):
            await gate.check(batch, version)
        assert world.calls == ["probe"]
        await gate.check(stale, 10)
        assert world.calls == ["probe", f"probe of {PASSING_TOKENS} tokens"]

    asyncio.run(body())


def test_engines_that_cannot_be_mended_stop_the_run_with_the_first_error():
    world = World(error=0.5)
    with pytest.raises(ParityError, match="is 5.00e-01 over 2 tokens of version 0"):
        asyncio.run(gate(world, mender(world, result=False)).probe(world, 0))


def test_error_that_a_temperature_explains_is_not_mended():
    world = World(error=0.5, right_temperature=0.7)
    with pytest.raises(ParityError, match="with temperature 0.7"):
        asyncio.run(gate(world, mender(world)).probe(world, 0))
    assert "mend" not in world.calls


def test_reason_why_a_repair_stops_the_run_is_added_to_the_error():
    async def mend(agree):
        raise RepairError("AITER's moe breaks parity. Set rollout.aiter_kernels.moe=off")

    world = World(error=0.5)
    with pytest.raises(ParityError, match=r"above the limit .*\. AITER's moe breaks parity. Set rollout"):
        asyncio.run(gate(world, mend).probe(world, 0))


class Reporter:
    def __init__(self, folder):
        self.folder = folder

    def step(self, step, values):
        self.parity = values["train_rollout_logprob_abs_diff/mean"]

    def rollouts(self, step, groups):
        pass

    def summary(self, step, wall_s, finished):
        return {"steps": step}

    def state_dict(self):
        return {}


@pytest.mark.parametrize("mended", [True, False])
def test_step_that_fails_is_sampled_again_from_the_same_prompts_once_the_engines_are_mended(tmp_path, mended):
    world, reporter = World(error=0.0), Reporter(tmp_path)
    real = gate(world, mender(world, mended))

    class FailsAtTheStep:
        async def probe(self, source, version):
            await real.probe(source, version)
            world.error = 0.5

        check, repair = real.check, real.repair

    trainer = make_trainer(
        TrainerConfig(resume="never"),
        Algorithm(AlgoConfig(adv_estimator="grpo"), max_response_length=8),
        tmp_path,
        source=world,
        workers=world,
        gate=FailsAtTheStep(),
        reporter=reporter,
    )
    if not mended:
        with pytest.raises(ParityError):
            asyncio.run(trainer.fit())
        assert world.calls.count("take") == 1 and "rewind" not in world.calls
        return
    assert asyncio.run(trainer.fit()) == {"steps": 1}
    assert world.calls.count("take") == 2
    assert world.calls.index("mend") < world.calls.index("rewind") < len(world.calls) - world.calls[::-1].index("take")
    assert reporter.parity == 0.0
