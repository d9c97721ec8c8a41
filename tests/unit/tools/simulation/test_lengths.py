"""Lengths: moments of the distribution, growth, and recorded ones."""

import json

import numpy as np
import pytest

from rlpost.tools.simulation.lengths import LogNormal, lengths_of, read_recorded
from rlpost.tools.simulation.scenario import Scenario


def drawn(lengths, groups=400, n=50):
    return np.concatenate([lengths(i, n) for i in range(groups)])


@pytest.mark.parametrize(("mean", "tail", "limit"), [(890, 4, 28672), (200, 1.5, 4096), (900, 6, 2048), (30, 1, 64)])
def test_mean_is_kept_whatever_the_cut(mean, tail, limit):
    values = drawn(LogNormal(mean, tail, limit))
    assert values.mean() == pytest.approx(mean, rel=0.05)
    assert values.min() >= 1 and values.max() <= limit


@pytest.mark.parametrize(("mean", "tail", "limit"), [(512, 1, 512), (1032, 4, 4096), (500, 5, 2048), (890, 4, 28672)])
def test_an_answer_is_as_long_so_far_as_it_is_on_average_over_all_decoding_steps(mean, tail, limit):
    lengths = LogNormal(mean, tail, limit)
    values = drawn(lengths).astype(float)
    positions = (values * (values - 1) / 2).sum() / values.sum()
    assert lengths.mean_position == pytest.approx(positions, rel=0.06)
    assert tail > 1 or lengths.mean_position == pytest.approx(mean / 2)


def test_tail_is_the_99th_percentile_over_the_mean():
    values = drawn(LogNormal(1000, 5, 10**7))
    assert np.quantile(values, 0.99) / values.mean() == pytest.approx(5, rel=0.06)


def test_lengths_depend_on_the_prompt_and_on_nothing_else():
    one, two = LogNormal(100, 3, 1000), LogNormal(100, 3, 1000)
    assert (one(7, 8) == two(7, 8)).all() and not (one(7, 8) == one(8, 8)).all()


def test_mean_grows_from_prompt_to_prompt_and_then_stays():
    growing = LogNormal(100, 3, 10000, grow_to=400, grow_over=1000)
    assert growing(0, 20000).mean() == pytest.approx(100, rel=0.1)
    assert growing(1000, 20000).mean() == pytest.approx(400, rel=0.1)
    assert growing(5000, 20000).mean() == pytest.approx(400, rel=0.1)


def test_impossible_lengths_are_named():
    with pytest.raises(ValueError, match="tail=20: a log-normal p99 is between 1 and 14.96 times"):
        LogNormal(100, 20, 1000)
    with pytest.raises(ValueError, match="grow_to=2000: must be between 1 and max_length=1000"):
        LogNormal(100, 4, 1000, grow_to=2000)
    with pytest.raises(ValueError, match="mean_length=0.5: must be between 1 and max_length=1000"):
        LogNormal(0.5, 4, 1000)


@pytest.mark.parametrize("tail", [1.0, 14.96])
@pytest.mark.parametrize("mean", [1.0, 100.0, 1000.0])
def test_limits_that_messages_name_are_themselves_legal(mean, tail):
    lengths = LogNormal(mean, tail, 1000)
    assert mean < 1000.0 or lengths(0, 1000).min() == 1000  # at the limit there is nothing left to vary
    assert 0 < lengths.mean_position <= 1000


def test_recorded_groups_are_drawn_whole(tmp_path):
    for step, groups in ((1, {"a": [3, 5], "b": [7, 9]}), (2, {"a": [1, 2]})):
        rows = [{"group": g, "num_tokens": n} for g, lengths in groups.items() for n in lengths]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = lengths_of(Scenario(lengths=str(tmp_path)))
    seen = {tuple(recorded(i, 2)) for i in range(50)}
    assert seen == {(3, 5), (7, 9), (1, 2)}
    assert set(recorded(0, 30)) <= {1, 2, 3, 5, 7, 9}  # another n: drawn from one group


def test_a_folder_without_rollouts_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no rollouts; .*trainer.rollout_data_dir"):
        read_recorded(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl holds other rows than those of rollouts"):
        read_recorded(tmp_path)
