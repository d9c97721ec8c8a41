"""Plans: whole groups, equal counts of micro-batches, shares fixed before rows are spread."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import ragged_batch

from rlpost.algos.aggregate import loss_weights
from rlpost.batch import Batch
from rlpost.trajectory import NOT_ASKED
from rlpost.workers.config import TrainRoleConfig
from rlpost.workers.dispatch import assemble, mini_batches, on_policy_rows, plan_infer, plan_train


def _weigh(mask, cu_seqlens):
    return loss_weights(mask, cu_seqlens, "seq-mean-token-mean")


def _plan(cfg: TrainRoleConfig, dp_size: int, max_tokens: int = 40):
    batch = ragged_batch().update({"sample_id": torch.arange(10)})
    works = plan_train(batch, cfg, _weigh, dp_size=dp_size, max_tokens=max_tokens, key="key", seed=5)
    return batch, works


def test_mini_batches_are_whole_groups_by_name_and_the_last_is_smaller():
    groups = torch.tensor([7, 7, 2, 9, 2, 9, 4, 4])
    cfg = TrainRoleConfig(ppo_mini_batch_size=3)
    assert list(mini_batches(groups, cfg, seed=0)) == [[0, 1, 2, 4, 3, 5], [6, 7]]


def test_mini_batches_of_shuffled_epochs_see_every_row_once_an_epoch():
    groups = torch.arange(12) // 2
    cfg = TrainRoleConfig(ppo_mini_batch_size=2, ppo_epochs=3, shuffle=True)
    minis = list(mini_batches(groups, cfg, seed=1))
    epochs = [sum(minis[i : i + 3], []) for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert minis == list(mini_batches(groups, cfg, seed=1))


@given(dp_size=st.integers(1, 6), mini=st.integers(1, 6), max_tokens=st.integers(30, 120), shuffle=st.booleans())
def test_plan_covers_each_mini_batch_with_equal_counts(dp_size, mini, max_tokens, shuffle):
    cfg = TrainRoleConfig(ppo_mini_batch_size=mini, ppo_epochs=2, shuffle=shuffle)
    batch, works = _plan(cfg, dp_size, max_tokens)
    expected = list(mini_batches(batch["group"], cfg, 5))
    assert all(len(work.steps) == len(expected) for work in works)
    for number, rows in enumerate(expected):
        micros = [work.micro_batches(work.steps[number]) for work in works]
        assert len({len(m) for m in micros}) == 1
        assert all(m.num_tokens <= max_tokens for own in micros for m in own)
        seen = torch.cat([m["sample_id"] for own in micros for m in own])
        assert sorted(seen.tolist()) == sorted(rows)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_shares_are_those_of_the_whole_mini_batch(dp_size):
    batch, works = _plan(TrainRoleConfig(ppo_mini_batch_size=3), dp_size)
    for number, rows in enumerate((range(6), range(6, 10))):
        mini = batch.select(rows)
        mini.update({"loss_weights": _weigh(mini["response_mask"], mini.cu_seqlens)})
        micros = [m for work in works for m in work.micro_batches(work.steps[number])]
        for row, micro_row, micro in ((int(s), i, m) for m in micros for i, s in enumerate(m["sample_id"])):
            got, want = micro.select([micro_row]), mini.select([row - rows[0]])
            assert torch.equal(got["loss_weights"], want["loss_weights"])
            assert torch.equal(got["token_ids"], want["token_ids"])


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=15), st.integers(1, 5))
def test_assemble_undoes_plan_infer_and_leaves_the_other_rows_out(sequences, dp_size):
    cu_seqlens = torch.tensor([0, *(length for length, _ in sequences)]).cumsum(0)
    batch = Batch(cu_seqlens, {"token_ids": torch.arange(int(cu_seqlens[-1]))})
    wanted = [row for row, (_, asked) in enumerate(sequences) if asked]
    works, rows = plan_infer(batch, ("token_ids",), wanted, dp_size=dp_size, max_tokens=25, key="key")
    assert len({len(work.micro_batches) for work in works}) == 1
    assert sorted(row for own in rows for row in own) == wanted
    parts = [work.rows["token_ids"].float() for work in works]
    asked = torch.tensor([asked for _, asked in sequences])[batch.row_of_token]
    assert torch.equal(assemble(batch, rows, parts), torch.where(asked, batch["token_ids"].float(), NOT_ASKED))


@given(mini=st.integers(1, 6), epochs=st.integers(1, 3), shuffle=st.booleans(), seed=st.integers(0, 9))
def test_on_policy_rows_are_those_of_the_first_update_that_no_later_one_trains(mini, epochs, shuffle, seed):
    cfg = TrainRoleConfig(ppo_mini_batch_size=mini, ppo_epochs=epochs, shuffle=shuffle)
    batch = ragged_batch().update({"sample_id": torch.arange(10)})
    works = plan_train(batch, cfg, _weigh, dp_size=2, max_tokens=60, key="key", seed=seed)
    updates = [
        {int(row) for work in works for micro in work.micro_batches(work.steps[i]) for row in micro["sample_id"]}
        for i in range(len(works[0].steps))
    ]
    expected = updates[0].difference(*updates[1:])
    assert on_policy_rows(batch["group"], cfg, seed) == sorted(expected)
    assert len(expected) == (min(2 * mini, 10) if epochs == 1 else 0)
