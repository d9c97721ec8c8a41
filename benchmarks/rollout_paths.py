"""The three ways to the engine that `benchmarks.rollout` compares; each a context that yields a function to time."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from benchmarks import instant_engine
from benchmarks.rollout_variants import Arguments, Run, Variant, Workload
from rlpost.batch import collate
from rlpost.host import exported
from rlpost.platform import RAY_ENV, platform
from rlpost.rewards.base import Answer
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.trainer.build import start_ray
from rlpost.trainer.config import ClusterConfig
from rlpost.trainer.source import check_rewards, rollout_metrics
from rlpost.trajectory import Prompt, Trajectory
from rlpost.workers.config import ModelConfig, RolloutConfig
from rlpost.workers.model import ModelInfo, inspect
from rlpost.workers.placement import Placement, Pools
from rlpost.workers.rollout.base import ENGINES, RolloutEngine, SamplingSpec
from rlpost.workers.rollout.pool import RolloutPool
from rlpost.workers.rollout.served import graph_batch_sizes
from rlpost.workers.rollout.setup import engine_setup
from rlpost.workers.rollout.workflow import Generate, trajectory


def look(args: argparse.Namespace) -> ModelInfo:
    """What is loaded."""
    path = str(args.cache / f"qwen3-{args.shape}") if args.shape else args.model
    return inspect(ModelConfig(path=path), args.cache, seed=1)[0]


def set_environment(variant: Variant, info: ModelInfo, cfg: RolloutConfig) -> RolloutConfig:
    """What a run exports for its engine, and vLLM's model runner where the variant names one; `cfg` decided upon."""
    setup = engine_setup(cfg, info, platform(), exported())
    os.environ.update(setup.env)
    os.environ.update(runner_env(variant))
    return setup.cfg


def runner_env(variant: Variant) -> dict[str, str]:
    """vLLM's switch between its two model runners."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "1" if "v2" in variant else "0"} if {"v1", "v2"} & variant.changes else {}


# --- bare: the engine's offline API ---


@contextmanager
def bare_vllm(variant: Variant, args: argparse.Namespace) -> Iterator[Run]:
    """`vllm.LLM.generate`."""
    info = look(args)
    set_environment(variant, info, RolloutConfig(name=args.engine))
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(**bare_vllm_arguments(variant, info, args))
    if may_sleep(variant):
        llm.sleep(1)
        llm.wake_up()

    def run(workload: Workload, variant: Variant, call: int, profiled: bool) -> float:
        requests = workload.requests(call, info.vocab_size)
        prompts = [{"prompt_token_ids": ids} for _, ids, _, _ in requests]
        every = variant.logprobs_every
        params = [
            SamplingParams(
                n=n,
                seed=1000 * number if "seeds" in variant else None,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0 if every and i % every == 0 else None,
                detokenize="text" in variant,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for number, (i, _, n, length) in enumerate(requests)
        ]
        if profiled:
            llm.start_profile()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        if profiled:
            llm.stop_profile()
        check(sum(len(o.token_ids) for output in outputs for o in output.outputs), workload)
        return seconds

    yield run


def may_sleep(variant: Variant) -> bool:
    """Whether its engine is one that can sleep."""
    return "sleep" in variant and platform().kind != "cpu"


def bare_vllm_arguments(variant: Variant, info: ModelInfo, args: argparse.Namespace) -> Arguments:
    """As good host settings as vLLM offers, changed as the variant says."""
    on_cpu = platform().kind == "cpu"
    max_num_seqs = variant.number("seqs", args.max_num_seqs)
    arguments: Arguments = {
        "model": info.path,
        "tokenizer": info.tokenizer_path,
        "skip_tokenizer_init": "text" not in variant,
        "dtype": str(platform().dtype("auto")).removeprefix("torch."),
        "max_model_len": args.prompt_tokens + args.max_tokens,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "enforce_eager": on_cpu or "eager" in variant,
        "enable_sleep_mode": may_sleep(variant),
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs" if "raw" in variant else "processed_logprobs",
    }
    if "sync" in variant:
        arguments["async_scheduling"] = False
    if "noprefix" in variant:
        arguments["enable_prefix_caching"] = False
    arguments |= variant.executor
    if not {"graphs", "eager"} & variant.changes and not on_cpu:
        arguments["cudagraph_capture_sizes"] = graph_batch_sizes(max_num_seqs)
    if "mask" in variant:
        arguments["worker_extension_cls"] = "rlpost.workers.rollout.vllm_extension.WorkerExtension"
        arguments["additional_config"] = {"rlpost_vocab_size": info.vocab_size}
    if args.profile is not None:
        folder = str(args.profile.resolve() / variant.name)
        arguments["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": folder}
    if on_cpu:  # a prompt that is cut has its generator set back, which CPU generators cannot
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    return arguments


@contextmanager
def bare_sglang(variant: Variant, args: argparse.Namespace) -> Iterator[Run]:
    """`sglang.Engine.generate`."""
    info = look(args)
    set_environment(variant, info, RolloutConfig(name=args.engine))
    import sglang

    engine = sglang.Engine(**bare_sglang_arguments(variant, info, args))

    def run(workload: Workload, variant: Variant, call: int, profiled: bool) -> float:
        requests = workload.requests(call, info.vocab_size)
        params = [
            {"n": 1, "max_new_tokens": length, "ignore_eos": True} for _, _, n, length in requests for _ in range(n)
        ]
        every = variant.logprobs_every
        if "seeds" in variant:
            params = [p | {"sampling_seed": i} for i, p in enumerate(params)]
        start = time.perf_counter()
        outputs = engine.generate(
            input_ids=[ids for _, ids, n, _ in requests for _ in range(n)],
            sampling_params=params,
            return_logprob=[bool(every and i % every == 0) for i, _, n, _ in requests for _ in range(n)],
        )
        seconds = time.perf_counter() - start
        check(sum(output["meta_info"]["completion_tokens"] for output in outputs), workload)
        return seconds

    try:
        yield run
    finally:
        engine.shutdown()


def bare_sglang_arguments(variant: Variant, info: ModelInfo, args: argparse.Namespace) -> Arguments:
    """As good host settings as SGLang offers, changed as the variant says."""
    max_num_seqs = variant.number("seqs", args.max_num_seqs)
    arguments: Arguments = {
        "model_path": info.path,
        "tokenizer_path": info.tokenizer_path,
        "skip_tokenizer_init": True,
        "dtype": str(platform().dtype("auto")).removeprefix("torch."),
        "context_length": args.prompt_tokens + args.max_tokens + 8,
        "max_running_requests": max_num_seqs,
        "disable_overlap_schedule": "sync" in variant,
        "disable_cuda_graph": "eager" in variant or platform().kind == "cpu",
        "log_level": "error",
    }
    if platform().kind == "cpu":
        tokens = max_num_seqs * (args.prompt_tokens + args.max_tokens)
        return arguments | {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": tokens}
    arguments |= {"mem_fraction_static": args.gpu_memory_utilization, "disable_piecewise_cuda_graph": True}
    if not {"graphs", "eager"} & variant.changes:
        arguments["cuda_graph_bs"] = graph_batch_sizes(max_num_seqs)
    return arguments


def bare(variant: Variant, args: argparse.Namespace) -> AbstractContextManager[Run]:
    """The offline API of `--engine`."""
    return {"vllm": bare_vllm, "sglang": bare_sglang}[args.engine](variant, args)


# --- ours ---


def rollout_config(variant: Variant, args: argparse.Namespace) -> RolloutConfig:
    """The `rollout` section that says what the variant says."""
    extra: dict[str, Any] = dict(variant.executor)
    if "sync" in variant:
        extra |= {"vllm": {"async_scheduling": False}, "sglang": {"disable_overlap_schedule": True}}[args.engine]
    if "noprefix" in variant:
        extra["enable_prefix_caching"] = False
    return RolloutConfig(
        name=args.engine,
        n=args.n,
        max_num_seqs=variant.number("seqs", args.max_num_seqs),
        num_replicas=variant.number("replicas", args.replicas),
        num_workers=args.num_workers,
        enforce_eager="eager" in variant,
        gpu_memory_utilization=args.gpu_memory_utilization,
        free_cache_engine="sleep" in variant,
        engine_kwargs=extra,
        workflow="benchmarks.rollout_paths.given_lengths",
        seed_requests="on" if "seeds" in variant else "off",
    )


def spec_of(variant: Variant, info: ModelInfo, max_tokens: int) -> SamplingSpec:
    """Temperature 1 and no stop tokens."""
    return SamplingSpec(
        temperature=1.0, max_tokens=max_tokens, vocab_size=info.vocab_size, logprobs_every=variant.logprobs_every
    )


@contextmanager
def started(variant: Variant, args: argparse.Namespace) -> Iterator[tuple[RolloutEngine, ModelInfo, asyncio.Runner]]:
    """rlpost's engine in this process, its model, and the loop it lives in."""
    info = look(args)
    cfg = set_environment(variant, info, rollout_config(variant, args))
    engine = ENGINES.get(args.engine, "--engine")(cfg, info, args.prompt_tokens + args.max_tokens)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield engine, info, runner
        finally:
            runner.run(engine.shutdown())


async def answer(engine: RolloutEngine, info: ModelInfo, workload: Workload, variant: Variant, call: int) -> float:
    """Seconds until `engine` has answered all requests of a call, which it gets at once."""
    requests = workload.requests(call, info.vocab_size)
    start = time.perf_counter()
    answers = await asyncio.gather(
        *(
            engine.generate(
                ids,
                spec_of(variant, info, length).for_group(f"{call}/{i}"),
                1000 * number if "seeds" in variant else None,
                f"{call}/{number}",
                n,
            )
            for number, (i, ids, n, length) in enumerate(requests)
        )
    )
    seconds = time.perf_counter() - start
    check(sum(len(c.token_ids) for answer in answers for c in answer), workload)
    return seconds


@contextmanager
def engine_alone(variant: Variant, args: argparse.Namespace) -> Iterator[Run]:
    """`RolloutEngine.generate` in this process, all requests at once."""
    with started(variant, args) as (engine, info, runner):
        if may_sleep(variant):
            runner.run(engine.sleep())
            runner.run(engine.wake())
        yield lambda workload, variant, call, profiled: runner.run(answer(engine, info, workload, variant, call))


async def given_lengths(prompt: Prompt, n: int, generate: Generate) -> list[Trajectory]:
    """A workflow whose answers are as long as the prompt says: one request, or one for each sample."""
    ids, lengths = prompt.token_ids, prompt.extra_info["lengths"]
    if prompt.extra_info["split"]:
        each = await asyncio.gather(*(generate(ids, key=str(i), max_tokens=length) for i, length in enumerate(lengths)))
        completions = [completion for (completion,) in each]
    else:
        completions = await generate(ids, n=n, max_tokens=lengths[0])
    return [trajectory(ids, completion, i) for i, completion in enumerate(completions)]


async def constant(prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
    """A reward that costs nothing."""
    return [1.0] * len(answers)


@contextmanager
def through_pool(variant: Variant, args: argparse.Namespace) -> Iterator[Run]:
    """What a colocated training step does to have its batch."""
    info = look(args)
    os.environ.update(runner_env(variant))  # Ray's processes inherit it
    environment = RAY_ENV | {"PYTHONPATH": os.pathsep.join(sys.path)}
    setup = {"runtime_env": {"env_vars": environment, "worker_process_setup_hook": instant_engine.RAY_SETUP}}
    stop = start_ray(ClusterConfig(ray_init_kwargs=setup if args.engine == instant_engine.NAME else {}))
    placement = Placement.create(Pools.colocated(1, 1), 1, variant.number("replicas", args.replicas))
    reward = RewardConfig(terms={"constant": RewardTermConfig(fn="benchmarks.rollout_paths.constant")})
    pool = RolloutPool(
        rollout_config(variant, args),
        info,
        reward,
        placement,
        seed=args.seed,
        max_prompt_length=args.prompt_tokens,
        max_response_length=args.max_tokens,
    )

    async def take(workload: Workload, variant: Variant, call: int) -> float:
        prompts = [
            Prompt(
                id=f"{call}/{i}",
                index=i,
                token_ids=np.asarray(ids),
                text="",
                data_source="drawn",
                extra_info={"lengths": workload.lengths[i].tolist(), "split": workload.split},
            )
            for i, ids in enumerate(workload.prompts(call, info.vocab_size))
        ]
        start = time.perf_counter()
        groups = await pool.run(prompts, args.n, spec_of(variant, info, args.max_tokens))
        check_rewards(groups, reward)
        rollout_metrics(groups)
        batch = collate(groups, args.n)
        seconds = time.perf_counter() - start
        check(int(batch["response_mask"].sum()), workload)
        return seconds

    with asyncio.Runner() as runner:
        try:
            runner.run(pool.start())
            if may_sleep(variant):
                runner.run(pool.sleep())
                runner.run(pool.wake())
            yield lambda workload, variant, call, profiled: runner.run(take(workload, variant, call))
        finally:
            runner.run(pool.shutdown())
            placement.remove()
            stop()


def check(num_tokens: int, workload: Workload) -> None:
    """Every variant must do the same work."""
    if num_tokens != workload.num_tokens:
        raise RuntimeError(f"{num_tokens} tokens came back, {workload.num_tokens} were asked for")


PATHS: dict[str, Callable[[Variant, argparse.Namespace], AbstractContextManager[Run]]] = {
    "bare": bare,
    "engine": engine_alone,
    "pool": through_pool,
}
