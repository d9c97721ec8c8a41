import numpy as np
import pytest

from rlpost.algos.config import FilterGroupsConfig
from rlpost.algos.filters import Keep, keep_group
from rlpost.trajectory import Group, Prompt, Status, Trajectory


def trajectory(reward: float, accuracy: float | None, status: Status = Status.STOP) -> Trajectory:
    return Trajectory(
        token_ids=np.array([1, 2]),
        provenance=np.array([0, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(2, dtype=np.float32),
        versions=np.array([-1, 0], dtype=np.int32),
        rewards=np.array([0, reward], dtype=np.float32),
        status=status,
        reward_parts={} if accuracy is None else {"accuracy": accuracy},
    )


def keep(*trajectories: Trajectory, **cfg) -> Keep:
    prompt = Prompt(id="p", index=0, token_ids=np.array([1]), text="", data_source="d")
    group = Group(id="g1", index=0, data_source="d", prompt=prompt, trajectories=list(trajectories))
    return keep_group(group, FilterGroupsConfig(**{"enable": True, **cfg}))


def test_filter_keeps_groups_with_signal():
    assert keep(trajectory(1, 1), trajectory(0, 0)) == Keep(True)


@pytest.mark.parametrize(("accuracy", "reason"), [(0.0, "all_0"), (1.0, "all_1"), (0.3, "all_equal")])
def test_filter_drops_zero_variance_with_its_reason(accuracy, reason):
    assert keep(trajectory(1, accuracy), trajectory(0, accuracy)) == Keep(False, reason)


def test_filter_looks_at_accuracy_not_at_the_shaped_reward():
    overlong = trajectory(0.5, 1.0)  # right but punished for its length
    assert keep(trajectory(1, 1.0), overlong) == Keep(False, "all_1")
    assert keep(trajectory(1, 1.0), overlong, metric="reward") == Keep(True)


def test_filter_compares_usable_answers_only():
    failed = trajectory(0, None, Status.REWARD_ERROR)
    assert keep(trajectory(1, 1), trajectory(1, 1), failed) == Keep(False, "all_1")
    assert keep(trajectory(1, 1), trajectory(0, 0), failed) == Keep(True)
    assert keep(trajectory(1, 1), trajectory(0, 0, Status.LENGTH), failed) == Keep(True)


def test_filter_drops_groups_with_fewer_than_two_usable_answers():
    failed, aborted = trajectory(0, None, Status.REWARD_ERROR), trajectory(0, 0, Status.ABORT)
    assert keep(trajectory(1, 1), failed, aborted) == Keep(False, "too_few_usable")


def test_filter_off_keeps_everything():
    assert keep(trajectory(1, None), enable=False) == Keep(True)


def test_filter_names_a_missing_part():
    with pytest.raises(ValueError, match=r"metric=accuracy: .*'g1'.*\['format'\].*'reward'"):
        other = trajectory(1, None)
        other.reward_parts["format"] = 1.0
        keep(other, other)
