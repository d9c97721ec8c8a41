"""Addition of two numbers: a task that a tiny character-level model learns within minutes."""

import hashlib
import random
from typing import Any

HELD_OUT_ONE_IN = 10  # one pair in ten belongs to the validation split


def problems(digits: int = 2, size: int = 1000, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """`size` distinct problems such as `12+34=` with ground truth `46`, the same ones for the same arguments.

    Whether a pair is held out is decided by a hash of the unordered pair, so that `34+12=` is not a training problem
    when `12+34=` is a validation problem, whatever the seeds.

    Args:
        digits: of each operand, without leading zeros.
        split: "train" or "val".

    Raises:
        ValueError: another split, or more problems than there are.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split={split}: expected train or val")
    if digits < 1 or size < 1:
        raise ValueError(f"digits={digits}, size={size}: both must be >= 1")
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    draw = random.Random(seed)
    pairs: dict[tuple[int, int], None] = {}  # keeps its order
    for _ in range(20 * (high - low + 1) ** 2):  # enough to meet every pair of a small range
        if len(pairs) == size:
            break
        pair = (draw.randint(low, high), draw.randint(low, high))
        if _held_out(*pair) == (split == "val"):
            pairs[pair] = None
    if len(pairs) < size:
        raise ValueError(f"size={size}: there are only {len(pairs)} {split} problems of {digits} digits")
    return [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "addition"} for a, b in pairs]


def _held_out(a: int, b: int) -> bool:
    pair = f"{min(a, b)}+{max(a, b)}".encode()
    return int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest()) % HELD_OUT_ONE_IN == 0
