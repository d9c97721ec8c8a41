import json

import pytest

from rlpost.tracking.curves import plot_curves, series

ROWS = [
    {"step": 0, "val/gsm8k/accuracy": 0.1, "val/math/accuracy": 0.2},
    {"step": 2, "reward/mean": 0.5, "throughput/tokens_per_s": 10.0},
    {"step": 1, "reward/mean": None, "train_rollout_logprob_abs_diff/mean": 1e-3},
    {"step": 3, "reward/mean": 0.7},
    {"step": 2, "reward/mean": 0.6},
]


def test_series_sorts_by_step_skips_nulls_and_takes_the_last_of_a_step():
    assert series(ROWS, ["reward/mean"]) == {"reward/mean": ([2, 3], [0.6, 0.7])}


def test_series_matches_prefix_and_suffix():
    assert series(ROWS, [("val/", "/accuracy")]) == {
        "val/gsm8k/accuracy": ([0], [0.1]),
        "val/math/accuracy": ([0], [0.2]),
    }


def test_plot_curves_writes_a_png_even_where_a_metric_is_missing(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS[:2]))
    out = plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", [None, ""])
def test_plot_curves_names_the_file_that_is_missing_or_empty(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
