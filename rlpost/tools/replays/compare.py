"""How far two gradients of the same step are apart, parameter by parameter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

WHOLE = "all parameters"


@dataclass(slots=True, frozen=True)
class Difference:
    """Of one parameter's gradient `a` from another, `b`.

    Attributes:
        name: of the parameter.
        relative: |a - b| / |b|, Euclidean norms; 0 where both are 0.
        cosine: of the angle between them; 1 where both are 0.
        norm, other_norm: |a| and |b|.
    """

    name: str
    relative: float
    cosine: float
    norm: float
    other_norm: float


def compare(gradients: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[Difference]:
    """The whole gradient first, then its parameters, the most different first.

    Raises:
        ValueError: they are not gradients of the same parameters.
    """
    odd = sorted(gradients.keys() ^ others.keys())
    if odd:
        raise ValueError(
            f"{len(odd)} parameters have a gradient on one side only, such as {odd[0]}: not the same step?"
        )
    # |a|^2, |b|^2, a.b and |a - b|^2, of which those of the whole are the sums
    products = {name: _products(gradients[name], others[name]) for name in gradients}
    parameters = [_difference(name, *of_one) for name, of_one in products.items()]
    whole = _difference(WHOLE, *(sum(column) for column in zip(*products.values(), strict=True)))
    return [whole, *sorted(parameters, key=lambda d: -d.relative if math.isfinite(d.relative) else -math.inf)]


def _products(a: Tensor, b: Tensor) -> tuple[float, float, float, float]:
    a, b = a.flatten().double(), b.flatten().double()
    return float(a @ a), float(b @ b), float(a @ b), float((a - b).square().sum())


def _difference(name: str, aa: float, bb: float, ab: float, apart: float) -> Difference:
    norm, other_norm = math.sqrt(aa), math.sqrt(bb)
    if not aa and not bb:
        return Difference(name, 0.0, 1.0, 0.0, 0.0)
    relative = math.sqrt(apart) / other_norm if other_norm else math.inf
    return Difference(name, relative, ab / (norm * other_norm) if norm and other_norm else 0.0, norm, other_norm)
