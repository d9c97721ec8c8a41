"""The training engine on GPUs: kernels, NCCL, offload."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "workers"))
from ranks import Case, CustomLoss, in_ranks, infer, policy_loss, ragged_batch, run_cases, train, write_model

from rlpost.workers.config import FSDPConfig
from rlpost.workers.engine.attention import KERNELS, Packing
from rlpost.workers.engine.head import token_logprobs
from rlpost.workers.model_worker import ModelWorker

pytestmark = pytest.mark.gpu
OFFLOAD = FSDPConfig(param_offload=True, optimizer_offload=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(path, tmp_path_factory):
    return in_ranks(1, run_cases, {"alone": Case(str(path), critic=True)}, tmp_path_factory.mktemp("alone"), gpus=True)[
        "alone"
    ]


@pytest.mark.parametrize("window", [None, 7])
def test_varlen_kernel_equals_sdpa_forward_and_backward(window):
    seqlens = (33, 1, 64, 17)
    packing = Packing(torch.tensor([0, *seqlens]).cumsum(0).int().cuda(), max(seqlens))
    torch.manual_seed(0)
    inputs = [torch.randn(sum(seqlens), heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    results = []
    for kernel in ("varlen", "sdpa"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = KERNELS[kernel](*leaves, packing, 0.125, window)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def _bf16_and_offload(worker: ModelWorker, path: str) -> dict:
    """Train in bfloat16 with varlen attention; again with everything sent to the host and back in between."""
    found: dict = {}
    for name, fsdp in (("stay", FSDPConfig()), ("move", OFFLOAD)):
        common = {"dtype": "bfloat16", "fsdp": fsdp}
        worker.build(Case(path, model={"enable_gradient_checkpointing": True}, actor=common).setup())
        batch, loss = ragged_batch(), CustomLoss(policy_loss)
        train(worker, "actor", batch, loss)
        resident = torch.cuda.memory_allocated()
        worker.offload(False, True)
        worker.offload(True, True)
        found[f"{name}_freed"] = resident - torch.cuda.memory_allocated()
        found[f"{name}_pushed"] = {n: w.cpu() for n, w in worker.engines["actor"].named_weights(torch.bfloat16)}
        worker.reload()
        train(worker, "actor", batch, loss)
        found[name] = infer(worker, "actor", batch)
    return found


def test_offload_frees_memory_and_changes_nothing(path, tmp_path):
    found = in_ranks(1, _bf16_and_offload, str(path), tmp_path, gpus=True)
    assert found["stay_freed"] == 0 and found["move_freed"] > 0
    assert torch.equal(found["move"], found["stay"])
    assert all(torch.equal(w, found["move_pushed"][n]) for n, w in found["stay_pushed"].items())


def test_gpu_update_equals_the_cpus(alone, path, tmp_path):
    cpu = in_ranks(1, run_cases, {"alone": Case(str(path), critic=True)}, tmp_path)["alone"]
    _assert_close(alone, cpu)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_update_is_the_same_on_two_gpus(alone, path, tmp_path):
    cases = {"data": Case(str(path), critic=True), "sequence": Case(str(path), sequence=2, critic=True)}
    for result in in_ranks(2, run_cases, cases, tmp_path, gpus=True).values():
        _assert_close(result, alone)


def _assert_close(result: dict, expected: dict) -> None:
    for role in ("actor", "critic"):
        torch.testing.assert_close(result[f"{role}_after"], expected[f"{role}_after"], rtol=1e-4, atol=1e-4)
        for name, want in expected[f"{role}_gradients"].items():
            got = result[f"{role}_gradients"][name]
            assert (got - want).norm() <= 1e-4 * want.norm() + 1e-8, name


def _compiled_and_not(worker: ModelWorker, arguments: tuple[str, str]) -> dict:
    """Two updates in 16 bits with and without torch.compile, whose second pack has other lengths."""
    found: dict = {}
    path, dtype = arguments
    for setting in ("off", "on"):
        worker.build(Case(path, model={"compile": setting}, actor={"dtype": dtype}).setup())
        batch, loss = ragged_batch(), CustomLoss(policy_loss)
        found[setting] = {"before": infer(worker, "actor", batch), "metrics": train(worker, "actor", batch, loss)}
        found[setting]["after"] = infer(worker, "actor", batch)
    return found


@pytest.mark.parametrize("dtype,mean", [("bfloat16", 0.03), ("float16", 0.006)])
def test_compiled_update_equals_the_eager_one(path, tmp_path, dtype, mean):
    found = in_ranks(1, _compiled_and_not, (str(path), dtype), tmp_path, gpus=True)
    for when in ("before", "after"):
        difference = (found["on"][when] - found["off"][when]).abs()
        assert difference.mean() < mean and difference.max() < 10 * mean, when
    norms = [found[setting]["metrics"]["grad_norm"] for setting in ("on", "off")]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compile", [False, True])
def test_head_in_16_bits_rounds_inputs_only(compile, half):
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(n, 64, device="cuda", generator=generator).to(half) for n in (300, 1000)]
    rows, targets = torch.arange(0, 300, 2, device="cuda"), torch.arange(150, device="cuda") * 6
    results = []
    for dtype in (half, torch.float64):
        hidden, weight = (x.to(dtype).requires_grad_() for x in tensors)
        if dtype == torch.float64:
            log_p = (hidden[rows] @ weight[:990].T / 0.7).log_softmax(-1)
            logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        else:
            logprobs, entropy = token_logprobs(
                hidden, weight, None, rows, targets, temperature=0.7, vocab_size=990, entropy=True, compile=compile,
                chunk_bytes=4 * 1000 * 64,
            )  # fmt: skip
        gradients = torch.autograd.grad((logprobs + 0.1 * entropy).sum(), (hidden, weight))
        results.append([logprobs, entropy, *gradients])
    (got, got_entropy, *got_gradients), (want, want_entropy, *want_gradients) = results
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_entropy.double(), want_entropy, rtol=1e-3, atol=1e-3)
    for one, other in zip(got_gradients, want_gradients, strict=True):
        assert (one.double() - other).norm() < 0.01 * other.norm()
