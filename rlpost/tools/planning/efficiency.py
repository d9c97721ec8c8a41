"""How much of the hardware is reached, and what runtimes take: the one place with numbers that were fitted."""

import dataclasses
from dataclasses import dataclass

from rlpost.tools.planning.hardware import GIB
from rlpost.workers.engine.head import CHUNK_BYTES


@dataclass(slots=True, frozen=True, kw_only=True)
class Efficiency:
    """Constants of the model, each a key of the command. Where none is named, a value is an estimate.

    [engine]: fitted to `python -m benchmarks.train_step` on one H200 with torch 2.11: Qwen3-1.7B's shape in packs of
    16,384 tokens and SmolLM2-135M in packs of 32,768, compiled and not; docs/tools.md has the seconds and bytes. What
    these leave open is set: `matmul`, `head_passes` and `update_s`.
    [two]: fitted to colocated steps of Qwen3-1.7B on two H200. [one]: to those of Qwen3-0.6B and 1.7B on one, with
    vLLM 0.24; [trace]: a decoding step's there (benchmarks/results/2026-11-30-h200-side-by-side.md).
    """

    # time
    matmul: float = 0.8  # of the peak that large matrix products reach; 790 TFLOP/s of an H200
    bandwidth: float = 0.75  # of the peak that reading weights and KV cache reaches; 3.6 of 4.8 TB/s [trace]
    forward_traffic: float = 9.4  # bytes moved at peak bandwidth for each byte of activations, not compiled [engine]
    backward_traffic: float = 22.0  # the same in the backward pass of a layer [engine]
    head_passes: float = 4.0  # passes over float32 logits, forward, and again backward
    compiled_forward: float = 0.58  # of that traffic and those passes, where layers and head are compiled [engine]
    compiled_backward: float = 0.38  # the same backward [engine]
    sharded: float = 0.9  # of one rank's speed that ranks reach which gather each other's weights; 0.91 measured [two]
    shared_card: float = 0.74  # of its speed that a card reaches whose engines take turns on it [one]
    collective: float = 0.7  # of a link's bandwidth that collectives reach; 326 of 450 GB/s measured on two H200
    update_s: float = 0.02  # of an optimizer update beside its memory traffic
    host_step_s: float = 0.003  # of the engine's host, a decoding step
    host_sequence_s: float = 1.7e-5  # and for each sequence; 20.5 ms at 1,024 measured with vLLM 0.24 and SmolLM2
    logprob_s: float = 2.4e-5  # for each whose logprobs are asked for; of all 1,024: 44.8 ms a step in place of 20.5
    layer_s: float = 2e-5  # of a layer's kernels in a decoding step, however little they do
    logit_bytes: float = 31  # moved for each logit until a token is sampled from them [trace]
    all_reduce_s: float = 1e-5  # of tensor parallelism, two a layer
    sync_s: float = 0.07  # of a weight sync, and
    sync_bytes_s: float = 100e9  # by IPC, 0.08 to 0.10 s for 3.44e9 bytes [one]; by NCCL not measured anew
    move_s: float = 0.4  # of a colocated step: sleep, wake and the caches they empty [one]
    # memory
    allocator: float = 1.24  # reserved over used, of what comes and goes [engine, one]
    context_bytes: float = 1.0 * GIB  # of a process: CUDA or HIP context, communicators, libraries
    graph_bytes: float = 1.5 * GIB  # captured graphs of an engine
    compiled_kept: float = 0.58  # of what a layer keeps for its backward pass, where it is compiled [engine]
    chunk_bytes: int = CHUNK_BYTES["cuda"]  # of the logprob head's logits at a time
    prefill_tokens: int = 16384  # of an engine's pass where rollout.max_num_batched_tokens does not say
    trainer_host_bytes: float = 3.0 * GIB  # of a trainer process
    engine_host_bytes: float = 5.0 * GIB  # of an engine with its processes
    driver_host_bytes: float = 6.0 * GIB  # driver, Ray, workflows, rewards


# rates: what they are a share of, or go through, is divided by them
DIVISORS = frozenset({"matmul", "bandwidth", "sharded", "shared_card", "collective", "sync_bytes_s"})
FIELDS = {field.name: field.type for field in dataclasses.fields(Efficiency)}
