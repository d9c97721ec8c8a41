"""SGLang as a `RolloutEngine`: its `Engine` in this process, token ids in and out, weights through a loader of ours.

Serves SGLang >= 0.5.12; where versions differ it asks what they offer.
"""

import asyncio
import atexit
import inspect
import json
import signal
import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import torch

from rlpost import aiter
from rlpost.platform import platform
from rlpost.trajectory import NOT_ASKED, Status
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.base import (
    ENGINES,
    Completion,
    SamplingSpec,
    check_engine_kwargs,
    join,
)
from rlpost.workers.rollout.installed import require_offered
from rlpost.workers.rollout.processes import keep_signal_handlers
from rlpost.workers.rollout.served import ServedEngine, float32_head, graph_batch_sizes
from rlpost.workers.weight_sync.buffers import HostBuffer

# Set from the config, so that one value serves trainer and engine; or ours, because this adapter depends on them.
_RESERVED = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
    "json_model_override_args": "model.override_config",
    "dtype": "rollout.dtype",
    "enable_fp32_lm_head": "rollout.fp32_lm_head",
    "tp_size": "rollout.tensor_model_parallel_size",
    "mem_fraction_static": "rollout.gpu_memory_utilization",
    "context_length": "rollout.max_model_len",
    "max_running_requests": "rollout.max_num_seqs",
    "chunked_prefill_size": "rollout.max_num_batched_tokens",
    "disable_cuda_graph": "rollout.enforce_eager",
    "enable_memory_saver": "rollout.free_cache_engine",
    "random_seed": "seed",
    **dict.fromkeys(
        ("device", "skip_tokenizer_init", "sampling_backend", "sampling_defaults", "custom_weight_loader", "dp_size")
        + ("enable_custom_logit_processor", "custom_sigquit_handler", "server_args", "speculative_algorithm"),
    ),
}

# What this adapter and sglang_extension.py need of an SGLang; 0.5.12 has it.
_OFFERED = (
    "sglang.srt.entrypoints.engine:Engine.init_tokenizer_manager_func",
    "sglang.srt.entrypoints.engine:Engine.run_scheduler_process_func",
    "sglang.srt.layers.sampler:register_sampler_backend",
    "sglang.srt.sampling.custom_logit_processor:CustomLogitProcessor.to_str",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.abort_request",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.flush_cache",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.get_internal_state",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.release_memory_occupation",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.update_weights_from_tensor",
    "sglang.srt.server_args:ServerArgs.custom_sigquit_handler",
    "sglang.srt.server_args:ServerArgs.custom_weight_loader",
)

SPARE_TOKENS = 8  # of a request's context, which SGLang keeps for itself
CPU_KV_TOKENS = 32768  # of the KV cache on CPU, where SGLang would take a share of the whole machine's memory


@ENGINES.register("sglang")
class SGLangEngine(ServedEngine):
    """One SGLang replica. Its tokenizer manager runs here; its schedulers, one a device, are processes of their own."""

    def __init__(self, cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0):
        super().__init__("SGLang", cfg, model, max_model_len, seed)
        self._engine: Any = None
        self._manager: Any = None  # SGLang's tokenizer manager, which takes every request of control
        self._samples: dict[str, set[str]] = {}  # request id -> SGLang's ids of its samples

    async def start(self) -> None:
        """See `RolloutEngine.start`.

        Raises:
            ValueError: an `engine_kwargs` entry that SGLang does not take, or an SGLang that lacks what is called here.
            RuntimeError: SGLang did not start; holds its own error.
        """
        require_offered("sglang", _OFFERED)
        from sglang.srt.server_args import ServerArgs

        from rlpost.workers.rollout.sglang_extension import SeedCarrier, make_engine

        accepted = set(inspect.signature(ServerArgs).parameters)
        arguments = engine_arguments(self._cfg, self._model, self._max_model_len, accepted)
        self._carrier = SeedCarrier.to_str()
        with self._processes.starting(self._cfg.startup_timeout_s), keep_signal_handlers():
            self._engine = make_engine(self._model.vocab_size, **arguments, random_seed=self._seed)
            self._manager = self._engine.tokenizer_manager
            self._manager.auto_create_handle_loop()

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutEngine.sleep`. The weights are kept at either level: SGLang decides about that when it starts."""
        if platform().kind != "cpu":
            from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

            await self._empty_cache()
            await self._call(
                self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"]))
            )

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutEngine.wake`."""
        if platform().kind != "cpu":
            from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

            request = ResumeMemoryOccupationReqInput(tags=list(tags))
            await self._call(self._manager.resume_memory_occupation(request))

    async def _open_update(self) -> None:
        await self._session("begin")

    async def _write(self, bucket: dict[str, Any]) -> None:
        await self._send({"bucket": bucket})

    async def _close_update(self) -> set[int]:
        digests = HostBuffer(8 * self._cfg.tensor_model_parallel_size)
        await self._send({"digest": digests.where()})
        await self._session("end")
        return set(digests.data.view(torch.int64).tolist())

    async def device_uuids(self) -> list[str]:
        """See `RolloutEngine.device_uuids`."""
        return [platform().device_uuid(rank) for rank in range(self._cfg.tensor_model_parallel_size)]

    async def ping(self) -> None:
        """See `RolloutEngine.ping`."""
        await self._call(self._manager.get_internal_state())

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`. SGLang's own would kill every child of this process."""
        self._processes.end()
        if self._engine is None:
            return
        from rlpost.workers.rollout.sglang_extension import close_sockets

        atexit.unregister(self._engine.shutdown)
        for task in self._manager.asyncio_tasks:  # one that finds its socket closed would kill this process
            task.cancel()
        await asyncio.gather(*self._manager.asyncio_tasks, return_exceptions=True)
        for socket in (self._manager.send_to_scheduler, self._engine.send_to_rpc):
            close_sockets(socket)
        self._engine = self._manager = None

    async def _submit(
        self, token_ids: list[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int
    ) -> list[Completion]:
        samples = [uuid.uuid4().hex for _ in range(n)]  # of one length: SGLang's abort takes a prefix
        self._samples[request_id] = set(samples)
        try:
            return await asyncio.gather(
                *(
                    self._sample(token_ids, spec, None if seed is None else seed + i, sample)
                    for i, sample in enumerate(samples)
                )
            )
        finally:
            del self._samples[request_id]

    async def _sample(self, prompt: list[int], spec: SamplingSpec, seed: int | None, sample: str) -> Completion:
        """One answer. SGLang also ends at the EOS of the model's config: where `spec` does not, it goes on."""
        done = Completion.empty()
        while True:
            request = {
                "input_ids": prompt + done.token_ids.tolist(),
                "sampling_params": sampling_params(spec, seed, spec.max_tokens - len(done.token_ids)),
                "custom_logit_processor": None if seed is None else self._carrier,
                "return_logprob": bool(spec.logprobs_every),
                "rid": sample,
            }
            output = await self._call(self._engine.async_generate(**request))
            done = join(done, self._completion(output, spec))
            stopped = output["meta_info"]["finish_reason"]["type"] == "stop"
            if not stopped or done.status is not Status.ABORT:
                return done

    def _completion(self, output: dict[str, Any], spec: SamplingSpec) -> Completion:
        """Status ABORT where neither a stop token nor the limit ended it."""
        token_ids = np.asarray(output.get("output_ids") or [], np.int64)
        logprobs = np.full(len(token_ids), NOT_ASKED, np.float32)
        if pairs := output["meta_info"].get("output_token_logprobs"):
            token_ids = np.asarray([token for _, token, *_ in pairs], np.int64)
            logprobs = np.asarray([logprob for logprob, *_ in pairs], np.float32)
        status = Status.LENGTH if output["meta_info"]["finish_reason"]["type"] == "length" else Status.ABORT
        if len(token_ids) and token_ids[-1] in spec.stop_token_ids:
            status = Status.STOP
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=np.full(len(token_ids), self._version, np.int32),
            status=status,
        )

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            for sample in self._samples.get(request_id, ()):
                self._manager.abort_request(sample)

    async def _send(self, content: dict[str, Any]) -> None:
        """Hand `content` to `sglang_extension.receive` in each scheduler."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        from rlpost.workers.rollout.sglang_extension import LOADER, message

        ranks = range(self._cfg.tensor_model_parallel_size)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(message(content | {"slot": rank})) for rank in ranks
            ],
            load_format=LOADER,
            flush_cache=False,
        )
        await self._succeed(self._manager.update_weights_from_tensor(request))

    async def _session(self, edge: str) -> None:
        """Open or close a weight update, where SGLang wants that."""
        from sglang.srt.managers import io_struct

        if hasattr(self._manager, f"{edge}_weight_update"):
            request = getattr(io_struct, f"{edge.capitalize()}WeightUpdateReqInput")()
            await self._succeed(getattr(self._manager, f"{edge}_weight_update")(request))

    async def _drop_cache(self) -> bool:
        return (await self._call(self._manager.flush_cache())).success

    async def _succeed(self, work: Awaitable[tuple[bool, str]]) -> None:
        success, why = await self._call(work)
        if not success:
            raise RuntimeError(f"SGLang refused a weight update: {why}")

    async def _call(self, work: Awaitable[Any]) -> Any:
        return await self._processes.call(work)


def sampling_params(spec: SamplingSpec, seed: int | None, max_tokens: int) -> dict[str, Any]:
    """SGLang's form of `spec`; the seed reaches the sampler as a custom parameter."""
    from rlpost.workers.rollout.sglang_extension import SEED

    return {
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "max_new_tokens": max_tokens,
        "stop_token_ids": list(spec.stop_token_ids),
        "ignore_eos": not spec.stop_token_ids,  # which also makes it ignore `stop_token_ids`
        "custom_params": None if seed is None else {SEED: seed},
    }


def engine_arguments(cfg: RolloutConfig, model: ModelInfo, max_model_len: int, accepted: set[str]) -> dict[str, Any]:
    """Arguments of SGLang's Engine, whose names are `accepted`; `cfg.engine_kwargs` on top.

    Raises:
        ValueError: an `engine_kwargs` key that SGLang does not know, or that another key sets; float32 on CUDA.
    """
    check_engine_kwargs(cfg.engine_kwargs, "SGLang", accepted, _RESERVED)
    here = platform()
    if here.kind == "cuda" and here.dtype(cfg.dtype) == torch.float32:
        raise ValueError(
            "rollout.dtype=float32: SGLang's CUDA kernels compute in 16 bits; set rollout.dtype=bfloat16 (auto is "
            "actor.dtype)"
        )
    context_length = max_model_len + SPARE_TOKENS
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(model.override_config),
        "dtype": str(here.dtype(cfg.dtype)).removeprefix("torch."),
        "device": here.device_type,
        "context_length": context_length,
        "max_running_requests": cfg.max_num_seqs,
        "tp_size": cfg.tensor_model_parallel_size,
        "disable_cuda_graph": cfg.enforce_eager or here.kind == "cpu",
        "sampling_backend": "pytorch",
        "sampling_defaults": "openai",  # none from the checkpoint
        "enable_custom_logit_processor": True,
        "custom_weight_loader": ["rlpost.workers.rollout.sglang_extension.receive"],
        "custom_sigquit_handler": signal.SIG_IGN,
        "enable_fp32_lm_head": float32_head(cfg, by_itself=False),  # 0.5.12 copies the whole weight at every step
    }
    if cfg.max_num_batched_tokens is not None:
        arguments["chunked_prefill_size"] = cfg.max_num_batched_tokens
    if here.kind == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "sleep_on_idle": True,  # the scheduler would keep a core busy with waiting
            "max_total_tokens": max(context_length, min(CPU_KV_TOKENS, cfg.max_num_seqs * context_length)),
        }
    else:
        arguments |= {
            "mem_fraction_static": cfg.gpu_memory_utilization,
            "enable_memory_saver": cfg.free_cache_engine,
            "enable_weights_cpu_backup": cfg.free_cache_engine,
        }
        if "disable_piecewise_cuda_graph" in accepted:  # 0.5.12 fails to capture them on an H200
            arguments["disable_piecewise_cuda_graph"] = True
        if "cuda_graph_bs" in accepted and not arguments["disable_cuda_graph"]:
            arguments["cuda_graph_bs"] = graph_batch_sizes(cfg.max_num_seqs)
    if here.kind == "rocm":
        arguments |= aiter.arguments("sglang", cfg.aiter_kernels.set_to("on"), model.shape.latent_attention)
    return arguments | cfg.engine_kwargs
