"""vLLM as a `RolloutEngine`: AsyncLLM, token ids in and out, weights through its own update lifecycle.

Serves vLLM >= 0.24; where versions differ it asks the engine's signatures what they offer.
"""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import psutil

from rlpost.batch import Status
from rlpost.platform import platform
from rlpost.registry import near
from rlpost.workers.config import RolloutConfig
from rlpost.workers.model import ModelInfo
from rlpost.workers.rollout.base import (
    ENGINES,
    Completion,
    RolloutEngine,
    SamplingSpec,
    WeightManifest,
    join,
    request_seed,
)
from rlpost.workers.rollout.manifest import UpdateLedger, check_manifest, checkpoint_shapes
from rlpost.workers.rollout.processes import Guard, ProcessLog, children, end

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

WATCH_S = 0.5  # between two looks at the engine's processes


@ENGINES.register("vllm")
class VLLMEngine(RolloutEngine):
    """One vLLM replica. `AsyncLLM` runs here; its engine core and workers are processes of their own.

    Logprobs are those of the distribution that was sampled from: logits / temperature, softmax, padded ids masked.
    """

    def __init__(self, cfg: RolloutConfig, model: ModelInfo, max_model_len: int):
        self._cfg, self._model, self._max_model_len = cfg, model, max_model_len
        self._llm: Any = None
        self._log = ProcessLog()
        self._children: set[psutil.Process] = set()
        self._guard: Guard | None = None
        self._death: asyncio.Task[None] | None = None  # done when a process of the engine has ended
        self._version = 0
        self._running: set[str] = set()  # ids of requests inside vLLM
        self._interrupted: set[str] = set()  # of those, which `pause(keep=True)` cut off
        self._open = asyncio.Event()  # clear while paused or being updated: requests wait
        self._open.set()
        self._paused = False
        self._ledger: UpdateLedger | None = None

    async def start(self) -> None:
        """See `RolloutEngine.start`.

        Raises:
            ValueError: an `engine_kwargs` entry that vLLM does not take.
            RuntimeError: vLLM did not start; holds its own error.
        """
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(self._cfg.startup_timeout_s))
        from vllm import AsyncEngineArgs
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(
            self._cfg, self._model, self._max_model_len, {f.name for f in dataclasses.fields(AsyncEngineArgs)}
        )
        before = children()
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            end(children() - before)

        timer = threading.Timer(self._cfg.startup_timeout_s, give_up)
        timer.start()
        try:
            with self._log.capture():
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        except Exception as error:  # vLLM raises many kinds, and the cause is often only in its process's log
            end(children() - before)
            if expired.is_set():
                raise RuntimeError(
                    f"vLLM did not start within rollout.startup_timeout_s={self._cfg.startup_timeout_s}; "
                    f"its last words: {self._log.cause()}"
                ) from error
            raise RuntimeError(f"vLLM did not start: {self._log.cause() or error}") from error
        finally:
            timer.cancel()
        self._children = children() - before
        self._guard = Guard(self._children)
        self._death = asyncio.create_task(self._watch())

    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec, seed: int, request_id: str, n: int = 1
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        A request that a pause interrupts goes on as a new one, prompt and answer so far recomputed under the weights of
        then; so every token has the version that sampled it.

        Raises:
            ValueError: prompt and `spec.max_tokens` exceed the engine's `max_model_len`.
            RuntimeError: the engine died; holds its own error.
        """
        longest = len(token_ids) + spec.max_tokens
        if longest > self._max_model_len:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and an answer of up to {spec.max_tokens} exceed "
                f"rollout.max_model_len={self._max_model_len}"
            )
        completions, interrupted = await self._request(list(token_ids), spec, seed, request_id, n)
        if not interrupted:
            return completions
        return list(
            await asyncio.gather(
                *(
                    self._go_on(list(token_ids), spec, seed + i, f"{request_id}/{i}", completion)
                    for i, completion in enumerate(completions)
                )
            )
        )

    async def abort(self, request_id: str | None = None) -> None:
        """See `RolloutEngine.abort`."""
        ids = [r for r in self._running if request_id is None or r == request_id or r.startswith(f"{request_id}/")]
        if ids:
            await self._call(self._llm.abort(ids))

    async def pause(self, keep: bool) -> None:
        """See `RolloutEngine.pause`. A kept request waits here, not in vLLM, so nothing depends on its queue."""
        self._paused = True
        self._open.clear()
        while self._running:  # again and again: vLLM forgets an abort that overtakes its request
            if keep:
                self._interrupted |= self._running
            await self.abort()
            await asyncio.sleep(0.005)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._paused = False
        if self._ledger is None:
            self._open.set()

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutEngine.sleep`."""
        if platform().kind != "cpu":
            await self._call(self._llm.sleep(level))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutEngine.wake`."""
        if platform().kind != "cpu":
            await self._call(self._llm.wake_up(list(tags)))

    async def begin_update(self, manifest: WeightManifest) -> None:
        """See `RolloutEngine.begin_update`."""
        if self._running:
            raise RuntimeError(
                f"weight update {manifest.version}: {len(self._running)} requests are running; pause first"
            )
        check_manifest(manifest, checkpoint_shapes(self._model.path))
        self._ledger = UpdateLedger(manifest)
        self._open.clear()
        await self._call(self._llm.start_weight_update())

    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        """See `RolloutEngine.load_bucket`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        assert self._ledger is not None, "load_bucket outside an update"
        self._ledger.take(bucket["names"])
        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info={"bucket": bucket})))

    async def finish_update(self, version: int) -> int | None:
        """See `RolloutEngine.finish_update`."""
        assert self._ledger is not None, "finish_update outside an update"
        self._ledger.finish()
        await self._call(self._llm.finish_weight_update())
        digests = set(await self._call(self._llm.collective_rpc("rlpost_seal_update")))
        if len(digests) != 1:
            raise RuntimeError(
                f"weight update {version}: tensor-parallel ranks received different bytes: {sorted(digests)}"
            )
        await self._call(self._llm.reset_prefix_cache())  # its keys and values are those of the old weights
        self._version, self._ledger = version, None
        if not self._paused:
            self._open.set()
        return digests.pop()

    async def device_uuids(self) -> list[str]:
        """See `RolloutEngine.device_uuids`."""
        return list(await self._call(self._llm.collective_rpc("rlpost_device_uuid")))

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        if self._death is not None:
            self._death.cancel()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        end(self._children)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None

    async def _request(
        self, token_ids: list[int], spec: SamplingSpec, seed: int, request_id: str, n: int
    ) -> tuple[list[Completion], bool]:
        """One request to vLLM: its completions, and whether a pause cut it off."""
        await self._open.wait()
        self._running.add(request_id)
        try:
            final = await self._call(self._last_output(token_ids, sampling_params(spec, seed, n), request_id))
        finally:
            self._running.discard(request_id)
            interrupted = request_id in self._interrupted
            self._interrupted.discard(request_id)
        outputs = [] if final is None else [output for output in final.outputs if output is not None]
        completions = [self._completion(output) for output in outputs]
        empty = Completion(
            token_ids=np.empty(0, np.int64),
            logprobs=np.empty(0, np.float32),
            versions=np.empty(0, np.int32),
            status=Status.ABORT,
        )
        return completions + [empty] * (n - len(completions)), interrupted

    async def _last_output(self, token_ids: list[int], params: Any, request_id: str) -> Any:
        final = None
        async for output in self._llm.generate({"prompt_token_ids": token_ids}, params, request_id):
            final = output
        return final

    async def _go_on(
        self, prompt: list[int], spec: SamplingSpec, seed: int, request_id: str, done: Completion
    ) -> Completion:
        """Continue an interrupted sample until it ends by itself or is aborted."""
        interrupted = True
        while interrupted and done.status is Status.ABORT:
            length = len(done.token_ids)
            rest = dataclasses.replace(spec, max_tokens=spec.max_tokens - length)
            # another seed for another position: the same one would repeat the draws of the first tokens
            (more,), interrupted = await self._request(
                prompt + done.token_ids.tolist(), rest, request_seed(seed, length), request_id, 1
            )
            done = join(done, more)
        return done

    def _completion(self, output: Any) -> Completion:
        token_ids = np.asarray(output.token_ids, np.int64)
        logprobs = [step[token].logprob for step, token in zip(output.logprobs or (), output.token_ids, strict=True)]
        return Completion(
            token_ids=token_ids,
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.full(len(token_ids), self._version, np.int32),
            status={"stop": Status.STOP, "length": Status.LENGTH}.get(output.finish_reason, Status.ABORT),
        )

    async def _call(self, work: Awaitable[Any]) -> Any:
        """Await something of vLLM's, but not for ever: it does not always notice that its processes are gone."""
        assert self._death is not None, "start the engine first"
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if self._death.done() or self._llm.errored:
            reason = task.exception() if task.done() and not task.cancelled() else None
            silent = "its process is gone without a word, as when the system kills it for memory"
            raise RuntimeError(f"the vLLM engine died: {self._log.cause() or reason or silent}") from reason
        return task.result()

    async def _watch(self) -> None:
        """Return when a process of the engine has ended."""
        while all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self._children):
            await asyncio.sleep(WATCH_S)


def sampling_params(spec: SamplingSpec, seed: int, n: int) -> Any:
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
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_arguments(cfg: RolloutConfig, model: ModelInfo, max_model_len: int, accepted: set[str]) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs, whose fields are `accepted`; `cfg.engine_kwargs` on top.

    Raises:
        ValueError: an `engine_kwargs` key that vLLM does not know, or that another key sets.
    """
    for key in cfg.engine_kwargs:
        if key in _RESERVED:
            instead = f"set {_RESERVED[key]} instead" if _RESERVED[key] else "rlpost sets it; leave it out"
            raise ValueError(f"rollout.engine_kwargs.{key}: {instead}")
        if key not in accepted:
            raise ValueError(f"rollout.engine_kwargs.{key}: vLLM takes no such argument; {near(key, accepted)}")
    here = platform()
    arguments: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": model.override_config,
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
    if model.embedding_size > model.vocab_size:
        arguments["logits_processors"] = ["rlpost.workers.rollout.vllm_extension:VocabMask"]
        arguments["additional_config"] = {"rlpost_vocab_size": model.vocab_size}
    if here.kind == "cpu" and cfg.tensor_model_parallel_size == 1:  # halves the start-up
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return arguments | cfg.engine_kwargs
