"""vLLM as a `RolloutEngine`: AsyncLLM, token ids in and out, weights through its own update lifecycle.

Serves vLLM >= 0.24; where versions differ it asks the engine's signatures what they offer.
"""

import asyncio
import dataclasses
import inspect
import os
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np

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
)
from rlpost.workers.rollout.installed import require_offered
from rlpost.workers.rollout.served import ServedEngine, float32_head, graph_batch_sizes

# Set from the config, so that one value serves trainer and engine; or ours, because this adapter depends on them.
_RESERVED = {
    "model": "model.path",
    "tokenizer": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
    "hf_overrides": "model.override_config",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "seed": "seed",
    **dict.fromkeys(
        ("skip_tokenizer_init", "generation_config", "logprobs_mode", "logits_processors", "additional_config")
        + ("worker_extension_cls", "weight_transfer_config"),
    ),
}

# What this adapter and vllm_extension.py need of a vLLM; 0.24 has it.
_OFFERED = (
    "vllm.v1.engine.async_llm:AsyncLLM.init_weight_transfer_engine",
    "vllm.v1.engine.async_llm:AsyncLLM.start_weight_update",
    "vllm.v1.engine.async_llm:AsyncLLM.update_weights",
    "vllm.v1.engine.async_llm:AsyncLLM.finish_weight_update",
    "vllm.v1.engine.async_llm:AsyncLLM.is_sleeping",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
    "vllm.engine.arg_utils:AsyncEngineArgs.worker_extension_cls",
    "vllm.engine.arg_utils:AsyncEngineArgs.logprobs_mode",
)


@ENGINES.register("vllm")
class VLLMEngine(ServedEngine):
    """One vLLM replica. `AsyncLLM` runs here; its engine core and workers are processes of their own."""

    def __init__(self, cfg: RolloutConfig, model: ModelInfo, max_model_len: int, seed: int = 0):
        super().__init__("vLLM", cfg, model, max_model_len, seed)
        self._llm: Any = None
        self._update: dict[str, Any] = {}  # how an update of weights is to begin

    async def start(self) -> None:
        """See `RolloutEngine.start`.

        Raises:
            ValueError: an `engine_kwargs` entry that vLLM does not take, or a vLLM that lacks what is called here.
            RuntimeError: vLLM did not start; holds its own error.
        """
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(self._cfg.startup_timeout_s))
        require_offered("vllm", _OFFERED)
        from vllm import AsyncEngineArgs
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(
            self._cfg, self._model, self._max_model_len, {f.name for f in dataclasses.fields(AsyncEngineArgs)}
        )
        with self._processes.starting(self._cfg.startup_timeout_s):
            # as its offline API: by itself an embedded engine prefills 2,048 tokens a pass, an offline one up to 16,384
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments, seed=self._seed), usage_context=UsageContext.LLM_CLASS
            )
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            if "is_checkpoint_format" in inspect.signature(self._llm.start_weight_update).parameters:  # 0.24
                in_place = await self._llm.collective_rpc("rlpost_loads_in_place")
                self._update = {"is_checkpoint_format": not all(in_place)}

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutEngine.sleep`."""
        if platform().kind != "cpu":
            await self._call(self._llm.sleep(level))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutEngine.wake`."""
        if platform().kind != "cpu":
            await self._call(self._llm.wake_up(list(tags)))

    async def _open_update(self) -> None:
        await self._call(self._llm.start_weight_update(**self._update))

    async def _write(self, bucket: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info={"bucket": bucket})))

    async def _close_update(self) -> set[int]:
        await self._call(self._llm.finish_weight_update())
        return set(await self._call(self._llm.collective_rpc("rlpost_seal_update")))

    async def _drop_cache(self) -> bool:
        return await self._call(self._llm.reset_prefix_cache())

    async def device_uuids(self) -> list[str]:
        """See `RolloutEngine.device_uuids`."""
        return list(await self._call(self._llm.collective_rpc("rlpost_device_uuid")))

    async def ping(self) -> None:
        """See `RolloutEngine.ping`. vLLM's `check_health` asks no process."""
        await self._call(self._llm.is_sleeping())

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        self._processes.end()

    async def _submit(
        self, token_ids: list[int], spec: SamplingSpec, seed: int | None, request_id: str, n: int
    ) -> list[Completion]:
        final = await self._call(self._last_output(token_ids, sampling_params(spec, seed, n), request_id))
        outputs = [] if final is None else [output for output in final.outputs if output is not None]
        completions = [self._completion(output) for output in outputs]
        return completions + [Completion.empty()] * (n - len(completions))

    async def _abort(self, request_ids: list[str]) -> None:
        await self._call(self._llm.abort(request_ids))

    async def _last_output(self, token_ids: list[int], params: Any, request_id: str) -> Any:
        final = None
        async for output in self._llm.generate({"prompt_token_ids": token_ids}, params, request_id):
            final = output
        return final

    def _completion(self, output: Any) -> Completion:
        token_ids = np.asarray(output.token_ids, np.int64)
        logprobs = np.full(len(token_ids), NOT_ASKED, np.float32)
        if output.logprobs is not None:  # flat: the sampled token comes first at each position
            logprobs = np.asarray(output.logprobs.logprobs, np.float32)[output.logprobs.start_indices]
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=np.full(len(token_ids), self._version, np.int32),
            status={"stop": Status.STOP, "length": Status.LENGTH}.get(output.finish_reason, Status.ABORT),
        )

    async def _call(self, work: Awaitable[Any]) -> Any:
        return await self._processes.call(work, lambda: self._llm.errored)


def sampling_params(spec: SamplingSpec, seed: int | None, n: int) -> Any:
    """vLLM's form of `spec`. vLLM seeds sample i of n with `seed + i`; the stop ids are ours alone (`ignore_eos`)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=n,
        seed=seed,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        max_tokens=spec.max_tokens,
        stop_token_ids=list(spec.stop_token_ids),
        ignore_eos=True,
        logprobs=0 if spec.logprobs_every else None,  # 0: of the sampled token alone
        flat_logprobs=True,  # two lists rather than an object and a dictionary for each token
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_arguments(cfg: RolloutConfig, model: ModelInfo, max_model_len: int, accepted: set[str]) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs, whose fields are `accepted`; `cfg.engine_kwargs` on top.

    Raises:
        ValueError: an `engine_kwargs` key that vLLM does not know, or that another key sets.
    """
    check_engine_kwargs(cfg.engine_kwargs, "vLLM", accepted, _RESERVED)
    here = platform()
    head = {"head_dtype": "float32"} if float32_head(cfg, by_itself=True) else {}
    arguments: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": head | model.override_config,
        "dtype": str(here.dtype(cfg.dtype)).removeprefix("torch."),
        "max_model_len": max_model_len,
        "max_num_seqs": cfg.max_num_seqs,
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        "tensor_parallel_size": cfg.tensor_model_parallel_size,
        "enforce_eager": cfg.enforce_eager or here.kind == "cpu",  # compiling for CPU takes minutes and gains little
        "enable_sleep_mode": cfg.free_cache_engine and here.kind != "cpu",
        "disable_log_stats": True,
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rlpost.workers.rollout.vllm_extension.WorkerExtension",
        "weight_transfer_config": {"backend": "rlpost"},
    }
    if cfg.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = cfg.max_num_batched_tokens
    elif here.kind == "cpu":
        arguments["max_num_batched_tokens"] = max(4096, max_model_len)
    if here.kind == "cpu":
        # A request whose prompt is cut has its generator set back, which CPU generators cannot: the engine would die.
        arguments["enable_chunked_prefill"] = False
    additional: dict[str, Any] = {}
    if model.embedding_size > model.vocab_size:
        additional["rlpost_vocab_size"] = model.vocab_size
    if float32_head(cfg, by_itself=False):
        additional["rlpost_float32_logits"] = True
    if additional:
        arguments["additional_config"] = additional
    if not arguments["enforce_eager"] and not _says_what_to_capture(cfg.engine_kwargs):
        arguments["cudagraph_capture_sizes"] = graph_batch_sizes(cfg.max_num_seqs)
    if here.kind == "rocm":
        arguments |= aiter.arguments("vllm", cfg.aiter_kernels.set_to("on"), model.shape.latent_attention)
    if cfg.tensor_model_parallel_size > 1:  # by itself it would take its ranks from the placement group of our actor
        arguments["distributed_executor_backend"] = "mp"
    elif here.kind == "cpu":  # halves the start-up
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return arguments | cfg.engine_kwargs


def _says_what_to_capture(engine_kwargs: dict[str, Any]) -> bool:
    return any("cudagraph" in key for key in (*engine_kwargs, *engine_kwargs.get("compilation_config", ())))
