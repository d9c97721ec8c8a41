"""How much of the hardware is reached, and what runtimes take: the one place with numbers that were fitted."""

import dataclasses
from dataclasses import dataclass

from rlpost.tools.planning.hardware import GIB


@dataclass(slots=True, frozen=True, kw_only=True)
class Efficiency:
    """Constants of the model, each a key of the command. Where none is named, a value is an estimate.

    Fitted: the engine on one H200 with Qwen3-0.6B's shape and packs of 16k (126,000 tokens/s inferred, 37,000 trained,
    30,000 with gradient checkpointing), `benchmarks/results/2026-11-29-h200-first-light.md`.
    """

    # time
    matmul: float = 0.6  # of the peak that large matrix products reach
    bandwidth: float = 0.7  # of the peak that reading weights and KV cache reaches
    forward_traffic: float = 10.8  # bytes moved at peak bandwidth for each byte of activations kept; fitted
    backward_traffic: float = 30.0  # the same in the backward pass of a layer; fitted
    head_passes: float = 8.5  # passes over float32 logits, forward, and again backward; fitted
    collective: float = 0.7  # of a link's bandwidth that collectives reach; 326 of 450 GB/s measured on two H200
    update_s: float = 0.05  # of an optimizer update beside its memory traffic
    host_step_s: float = 0.003  # of the engine's host, a decoding step
    host_sequence_s: float = 2.2e-5  # and for each sequence; with `logprob_s` 30 ms at 1,024, measured with vLLM 0.24
    logprob_s: float = 0.8e-5  # for each of them whose logprobs are asked for
    layer_s: float = 2e-5  # of a layer's kernels in a decoding step, however little they do
    all_reduce_s: float = 1e-5  # of tensor parallelism, two a layer
    sync_s: float = 0.3  # of a weight sync, and
    sync_bytes_s: float = 4e9  # 3.7e9 measured by IPC and 3.8e9 by NCCL, 2026-11-30
    move_s: float = 1.3  # of a colocated step: sleep, wake and the caches they empty; measured beside 0.7 s of sync
    # memory
    allocator: float = 1.05  # reserved over used, of what comes and goes
    context_bytes: float = 1.0 * GIB  # of a process: CUDA or HIP context, communicators, libraries
    graph_bytes: float = 1.5 * GIB  # captured graphs of an engine
    grouped_attention: bool = False  # torch's varlen kernel takes key heads ungrouped: not in torch 2.11
    prefill_tokens: int = 8192  # of an engine's pass where rollout.max_num_batched_tokens does not say
    trainer_host_bytes: float = 3.0 * GIB  # of a trainer process
    engine_host_bytes: float = 5.0 * GIB  # of an engine with its processes
    driver_host_bytes: float = 6.0 * GIB  # driver, Ray, workflows, rewards


FIELDS = {field.name: field.type for field in dataclasses.fields(Efficiency)}
