"""What one step of the loop reports, with everything around the loop played by hand."""

import asyncio
from contextlib import asynccontextmanager, nullcontext

import pytest
import torch

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig
from rlpost.batch import Batch
from rlpost.endings import Failed
from rlpost.metrics import Metric, Reduce
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.source import rollout_metrics
from tests.unit.trainer.rollouts import group, prompt
from tests.unit.trainer.whole_trainer import make_trainer

KEPT, DROPPED = group(prompt(0), [1.0, 0.0], num_tokens=3), group(prompt(1), [1.0, 1.0], num_tokens=7)


class Source:
    """Generates two groups, of which one is kept."""

    async def take(self, n):
        return [KEPT]

    async def publish(self, version):
        return {}

    def metrics(self):
        return rollout_metrics([KEPT, DROPPED])

    def without_push(self):
        return nullcontext()

    def state_dict(self):
        return {}


class Workers:
    """Reports what was made up for each role."""

    def __init__(self, reports):
        self.reports = reports

    def on_policy_rows(self, batch, step):
        return range(len(batch))

    async def infer(self, column, batch, rows):
        return Batch(batch.cu_seqlens, {column: torch.zeros(batch.num_tokens)})

    async def train(self, role, batch, objective, step):
        return self.reports[role]

    async def call_async(self, method, *args):
        return [{}]


class Gate:
    async def probe(self, source, version):
        return {}

    async def check(self, batch, version):
        return {}


class Reporter:
    def __init__(self, folder):
        self.folder, self.steps = folder, {}

    def step(self, step, values):
        self.steps[step] = values

    def rollouts(self, step, groups):
        assert groups == [KEPT]

    def summary(self, step, wall_s, finished):
        return {"steps": step, "finished": finished}

    def state_dict(self):
        return {}


@pytest.fixture
def one_step(tmp_path):
    """What a PPO run of one step logs when the roles report this."""

    def run(**reports):
        reporter = Reporter(tmp_path)
        trainer = make_trainer(
            TrainerConfig(resume="never"),
            Algorithm(AlgoConfig(adv_estimator="gae"), max_response_length=8),
            tmp_path,
            source=Source(),
            workers=Workers(reports),
            gate=Gate(),
            reporter=reporter,
        )
        assert asyncio.run(trainer.fit()) == {"steps": 1, "finished": True}
        return reporter.steps[1]

    return run


def test_checkpoint_is_written_while_no_weights_travel(tmp_path):
    happened = []

    class Calm(Source):
        @asynccontextmanager
        async def without_push(self):
            happened.append("no push")
            yield
            happened.append("pushes")

    class Saving(Workers):
        async def call_async(self, method, *args):
            happened.append(method)
            return [{}]

    trainer = make_trainer(
        TrainerConfig(resume="never", export_hf=False),
        Algorithm(AlgoConfig(), max_response_length=8),
        tmp_path,
        source=Calm(),
        workers=Saving({"actor": {}}),
        gate=Gate(),
        reporter=Reporter(tmp_path),
    )
    asyncio.run(trainer.fit())
    assert happened == ["no push", "save", "pushes"]


@pytest.mark.parametrize("larger", ["critic", "actor"])  # the critic is trained first
def test_what_actor_and_critic_both_report_is_reduced_rather_than_replaced(one_step, larger):
    def report(role):
        peak = Metric(7.0 if role == larger else 3.0, reduce=Reduce.MAX)
        return {f"{role}/lr": Metric(0.5), "perf/max_memory_reserved_gb": peak}

    values = one_step(actor=report("actor"), critic=report("critic"))
    assert values["perf/max_memory_reserved_gb"] == 7.0
    assert values["actor/lr"] == values["critic/lr"] == 0.5


def test_rewards_are_those_of_all_generated_groups_and_tokens_those_of_the_trained_ones(one_step):
    values = one_step(actor={}, critic={})
    assert values["reward/mean"] == values["reward/accuracy"] == 0.75
    assert values["response_length/mean"] == 5.0
    assert values["throughput/tokens"] == 2 * (2 + 3)
    assert values["critic/score/mean"] == 0.5  # the batch that is trained


class BrokenSource(Source):
    """Raises what a user's workflow might, in one of its calls."""

    def __init__(self, method):
        setattr(self, method, self.fail)

    async def fail(self, *args, **kwargs):
        raise ValueError("not a number")


@pytest.mark.parametrize(("method", "error"), [("publish", ValueError), ("take", Failed)])
def test_value_error_is_a_mistake_in_the_configuration_only_until_training_begins(tmp_path, method, error):
    trainer = make_trainer(
        TrainerConfig(resume="never"),
        Algorithm(AlgoConfig(adv_estimator="gae"), max_response_length=8),
        tmp_path,
        source=BrokenSource(method),
        workers=Workers({}),
        gate=Gate(),
        reporter=Reporter(tmp_path),
    )
    with pytest.raises(error, match="not a number") as raised:
        asyncio.run(trainer.fit())
    assert type(raised.value) is error
