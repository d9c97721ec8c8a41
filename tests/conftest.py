"""What holds for every test: one thread a process, and no GPU tests without a GPU. And Ray, for those that ask."""

import os
import signal
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are tiny; more threads only compete
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the runs that they start would ignore Ctrl-C


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():  # true for ROCm as well
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """See `tests.tiny.local_ray`."""
    from tests import tiny  # Ray, torch and transformers take seconds to import, and most tests do without

    with tiny.local_ray():
        yield


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """See `tests.tiny.group_of_one`."""
    from tests import tiny

    with tiny.group_of_one():
        yield
