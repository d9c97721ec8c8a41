"""The driver's view of its host, on a machine that is told to be another."""

import os

import pytest
import torch

from rlpost import platform as module
from rlpost.platform import Platform, adopt_visibility, limit_threads
from rlpost.rocm import Gpu

MI300X = [Gpu("gfx942", f"GPU-{i:016x}", 192 << 30) for i in range(4)]
MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture
def host(monkeypatch):
    """A ROCm host with these GPUs and this environment."""

    def host(gpus=MI300X, kind="rocm", **env):
        for name in MASKS:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(module, "platform", lambda: Platform(kind, "gfx942", (7, 2)))
        monkeypatch.setattr(module, "list_gpus", lambda: gpus)
        return adopt_visibility()

    return host


def masks():
    return {name: os.environ[name] for name in MASKS if name in os.environ}


def test_driver_takes_on_what_its_children_are_to_see(host):
    assert [d.physical for d in host(HIP_VISIBLE_DEVICES=f"{MI300X[2].uuid},1").devices] == [2, 1]
    assert masks() == {"HIP_VISIBLE_DEVICES": "2,1", "CUDA_VISIBLE_DEVICES": "2,1"}


def test_driver_replaces_rocrs_mask_by_hips(host):
    host(ROCR_VISIBLE_DEVICES="2,3")
    assert masks() == {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert [d.physical for d in adopt_visibility().devices] == [2, 3]  # once more, as in each job of a sweep


def test_refusal_changes_nothing(host):
    with pytest.raises(ValueError, match="contradict"):
        host(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="0")
    assert masks() == {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0"}


def test_visible_gpu_that_is_not_supported_is_refused_and_a_hidden_one_is_not(host):
    gpus = [*MI300X[:1], Gpu("gfx1100", "GPU-1", 24 << 30)]
    with pytest.raises(ValueError, match="GPU 1 is gfx1100"):
        host(gpus)
    assert len(host(gpus, HIP_VISIBLE_DEVICES="0").devices) == 1


def test_cuda_and_cpu_hosts_keep_their_environment(host):
    host(kind="cuda", CUDA_VISIBLE_DEVICES="1")
    assert masks() == {"CUDA_VISIBLE_DEVICES": "1"}
    assert host(kind="cpu").devices == ()


def test_rocm_needs_variables_in_every_process_and_others_do_not():
    assert Platform("rocm", "gfx942", (7, 2)).process_env({})["HSA_ENABLE_IPC_MODE_LEGACY"] == "1"
    assert Platform("cuda").process_env({}) == Platform("cpu").process_env({}) == {}


@pytest.fixture
def threads():
    """Restores how many torch may use."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "limit"), [(2, 2), (4, 4), (9, 4)])
def test_driver_computes_with_few_threads(monkeypatch, threads, cores, limit):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(cores)
    limit_threads()
    assert torch.get_num_threads() == limit
    assert "OMP_NUM_THREADS" not in os.environ  # of its children


def test_driver_computes_with_as_many_threads_as_the_user_says(monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    torch.set_num_threads(9)
    limit_threads()
    assert torch.get_num_threads() == 9
