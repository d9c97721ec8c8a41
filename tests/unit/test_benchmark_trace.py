"""The account of a traced step adds up to its wall time."""

import json

from benchmarks import trace


def _event(cat: str, name: str, start: float, length: float, correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args}


def _tables(text: str) -> list[list[list[str]]]:
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in block[2:]] for block in blocks]


def test_device_work_belongs_to_the_phase_that_launched_it(tmp_path):
    events = [
        _event("user_annotation", trace.STEP, 0, 1000),
        _event("user_annotation", "rlpost.forward", 100, 200),
        _event("user_annotation", "rlpost.head", 200, 50),
        _event("user_annotation", "rlpost.backward", 300, 500),
        _event("cuda_runtime", "cudaLaunchKernel", 150, 5, 1),
        _event("cuda_runtime", "cudaLaunchKernel", 210, 5, 2),
        _event("cuda_driver", "cuLaunchKernelEx", 310, 5, 3),
        _event("cuda_runtime", "cudaDeviceSynchronize", 800, 190),
        _event("gpu_user_annotation", "rlpost.forward", 160, 300),  # the device's view of a phase is no work
        _event("kernel", "nvjet_gemm", 160, 240, 1),
        _event("kernel", "softmax_reduce", 400, 100, 2),
        _event("kernel", "flash_bwd", 600, 300, 3),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    text = trace.summarize(path)
    assert "device busy 64.0%, idle 36.0%" in text and "1 waits of the host, 0.2 ms" in text
    phases, kinds, kernels = _tables(text)
    spent = {name: (host, device, idle) for name, host, device, idle, _ in phases}
    assert spent["forward"] == ("0.15", "0.24", "0.16")
    assert spent["head"] == ("0.05", "0.1", "0")
    assert spent["backward"] == ("0.5", "0.3", "0.1")
    assert spent["(end)"] == ("0", "0", "0.1")
    assert sum(float(device) + float(idle) for _, device, idle in spent.values()) == 1.0
    assert [row[0] for row in kinds] == ["backward: attention", "forward: matrix product", "head: reduction"]
    assert kernels[0] == ["flash_bwd", "0.3", "1", "30.0%"]


def test_on_a_cpu_an_operator_counts_without_those_inside_it(tmp_path):
    events = [
        _event("user_annotation", trace.STEP, 0, 100),
        _event("cpu_op", "aten::linear", 10, 80),
        _event("cpu_op", "aten::mm", 20, 50),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    _, _, kernels = _tables(trace.summarize(path))
    assert [row[:3] for row in kernels] == [["aten::mm", "0.05", "1"], ["aten::linear", "0.03", "2"]]
