"""One tiny checkpoint for all whole runs."""

from pathlib import Path

import pytest

from tests.e2e.runs import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `write_checkpoint`."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
