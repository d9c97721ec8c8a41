"""The Ray that a run starts for itself takes no orders from whoever reaches its ports."""

import subprocess
import sys

import pytest
import ray

from rlpost.host import exported
from rlpost.trainer.build import start_ray
from rlpost.trainer.config import ClusterConfig

JOIN = "import sys, ray; ray.init(address=sys.argv[1])"


@pytest.fixture
def address():
    stop = start_ray(ClusterConfig())
    yield ray.get_runtime_context().gcs_address
    stop()


def test_cluster_that_a_run_starts_refuses_who_has_no_token(address):
    environment = dict(exported()) | {"RAY_AUTH_MODE": "disabled"}
    stranger = subprocess.Popen(
        [sys.executable, "-c", JOIN, address],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = next(line for line in stranger.stderr if "Unauthenticated" in line or "Connected" in line)
        assert "Authentication token is missing or incorrect" in said
    finally:
        stranger.kill()
        stranger.communicate()
