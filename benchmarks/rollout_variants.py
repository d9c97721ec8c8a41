"""What `benchmarks.rollout` varies, and the requests that all of its variants are given."""

import argparse
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Changes that one running engine serves, and those that need a start of their own.
REQUEST = {
    "seeds": "a seed for every request",
    "logprobs": "logprobs of every sampled token",
    "logprobs16": "logprobs of one prompt in 16",
    "split": "n requests of 1 sample in place of one of n (always so with --lengths long)",
    "text": "answers as text too (bare vLLM)",
}
START = {
    "sync": "no async scheduling (vLLM) or overlap (SGLang)",
    "sleep": "an engine that can sleep (free_cache_engine), and has slept once; on a CPU none can",
    "mp": "vLLM's worker in a process of its own, whatever is the default",
    "noprefix": "no prefix cache (vLLM): prompts are read once for each sample, and no block of tokens is hashed",
    "uni": "vLLM's worker in its scheduler's process, whatever is the default",
    "v1": "vLLM's model runner V1, the only one for Qwen2 in 0.24",
    "v2": "vLLM's model runner V2",
    "graphs": "the engine's own choice of graph sizes",
    "eager": "no graphs",
    "mask": "ids beyond the tokenizer's are never sampled (bare vLLM; rlpost does it anyway)",
    "raw": "logprobs before the temperature, vLLM's own default",
}
NUMBERS = {  # followed by one, such as seqs256
    "seqs": "decode so many sequences at once, in each engine",
    "replicas": "so many engines on the one GPU (pool)",
}

DEFAULT = (
    "bare",
    "bare+seeds",
    "bare+logprobs16",
    "bare+logprobs",
    "bare+split",
    "engine",
    "engine+logprobs16",
    "pool",
    "pool+logprobs16",
    "pool+logprobs",
    "pool+replicas2+seqs512+logprobs16",
    "pool+replicas4+seqs256+logprobs16",
)


@dataclass(slots=True, frozen=True)
class Variant:
    """A path through which the requests go, and what is changed."""

    path: str
    changes: frozenset[str]
    name: str

    @property
    def start(self) -> tuple[str, ...]:
        """What needs an engine of its own; variants that agree on it share one."""
        return self.path, *sorted(change for change in self.changes if change not in REQUEST or change == "text")

    def __contains__(self, change: str) -> bool:
        return change in self.changes

    @property
    def logprobs_every(self) -> int:
        """As `SamplingSpec.logprobs_every`."""
        return 1 if "logprobs" in self else 16 if "logprobs16" in self else 0

    @property
    def executor(self) -> dict[str, str]:
        """vLLM's argument that says where its worker runs, if that is changed."""
        uniproc = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # vLLM takes "uni" for "mp" on a CPU
        backend = "mp" if "mp" in self else uniproc if "uni" in self else None
        return {} if backend is None else {"distributed_executor_backend": backend}

    def number(self, name: str, default: int) -> int:
        """What a change such as `seqs256` says, or else the default."""
        own = [int(c.removeprefix(name)) for c in self.changes if c.removeprefix(name).isdigit()]
        return own[0] if own else default

    def slots(self, args: argparse.Namespace) -> int:
        """Sequences that all engines together decode at once."""
        replicas = self.number("replicas", args.replicas) if self.path == "pool" else 1
        return replicas * self.number("seqs", args.max_num_seqs)

    def check(self, engine: str) -> None:
        """Refuse what an engine cannot do.

        Raises:
            ValueError: names it.
        """
        if engine in ("hf", "instant") and self.path == "bare":
            raise ValueError(f"--variants {self.name}: {engine} has no offline API; use engine and pool")


def parse(name: str) -> Variant:
    """A variant of its name, such as `bare+logprobs+seqs256`.

    Raises:
        ValueError: an unknown path or change.
    """
    path, *changes = name.split("+")
    if path not in ("bare", "engine", "pool"):
        raise ValueError(f"--variants {name}: '{path}' is none of bare, engine, pool")
    for change in changes:
        is_number = any(change.removeprefix(name).isdigit() for name in NUMBERS)
        if not is_number and change not in REQUEST | START:
            known = ", ".join([*REQUEST, *START, *(f"{number}NUMBER" for number in NUMBERS)])
            raise ValueError(f"--variants {name}: '{change}' is none of {known}")
    return Variant(path, frozenset(changes), name)


@dataclass(slots=True, frozen=True)
class Workload:
    """The requests of one call.

    Attributes:
        lengths: int `[prompts, n]`, how many tokens each sample has.
        split: each sample is a request of its own.
    """

    lengths: np.ndarray
    prompt_tokens: int
    split: bool
    seed: int

    @staticmethod
    def of(args: argparse.Namespace, variant: Variant) -> "Workload":
        """What the command line asks for. Long tails are log-normal with a median of a fifth of the limit."""
        shape = (args.prompts, args.n)
        lengths = np.full(shape, args.max_tokens)
        if args.lengths == "long":
            drawn = np.random.default_rng(args.seed).lognormal(np.log(args.max_tokens / 5), 0.8, shape)
            lengths = np.clip(drawn.astype(int), 1, args.max_tokens)
        return Workload(lengths, args.prompt_tokens, "split" in variant or args.lengths == "long", args.seed)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of a call."""
        return int(self.lengths.sum())

    def num_steps(self, slots: int) -> int:
        """Decoding steps that `slots` sequences at once need, each taking the next request as it ends."""
        ends = [0] * min(slots, self.lengths.size)
        for length in self.lengths.flat:
            heapq.heapreplace(ends, ends[0] + int(length))
        return max(ends)

    def prompts(self, call: int, vocab_size: int) -> list[list[int]]:
        """Prompts of one call; no other call has them."""
        rng = np.random.default_rng([self.seed, call])
        return rng.integers(3, vocab_size, (len(self.lengths), self.prompt_tokens)).tolist()

    def requests(self, call: int, vocab_size: int) -> list[tuple[int, list[int], int, int]]:
        """(prompt's number, its ids, samples, tokens of each) of every request."""
        prompts = enumerate(self.prompts(call, vocab_size))
        if self.split:
            return [(i, ids, 1, int(length)) for i, ids in prompts for length in self.lengths[i]]
        return [(i, ids, self.lengths.shape[1], int(self.lengths[i, 0])) for i, ids in prompts]


Run = Callable[[Workload, Variant, int, bool], float]  # seconds of one call; the last says whether to profile it
Arguments = dict[str, Any]
