"""Small ragged batches written by hand."""

from collections.abc import Callable

import pytest
import torch

from rlpost.batch import Batch


def _make_batch(rows: str, group: list[int], usable: list[bool] | None = None, **tokens: list[float]) -> Batch:
    """One word a row of `rows`: 'M' a response token, '.' anything else. Token columns are flat, over all rows."""
    words = rows.split()
    cu_seqlens = torch.tensor([0, *map(len, words)]).cumsum(0)
    ok = torch.tensor(usable if usable is not None else [True] * len(words))
    mask = torch.tensor([letter == "M" for word in words for letter in word])
    columns = {name: torch.tensor(values, dtype=torch.float32) for name, values in tokens.items()}
    return Batch(
        cu_seqlens,
        {
            "response_mask": mask & ok.repeat_interleave(cu_seqlens.diff()),
            "group": torch.tensor(group),
            "usable": ok,
            **columns,
        },
    )


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return _make_batch
