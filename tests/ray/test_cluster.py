"""The Ray that a run starts for itself: who may use it, and how its processes run."""

import os
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


def test_processes_of_a_run_give_way_to_no_other_and_report_to_nobody(address):
    @ray.remote
    def process():
        return os.nice(0), exported()["RAY_USAGE_STATS_ENABLED"]

    assert ray.get(process.remote()) == (os.nice(0), "0")
    assert "RAY_worker_niceness" not in exported()
