"""Landlock: which files a process may still open (Linux 5.13, https://docs.kernel.org/userspace-api/landlock.html)."""

import ctypes
import os
from collections.abc import Sequence
from enum import IntFlag

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ASK_VERSION, _PATH_BENEATH = 1, 1
_BIND_AND_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS = 0b11, 0b11


class Access(IntFlag):
    """What a rule may allow; the bits of `struct landlock_path_beneath_attr`."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13  # version 2: rename between folders
    TRUNCATE = 1 << 14  # version 3
    IOCTL_DEV = 1 << 15  # version 5


_READ_FILE = Access.READ_FILE
_READ = Access.READ_FILE | Access.READ_DIR
_CHANGE = Access.WRITE_FILE | Access.REMOVE_DIR | Access.REMOVE_FILE | Access.MAKE_DIR | Access.MAKE_REG
_OWN = _READ | _CHANGE | Access.MAKE_SYM | Access.REFER | Access.TRUNCATE


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def version(libc: ctypes.CDLL) -> int:
    """Version of the kernel's Landlock; 0 where it is missing or switched off."""
    return max(0, libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION))


def restrict(libc: ctypes.CDLL, readable: Sequence[str], folder: str) -> None:
    """From now on this process opens nothing but what lies in `readable`, and may change only what lies in `folder`.

    Paths that do not exist are skipped. `no_new_privs` must be set.

    Raises:
        OSError: the kernel refused.
    """
    abi = version(libc)
    handled = Access((1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1)
    ruleset = _Ruleset(
        files=handled,
        network=_BIND_AND_CONNECT_TCP if abi >= 4 else 0,
        scoped=_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0,
    )
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    fd = _call(libc, _CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    for path in readable:
        _allow(libc, fd, path, _READ if os.path.isdir(path) else _READ_FILE)
    _allow(libc, fd, "/dev/null", Access.READ_FILE | Access.WRITE_FILE)
    _allow(libc, fd, folder, _OWN & handled)
    _call(libc, _RESTRICT_SELF, fd, 0)
    os.close(fd)


def _allow(libc: ctypes.CDLL, ruleset_fd: int, path: str, access: Access) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = _PathBeneath(allowed=access, parent_fd=parent)
    _call(libc, _ADD_RULE, ruleset_fd, _PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(parent)


def _call(libc: ctypes.CDLL, number: int, *args: object) -> int:
    result = libc.syscall(number, *args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: system call {number}: {os.strerror(error)}")
    return result
