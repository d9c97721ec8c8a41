"""A *bucket*: a small dict that says which tensors lie where in a buffer. The bytes never pass through a message."""

import zlib
from typing import Any

import torch

ALIGNMENT_BYTES = 64
DIGEST_MASK = 2**63 - 1  # digests are told without their sign: -1 means something else

# names, shapes, dtypes, offsets; `used`: bytes up to the end of the last one; where the bytes are, which `Buffer.where`
# of its transport says; and of "ipc" `reader`: by device uuid, which of the handles there is this engine's (first: 0)
Bucket = dict[str, Any]
Tensors = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype name), as in WeightManifest.tensors


def empty_bucket() -> Bucket:
    """A bucket without tensors."""
    return {"names": [], "shapes": [], "dtypes": [], "offsets": []}


def digest_of(names: list[str], data: torch.Tensor) -> torch.Tensor:
    """Checksum of a bucket: which tensors, and its bytes (uint8 `[n]`, n a multiple of `ALIGNMENT_BYTES`) in order.

    An int64 scalar on the bytes' device: nobody waits for it here. Those of an update are added, modulo 2^64.
    """
    lines = data.view(torch.int64).view(-1, ALIGNMENT_BYTES // 8).sum(1)
    places = torch.arange(1, 2 * len(lines), 2, device=data.device)
    return (lines * places).sum() * (zlib.crc32("\n".join(names).encode()) | 1)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up, so that the next tensor is aligned for any dtype."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def num_bytes(shape: tuple[int, ...] | list[int], dtype: str) -> int:
    """Size of a tensor of this shape and dtype name."""
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize
