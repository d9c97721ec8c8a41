"""A *bucket*: a small dict that says which tensors lie where in a buffer. The bytes never pass through a message."""

import zlib
from typing import Any

import torch

ALIGNMENT_BYTES = 64
DIGEST_MASK = 2**63 - 1  # digests are told without their sign: -1 means something else

# names, shapes, dtypes, offsets; and where the bytes are: what `Buffer.where` of its transport says
Bucket = dict[str, Any]
Tensors = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype name), as in WeightManifest.tensors


def empty_bucket() -> Bucket:
    """A bucket without tensors."""
    return {"names": [], "shapes": [], "dtypes": [], "offsets": []}


def digest_of(name: str, data: torch.Tensor) -> torch.Tensor:
    """Checksum of one tensor's bytes (uint8 `[n]`), an int64 scalar on their device: nobody waits for it here.

    Sums of these over tensors (modulo 2^64) do not depend on their order.
    """
    whole = data.numel() // 8 * 8
    total = data[:whole].view(torch.int64).sum() + data[whole:].sum()
    return total * (zlib.crc32(name.encode()) | 1)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up, so that the next tensor is aligned for any dtype."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def num_bytes(shape: tuple[int, ...] | list[int], dtype: str) -> int:
    """Size of a tensor of this shape and dtype name."""
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize
