"""What training works on: `Batch` with its declared columns.

A `Batch` of B sequences holds every token column flat, `[N]`, over one shared `cu_seqlens [B + 1]`: no padding, no
separate prompt tensor. A value at position t always belongs to the token at position t (`old_logprobs[t]` is the
logprob *of* `token_ids[t]`); the shift by one happens inside the engine's logprob head and nowhere else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from rlpost.trajectory import Group, Provenance, Status


@dataclass(slots=True, frozen=True)
class Column:
    """A declared column: `per` is "token" (`[N]`) or "row" (`[B]`)."""

    per: str
    dtype: torch.dtype
    doc: str


COLUMNS: dict[str, Column] = {
    "token_ids": Column("token", torch.int64, "the sequence, prompt included"),
    "provenance": Column("token", torch.uint8, "Provenance of each token"),
    "response_mask": Column("token", torch.bool, "tokens that are trained: MODEL tokens of usable trajectories"),
    "rollout_logprobs": Column("token", torch.float32, "behaviour policy, as the engine reported, or NOT_ASKED"),
    "old_logprobs": Column(
        "token", torch.float32, "proximal policy: the trainer at the start of the step, or NOT_ASKED"
    ),
    "ref_logprobs": Column("token", torch.float32, "reference policy"),
    "logprobs": Column("token", torch.float32, "an inference pass of any role, before it gets its role's name"),
    "entropy": Column("token", torch.float32, "entropy of the current policy at each token, nats"),
    "values": Column("token", torch.float32, "critic's value before each token was chosen"),
    "rewards": Column("token", torch.float32, "scores, KL penalty included once the algorithm added it"),
    "advantages": Column("token", torch.float32, "advantage of each token"),
    "returns": Column("token", torch.float32, "value targets"),
    "versions": Column("token", torch.int32, "weight version that sampled each token, -1 elsewhere"),
    "loss_weights": Column("token", torch.float32, "share of each token in the mini-batch's loss"),
    "group": Column("row", torch.int64, "Group.index of the row"),
    "sample_id": Column("row", torch.int64, "index within the group"),
    "truncated": Column("row", torch.bool, "ended by the token limit"),
    "usable": Column("row", torch.bool, "False where scoring failed or the trajectory is partial"),
    "accuracy": Column("row", torch.float32, "the unshaped accuracy part of the reward; NaN where there is none"),
}


class NoColumn(KeyError):
    """A batch has no column `name`, only `columns`."""

    def __init__(self, name: str, columns: list[str]):
        super().__init__(name, columns)  # both: it must survive pickle, since it travels from ranks to the driver
        self.name, self.columns = name, columns

    def __str__(self) -> str:
        return f"batch has no column '{self.name}'; it has {sorted(self.columns)}"


class Batch:
    """B sequences with token columns `[N]` and row columns `[B]` (see `COLUMNS`).

    Two TensorDicts share `cu_seqlens` (int64 `[B + 1]`): `tokens` with batch size `[N]`, `rows` with `[B]`.
    `batch["name"]` reads a column of either; `update` adds columns after checking name, length and dtype.
    """

    def __init__(self, cu_seqlens: torch.Tensor, columns: dict[str, torch.Tensor] | None = None):
        self.cu_seqlens = cu_seqlens.to(torch.int64)
        self.tokens = TensorDict({}, batch_size=[int(self.cu_seqlens[-1])])
        self.rows = TensorDict({}, batch_size=[len(cu_seqlens) - 1])
        self.update(columns or {})

    def __len__(self) -> int:
        return self.rows.batch_size[0]

    @property
    def num_tokens(self) -> int:
        """N, all tokens of all sequences."""
        return self.tokens.batch_size[0]

    @property
    def seqlens(self) -> torch.Tensor:
        """`[B]` int64 length of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def row_of_token(self) -> torch.Tensor:
        """`[N]` int64 row that each token belongs to."""
        return torch.arange(len(self), device=self.cu_seqlens.device).repeat_interleave(self.seqlens)

    def rows_with(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 `[K]`, ascending: rows that hold a token of the mask `tokens` `[N]`."""
        found = torch.zeros(len(self), dtype=torch.bool, device=tokens.device)
        found[self.row_of_token[tokens]] = True
        return found.nonzero().flatten()

    def __contains__(self, name: str) -> bool:
        return name in self.tokens.keys() or name in self.rows.keys()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.tokens.keys():
            return self.tokens[name]
        if name in self.rows.keys():
            return self.rows[name]
        raise NoColumn(name, [*self.tokens.keys(), *self.rows.keys()])

    def columns(self) -> dict[str, torch.Tensor]:
        """Every column by name."""
        return {**dict(self.tokens.items()), **dict(self.rows.items())}

    def update(self, columns: "dict[str, torch.Tensor] | Batch") -> "Batch":
        """Add or replace columns; returns self.

        Raises:
            ValueError: a column that `COLUMNS` does not declare, or of another length than the batch.
        """
        for name, values in (columns.columns() if isinstance(columns, Batch) else columns).items():
            if name not in COLUMNS:
                raise ValueError(f"column '{name}' is not declared in rlpost.batch.COLUMNS")
            column = COLUMNS[name]
            target = self.tokens if column.per == "token" else self.rows
            if values.shape != target.batch_size:
                raise ValueError(f"column '{name}' has shape {list(values.shape)}, expected {list(target.batch_size)}")
            target[name] = values.to(column.dtype)
        return self

    def select(self, rows: Sequence[int] | torch.Tensor, names: Iterable[str] | None = None) -> "Batch":
        """The given rows in the given order, with the named columns (default: all)."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.seqlens[rows]
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        picked = Batch(cu_seqlens)
        wanted = None if names is None else set(names)
        tokens = self.tokens if wanted is None else self.tokens.select(*[k for k in self.tokens.keys() if k in wanted])
        table = self.rows if wanted is None else self.rows.select(*[k for k in self.rows.keys() if k in wanted])
        shift = self.cu_seqlens[:-1][rows] - cu_seqlens[:-1]
        picked.tokens = tokens[torch.arange(int(cu_seqlens[-1])) + shift.repeat_interleave(lengths)]
        picked.rows = table[rows]
        return picked

    @staticmethod
    def cat(parts: "Sequence[Batch]") -> "Batch":
        """Concatenate batches that hold the same columns."""
        lengths = torch.cat([part.seqlens for part in parts])
        whole = Batch(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        whole.tokens = torch.cat([part.tokens for part in parts])
        whole.rows = torch.cat([part.rows for part in parts])
        return whole

    def to(self, device: torch.device | str) -> "Batch":
        """A copy on `device`."""
        moved = Batch(self.cu_seqlens)  # it counts its tokens: to read that from a GPU would wait for the GPU
        moved.cu_seqlens = send(self.cu_seqlens, device)
        return moved.update({name: send(values, device) for name, values in self.columns().items()})


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy on `device`; from the host to a GPU through pinned memory, which waits for nothing."""
    if torch.device(device).type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def collate(groups: Sequence[Group], n: int) -> Batch:
    """Stack the trajectories of complete groups, group by group, into one `Batch`.

    Args:
        groups: each with exactly `n` trajectories.
        n: samples a prompt (`rollout.n`).

    Raises:
        ValueError: a partial group, named by its id.
    """
    for group in groups:
        if len(group.trajectories) != n:
            raise ValueError(f"group '{group.id}' has {len(group.trajectories)} trajectories, rollout.n is {n}")
    pairs = [(group, t) for group in groups for t in group.trajectories]
    lengths = torch.tensor([len(t.token_ids) for _, t in pairs], dtype=torch.int64)
    batch = Batch(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    def tokens(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(t, name) for _, t in pairs]))

    usable = torch.tensor([t.status in (Status.STOP, Status.LENGTH) for _, t in pairs])
    provenance = tokens("provenance")
    return batch.update(
        {name: tokens(name) for name in ("token_ids", "rollout_logprobs", "versions", "rewards")}
        | {
            "provenance": provenance,
            "response_mask": (provenance == Provenance.MODEL) & usable.repeat_interleave(lengths),
            "group": torch.tensor([group.index for group, _ in pairs]),
            "sample_id": torch.tensor([t.sample_id for _, t in pairs]),
            "truncated": torch.tensor([t.status == Status.LENGTH for _, t in pairs]),
            "usable": usable,
            "accuracy": torch.tensor([t.reward_parts.get("accuracy", float("nan")) for _, t in pairs]),
        }
    )
