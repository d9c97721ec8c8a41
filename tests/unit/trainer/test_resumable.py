"""What is said of a checkpoint that a run cannot continue, before anything is started."""

import asyncio
from types import SimpleNamespace

import pytest

from rlpost.trainer.about import about
from rlpost.trainer.resumable import check_resume
from rlpost.trainer.state import CheckpointStore
from tests.unit.trainer.test_build import compose

ASYNC = "trainer=fully_async"


class Stream:
    """Data that is the checkpoint's, or is not."""

    def __init__(self, *differences: str):
        self._differences = differences

    def differences(self, state):
        assert state == "cursor"
        yield from self._differences


def check(folder, before: list[str], now: list[str], *, slots=(), step: int = 10, total: int = 10, stream=None) -> None:
    """A checkpoint of a run with the overrides `before`, held against one with `now`."""
    saved = compose(*before)
    source = {"stream": "cursor"}
    if ASYNC in before:
        source = {"prompts": source, "buffer": {"slots": list(slots)}}
    store = CheckpointStore(folder, None, about(saved))

    async def write(folder):
        return {}

    assert check_resume(store, compose(*now), Stream(), total) is None
    written = asyncio.run(store.save(step, {"source": source}, write))
    assert check_resume(store, compose(*now), stream or Stream(), total) == written
    assert check_resume(store, compose(*now, "trainer.resume=never"), stream or Stream(), total) is None


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([], []),
        ([], ["actor.optim.lr=1e-7", "data.train_batch_size=128", "rollout.n=4", "algo=rloo"]),
        (["algo=ppo"], ["algo=grpo"]),
        ([ASYNC], [ASYNC]),
        (["model.lora_rank=4"], ["model.lora_rank=4"]),
    ],
)
def test_what_can_be_continued(tmp_path, before, now):
    check(tmp_path, before, now)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([], ["model.lora_rank=4"], "model.lora_rank=4, but it was written with 0"),
        (["model.lora_rank=8"], [], "model.lora_rank=0, but it was written with 8"),
        (
            ["model.lora_rank=4"],
            ["model.lora_rank=4", "model.target_modules=[q_proj]"],
            "target_modules=.*q_proj.*, but it was written with all-linear",
        ),
        (["algo=grpo"], ["algo=ppo"], "algo.adv_estimator=gae needs a critic, and grpo, of which it is, had none"),
        ([], [ASYNC], "one of trainer=colocated, not of trainer=fully_async"),
        ([ASYNC], [], "one of trainer=fully_async, with groups in flight, not of trainer=colocated"),
    ],
)
def test_what_cannot_be_continued(tmp_path, before, now, said):
    with pytest.raises(ValueError, match=f"trainer.resume=auto: .*global_step_10 cannot be continued: .*{said}.*never"):
        check(tmp_path, before, now)


def test_finished_groups_of_another_size(tmp_path):
    group = SimpleNamespace(trajectories=[1, 2, 3, 4])
    problem = "rollout.n=2, but it holds finished groups of 4"
    folder = CheckpointStore(tmp_path, None)
    saved = {"step": 1, "config": about(compose(ASYNC))["config"]}
    saved |= {"source": {"prompts": {"stream": "cursor"}, "buffer": {"slots": [("p", 0, group), ("q", 0, None)]}}}
    folder.find, folder.read = lambda resume: tmp_path, lambda path: saved
    check_resume(folder, compose(ASYNC, "rollout.n=4"), Stream(), 10)
    with pytest.raises(ValueError, match=problem):
        check_resume(folder, compose(ASYNC, "rollout.n=2"), Stream(), 10)


def test_all_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="ends at step 5 .*; model.lora_rank=4, .*; data.seed .* is 2, .* 1. Restore"):
        stream = Stream("data.seed (or seed) is 2, the checkpoint has 1")
        check(tmp_path, [], ["model.lora_rank=4"], total=5, stream=stream)
