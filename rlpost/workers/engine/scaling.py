"""Loss scaling, which keeps gradients within float16's range (Micikevicius et al. 2018, "Mixed Precision Training")."""

from typing import Any

import torch

from rlpost.metrics import Metric, Metrics, Reduce

INITIAL, MOST = 2.0**16, 2.0**24
GROWTH_INTERVAL = 2000  # updates in a row without an overflow, after which the scale doubles


class LossScaler:
    """The factor by which a loss, and so every gradient, is multiplied in a backward pass; a power of two.

    Each update ends with `settle`, after as many `shrink` as its gradient took to be finite.

    Args:
        scale: at the start.
        most: bound of what it grows to; 1: it never changes.

    Attributes:
        scale: of the next backward pass; at least 1.
        good_updates: made in a row since the scale last changed.
        retries: halvings for the update under way.
    """

    def __init__(self, scale: float = INITIAL, most: float = MOST):
        self.scale, self.most = scale, most
        self.good_updates = self.retries = 0

    @classmethod
    def of(cls, compute_dtype: torch.dtype) -> "LossScaler":
        """The scaler of passes in `compute_dtype`: of float16; any other has float32's range and a scale of 1."""
        return cls() if compute_dtype == torch.float16 else cls(1.0, 1.0)

    @property
    def is_fixed(self) -> bool:
        """Whether the scale is always 1."""
        return self.most == 1.0

    def shrink(self) -> bool:
        """Halve the scale because the gradient overflowed; False, and nothing done, where it is 1 already."""
        if self.scale <= 1.0:
            return False
        self.scale /= 2
        self.retries += 1
        return True

    def settle(self, made: bool) -> Metrics:
        """End an update; its scale and its retries as metrics, unless the scale is fixed.

        One that was not `made` was at fault itself, so that the scale goes back to what it was before.
        """
        metrics = {"loss_scale": Metric(self.scale), "scale_retries": Metric(float(self.retries), reduce=Reduce.SUM)}
        if not made:
            self.scale *= 2.0**self.retries
        self.good_updates = self.good_updates + 1 if made and not self.retries else int(made)
        self.retries = 0
        if self.good_updates >= GROWTH_INTERVAL:
            self.scale, self.good_updates = min(2 * self.scale, self.most), 0
        return {} if self.is_fixed else metrics

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with; empty where the scale is fixed."""
        return {} if self.is_fixed else {"scale": self.scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; an empty one, or that of another kind of scaler, leaves this one as it is."""
        if state and not self.is_fixed:
            self.scale, self.good_updates = state["scale"], state["good_updates"]
