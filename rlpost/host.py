"""What a process asks its host, devices aside (those are `platform.py`'s)."""

import gc
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def exported() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


@contextmanager
def exported_while(**variables: str) -> Iterator[None]:
    """Set variables of this process while something reads them that has no other switch."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cpu_count() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def host_address() -> str:
    """An address of this host that other ranks reach."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # documentation range: only picks the route, sends nothing
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def host_id() -> str:
    """Equal in processes that can open each other's memory: those of one host and one container."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def settle() -> None:
    """To be called once a process has started: what lives now will stay.

    The garbage collector would look at all of it, millions of objects of torch and transformers, whenever many messages
    have come: a quarter of a second each time.
    """
    gc.collect()
    gc.freeze()
