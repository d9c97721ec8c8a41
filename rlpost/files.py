"""Files that must survive: written through to the disk, with digests that tell damage, and set aside rather than lost.

A full disk is named so.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

BLOCK_BYTES = 1 << 20
NUM_THREADS = 8
MAKE_ROOM = "Free some space and start the run again; it resumes from its last checkpoint"


class DiskFull(RuntimeError):
    """There is no room for what must be written."""


def write_synced(path: Path, content: bytes) -> None:
    """Write a whole file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """XXH3 of a file's bytes, 128 bits in hexadecimal: it tells damage, not forgery."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            state.update(block)
    return state.hexdigest()


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Digest of each named file below `folder`, by name; several files at once."""
    names = list(names)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: file_digest(folder / name), names), strict=True))


def set_aside(path: Path) -> None:
    """Rename a file or folder, if it is there, to `<name>.old`, in place of an earlier one."""
    if not path.exists():
        return
    old = path.with_name(f"{path.name}.old")
    if old.is_dir():
        shutil.rmtree(old)
    os.replace(path, old)


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is that of a disk without room or a quota that is used up.

    An error of another process may come as a text only.
    """
    texts = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]
    return any(
        getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(text in str(one) for text in texts)
        for one in chain(error)
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, what caused that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def below(folder: Path, name: str | Path, key: str) -> Path:
    """The path `name` means below `folder`. An absolute one, which the user chose in so many words, stays as it is.

    Raises:
        ValueError: a relative path that leads out of `folder`; `key` is what it was given for.
    """
    path = Path(os.path.normpath(folder / Path(name).expanduser()))
    if not Path(name).expanduser().is_absolute() and not path.is_relative_to(os.path.normpath(folder)):
        raise ValueError(f"{key}={name}: leads out of {folder}; give a path below it, or an absolute one")
    return path
