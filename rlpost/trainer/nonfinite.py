"""Numbers that are not finite, named before they are trained on: in a column of the batch, a loss or a gradient.

The engine's and the trainer's logprobs, rewards and advantages are looked at here and nowhere else, all of them,
whether or not the parity gate compares them. Losses and gradients are looked at where they arise, in
`TrainEngine.train_step`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlpost.batch import Batch
from rlpost.metrics import Metrics
from rlpost.trajectory import NOT_ASKED

# in the order in which they arise, so that the first one found is the cause of the others
CHECKED = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "returns", "advantages")


@dataclass(slots=True, frozen=True, kw_only=True)
class Fault:
    """Where the first number that is not finite was.

    Attributes:
        what: in words.
        column: of the batch, else None.
        role: whose update it was, else None.
        update: optimizer updates that the role had made in this step before.
    """

    what: str
    column: str | None = None
    role: str | None = None
    update: int = 0


class NonFinite(RuntimeError):
    """A number that is not finite would have been trained on."""

    def __init__(self, fault: Fault, message: str | None = None):
        super().__init__(message or fault.what)
        self.fault = fault


def require_finite(batch: Batch) -> None:
    """Look at every column that is trained on, at the response tokens.

    Raises:
        NonFinite: names the first column, and its first token.
    """
    fault = next(faults(batch), None)
    if fault is not None:
        raise NonFinite(fault)


def faults(batch: Batch) -> Iterator[Fault]:
    """One for each column that holds something not finite, in the order of `CHECKED`."""
    for column in CHECKED:
        if column in batch:
            bad = not_finite(batch, column).nonzero().flatten().tolist()
            if bad:
                first, total = bad[0], int(batch["response_mask"].sum())
                more = f", and {len(bad) - 1} more of {total} response tokens are not finite" if len(bad) > 1 else ""
                what = f"{column} is {float(batch[column][first])} at {name_token(batch, first)}{more}"
                yield Fault(what=what, column=column)


def not_finite(batch: Batch, column: str) -> Tensor:
    """bool `[N]`: response tokens whose number is none.

    Engine and trainer are asked for all logprobs of a sequence or for none: `NOT_ASKED` beside others is an overflow.
    """
    mask, values = batch["response_mask"], batch[column]
    good = values.isfinite()
    if column in ("rollout_logprobs", "old_logprobs"):
        rows = batch.row_of_token
        asked = torch.zeros(len(batch), dtype=torch.bool)
        asked[batch.rows_with(mask & (values != NOT_ASKED))] = True
        good = good | ((values == NOT_ASKED) & ~asked[rows])
    return mask & ~good


def name_token(batch: Batch, position: int) -> str:
    """`token 17 of sample 2 of group 40`, for a position in the batch; by its row where it does not say more."""
    row = int(batch.row_of_token[position])
    token = f"token {position - int(batch.cu_seqlens[row])}"
    if "group" not in batch or "sample_id" not in batch:
        return f"{token} of row {row}"
    return f"{token} of sample {int(batch['sample_id'][row])} of group {int(batch['group'][row])}"


def fault_of_update(role: str, metrics: Metrics) -> Fault | None:
    """What `WorkerGroup.train` reports of an update that was not made; None: all were made."""
    if f"{role}/skipped_updates" not in metrics or not metrics[f"{role}/skipped_updates"].value:
        return None
    update, losses = int(metrics[f"{role}/updates"].value), int(metrics[f"{role}/nonfinite_losses"].value)
    part = f"the loss of {losses} micro-batch{'es' * (losses > 1)}" if losses else "the gradient, though no loss,"
    what = f"{part} of the {role}'s update {update} of this step (from 0) is not finite"
    if f"{role}/loss_scale" in metrics:
        what += f". float16 ends at 65,504; {role}.dtype=bfloat16 has float32's range"
    return Fault(what=what, role=role, update=update)
