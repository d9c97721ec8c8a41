"""Checks of devices and programs on what a CPU machine has, and their judgement on planted faults."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rlpost.hazards import Action, Findings, Hazard
from rlpost.platform import Platform
from rlpost.tools.checks import devices, exchange, programs
from rlpost.tools.checks.base import GIB, Options, Status
from rlpost.visibility import Visibility


def test_gpu_that_torch_does_not_see_fails(monkeypatch):
    monkeypatch.setattr(devices, "platform", lambda: Platform("cpu"))
    monkeypatch.setattr(devices, "gpu_drivers", lambda: [])
    assert devices.devices(Options()).status is Status.PASS
    monkeypatch.setattr(devices, "gpu_drivers", lambda: ["/dev/kfd"])
    finding = devices.devices(Options())
    assert finding.status is Status.FAIL and "/dev/kfd is there" in finding.found


def test_contradicting_visibility_fails_with_the_resolvers_words(monkeypatch):
    def refuse():
        raise ValueError("ROCR_VISIBLE_DEVICES=1 and HIP_VISIBLE_DEVICES=1 contradict each other")

    monkeypatch.setattr(devices, "adopt_visibility", refuse)
    finding = devices.visibility(Options())
    assert finding.status is Status.FAIL and "contradict each other" in finding.found
    monkeypatch.setattr(devices, "adopt_visibility", lambda: Visibility("cuda", ()))
    assert devices.visibility(Options()).status is Status.PASS


def hazards(monkeypatch, **parts):
    row = Hazard(name="row", applies=bool, why="w", action=Action.AVOIDED, fix="f", source="s")
    nothing = {"rows": (row,), "env": {}, "families": frozenset(), "warnings": (), "refusals": ()}
    monkeypatch.setattr(devices, "platform", lambda: Platform("rocm", "gfx942", (7, 2), True))
    monkeypatch.setattr(devices, "examine", lambda situation: Findings(**nothing | parts))
    return devices.rocm_hazards(Options())


def test_hazards_fail_warn_or_are_taken_care_of(monkeypatch):
    finding = hazards(monkeypatch)
    assert finding.status is Status.PASS and "gfx942, ROCm 7.2; taken care of: row" in finding.found
    assert hazards(monkeypatch, warnings=("careful",)).status is Status.WARN
    finding = hazards(monkeypatch, warnings=("careful",), refusals=("no",))
    assert finding.status is Status.FAIL and finding.found == "no"


def attention(*, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    assert causal and cu_seqlens_q.equal(cu_seqlens_k) and max_seqlen_q == max_seqlen_k == 128
    out = torch.zeros_like(q)
    for a, b in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[a:b].float()) / q.shape[-1] ** 0.5
        scores += torch.full_like(scores[0], -torch.inf).triu(1)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[a:b].float()).to(q.dtype)
    return out


def rms_norm(x, weight, epsilon):
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


@pytest.mark.parametrize(
    ("faults", "wrong"),
    [
        ({}, []),
        ({"rms_norm": lambda x, w, e: 1.1 * rms_norm(x, w, e)}, ["rmsnorm"]),
        ({"flash_attn_varlen_func": lambda q, **rest: q * torch.nan}, ["attention"]),
    ],
    ids=["right", "rmsnorm", "attention"],
)
def test_kernels_that_compute_otherwise_than_torch_are_named(faults, wrong):
    kernels = SimpleNamespace(**{"rms_norm": rms_norm, "flash_attn_varlen_func": attention} | faults)
    finding = devices.judge_aiter(devices.aiter_differences(kernels, torch.device("cpu")))
    assert finding.status is (Status.FAIL if wrong else Status.PASS), finding.found
    assert all(f"AITER's {family} kernels" in finding.fix for family in wrong)


def test_weights_and_sums_are_exchanged_between_processes():
    finding = exchange.ipc(Options())
    assert finding.status is Status.PASS and "digests agree" in finding.found
    finding = exchange.collective(Options())
    assert finding.status is Status.PASS and "2 ranks" in finding.found


@pytest.mark.parametrize(
    ("freed", "same", "status", "part"),
    [
        (38, True, Status.PASS, "gave 38.0 GiB back"),
        (2, True, Status.FAIL, "rollout.free_cache_engine=false"),
        (38, False, Status.FAIL, "answers otherwise"),
    ],
)
def test_sleep_must_free_memory_and_change_nothing(freed, same, status, part):
    finding = programs.judge_sleep("vllm", took=40 * GIB, freed=freed * GIB, same=same)
    assert finding.status is status and part in f"{finding.found} {finding.fix}"
