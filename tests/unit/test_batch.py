import pickle

import numpy as np
import pytest
import torch

from rlpost.batch import Batch, collate
from rlpost.trajectory import Group, Prompt, Provenance, Status, Trajectory


def trajectory(prompt_length, response_length, sample_id=0, status=Status.STOP, accuracy=None, version=3):
    total = prompt_length + response_length
    model = np.arange(total) >= prompt_length
    return Trajectory(
        token_ids=np.arange(total) + 10 * sample_id,
        provenance=np.where(model, Provenance.MODEL, Provenance.TEMPLATE).astype(np.uint8),
        rollout_logprobs=np.where(model, -0.5, 0.0).astype(np.float32),
        versions=np.where(model, version, -1).astype(np.int32),
        rewards=np.zeros(total, np.float32),
        status=status,
        sample_id=sample_id,
        reward_parts={} if accuracy is None else {"accuracy": accuracy},
    )


def group(index, trajectories):
    prompt = Prompt(id=f"p{index}", index=index, token_ids=np.arange(2), text="", data_source="d")
    return Group(id=prompt.id, index=index, data_source="d", prompt=prompt, trajectories=trajectories)


def test_collate_flattens_ragged_groups_over_one_cu_seqlens():
    batch = collate(
        [group(7, [trajectory(2, 1), trajectory(2, 3, 1)]), group(8, [trajectory(1, 1), trajectory(1, 2, 1)])], n=2
    )
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 10, 13]
    assert batch["group"].tolist() == [7, 7, 8, 8]
    assert batch["sample_id"].tolist() == [0, 1, 0, 1]
    assert batch["response_mask"].tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1]
    assert (
        batch["versions"][batch["response_mask"]].eq(3).all()
        and batch["versions"][~batch["response_mask"]].eq(-1).all()
    )


def test_collate_masks_failed_and_partial_trajectories_but_keeps_their_rows():
    batch = collate(
        [group(0, [trajectory(1, 2, status=Status.REWARD_ERROR), trajectory(1, 2, 1, Status.LENGTH, accuracy=1.0)])],
        n=2,
    )
    assert batch["response_mask"].tolist() == [False, False, False, False, True, True]
    assert batch["usable"].tolist() == [False, True]
    assert batch["truncated"].tolist() == [False, True]
    assert batch["accuracy"].isnan().tolist() == [True, False]


def test_collate_refuses_a_partial_group_by_name():
    with pytest.raises(ValueError, match="group 'p5' has 1 trajectories, rollout.n is 2"):
        collate([group(5, [trajectory(1, 1)])], n=2)


def test_trajectory_refuses_columns_of_different_lengths():
    with pytest.raises(AssertionError, match="differ in length"):
        Trajectory(
            token_ids=np.zeros(3, np.int64),
            provenance=np.zeros(2, np.uint8),
            rollout_logprobs=np.zeros(3, np.float32),
            versions=np.zeros(3, np.int32),
            rewards=np.zeros(3, np.float32),
            status=Status.STOP,
        )


def test_select_reorders_rows_and_cat_undoes_a_split():
    batch = collate([group(i, [trajectory(1, i + 1), trajectory(2, 2, 1)]) for i in range(3)], n=2)
    picked = batch.select([5, 0, 0])
    assert picked.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert picked["token_ids"].tolist() == [10, 11, 12, 13, 0, 1, 0, 1]
    halves = [batch.select(range(0, 4)), batch.select(range(4, 6))]
    whole = Batch.cat(halves)
    for name, values in batch.columns().items():
        assert torch.equal(whole[name].nan_to_num(-7), values.nan_to_num(-7)), name
    assert len(batch.select([])) == 0 and batch.select([]).num_tokens == 0


def test_batch_survives_pickling():
    batch = collate([group(0, [trajectory(1, 2), trajectory(1, 2, 1)])], n=2)
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again["token_ids"], batch["token_ids"]) and torch.equal(again.cu_seqlens, batch.cu_seqlens)


def test_update_refuses_undeclared_columns_and_wrong_lengths():
    batch = Batch(torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match="'surprise' is not declared"):
        batch.update({"surprise": torch.zeros(5)})
    with pytest.raises(ValueError, match="'advantages' has shape \\[2\\], expected \\[5\\]"):
        batch.update({"advantages": torch.zeros(2)})
    with pytest.raises(KeyError, match="no column 'values'"):
        batch["values"]
    batch.update({"advantages": torch.zeros(5, dtype=torch.float64), "usable": torch.ones(2)})
    assert batch["advantages"].dtype == torch.float32 and batch["usable"].dtype == torch.bool
