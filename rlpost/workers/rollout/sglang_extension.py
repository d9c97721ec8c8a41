"""What runs inside SGLang's scheduler processes: our sampler and our weight receiver.

SGLang starts its schedulers through a function that an `Engine` subclass may replace; ours registers the sampler first.
"""

import functools
import json
import mmap
import struct
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from rlpost.platform import platform
from rlpost.workers.rollout.sampling import draw, truncate, uniform
from rlpost.workers.weight_sync.reader import BucketReader

SAMPLING_BACKEND = "pytorch"  # the name under which ours takes the place of SGLang's, on every device
SEED = "rlpost_seed"  # in a request's custom_params
LOADER = f"{__name__}.receive"


def make_engine(vocab_size: int, **arguments: Any) -> Engine:
    """SGLang's engine whose schedulers sample with `PolicySampler`."""
    managers: list[Any] = []

    class PolicyEngine(Engine):
        run_scheduler_process_func = staticmethod(functools.partial(run_scheduler, vocab_size))

        @staticmethod
        def init_tokenizer_manager_func(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            manager, templates = init_tokenizer_manager(*args, **kwargs)
            managers.append(manager)
            return manager, templates

    try:
        return PolicyEngine(**arguments)
    except BaseException:
        for manager in managers:
            close_sockets(manager.send_to_scheduler)
        raise


def close_sockets(socket: Any) -> None:
    """Close a ZeroMQ socket and all of its context; the garbage collector would wait until the dead have read it."""
    socket.context.destroy(linger=0)


def run_scheduler(vocab_size: int, *args: Any, **kwargs: Any) -> Any:
    """A scheduler process, from its start to its end."""
    register_sampler_backend(SAMPLING_BACKEND, functools.partial(PolicySampler, vocab_size))
    return run_scheduler_process(*args, **kwargs)


class PolicySampler(Sampler):
    """Samples as `SamplingSpec` says: padded ids never, requests that have a seed by it.

    SGLang's own sampler looks at seeds only when all kernels are to be deterministic, which is slow, and cannot be had
    on CPU. Logprobs are those of the distribution that was sampled from, as vLLM's are.
    """

    def __init__(self, vocab_size: int):
        super().__init__()
        self._vocab_size = vocab_size

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One id a row, int32 `[B]`, from `logits_output.next_token_logits` `[B, V]`; see `Sampler.forward`.

        For SGLang a greedy request is one of temperature 1 and top_k 1.
        """
        logits = logits_output.next_token_logits.float()
        logits[:, self._vocab_size :] = -torch.inf
        if sampling_info.is_all_greedy:
            ids, logprobs = logits.argmax(dim=-1), logits.log_softmax(dim=-1)
        else:
            logits = logits / sampling_info.temperatures
            if sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling:
                logits = truncate(logits, sampling_info.top_ks[:, None], sampling_info.top_ps[:, None])
            logprobs = logits.log_softmax(dim=-1)
            ids = draw(logprobs, self._places(sampling_info, positions))
        if return_logprob:
            logits_output.next_token_logprobs = logprobs.gather(1, ids[:, None])[:, 0]
        return ids.to(torch.int32)

    def _places(self, sampling_info: Any, positions: torch.Tensor) -> torch.Tensor:
        """float64 `[B]` in [0, 1), by the requests' seeds; by the engine's own where they have none."""
        free = torch.rand(len(positions), dtype=torch.float64, device=positions.device)
        if sampling_info.custom_params is None:
            return free
        seeds = [-1 if parameters is None else parameters[SEED] for parameters in sampling_info.custom_params]
        pinned = torch.tensor(seeds, dtype=torch.int64, pin_memory=positions.device.type != "cpu")
        # the scheduler runs ahead of the device, and must not wait for it
        on_device = pinned.to(positions.device, non_blocking=True)
        return torch.where(on_device < 0, free, uniform(on_device, positions))


class SeedCarrier(CustomLogitProcessor):
    """Does nothing: only with a logit processor does SGLang hand a request's custom parameters to the sampler."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        """The logits as they are."""
        return logits


def message(content: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """What `receive` understands: a bucket, or where to put the digest, dressed as a tensor."""
    return [("rlpost", torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8))]


def receive(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's `custom_weight_loader`: load one bucket (`bucket`), or end the update (`digest`).

    The digest of all bytes read goes, as int64, to place `slot` of the memory that `digest` describes: what a loader
    returns does not reach the caller.
    """
    content = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    reader = reader_of(next(model.parameters()).device)
    if "bucket" in content:
        model.load_weights(reader.read(content["bucket"]))
        platform().synchronize()  # the sender fills the bucket anew once this returns
    else:
        with open(content["digest"]["path"], "r+b") as file:
            places = mmap.mmap(file.fileno(), content["digest"]["nbytes"])
        struct.pack_into("<q", places, 8 * content["slot"], reader.close())


@functools.cache
def reader_of(device: torch.device) -> BucketReader:
    """This process's reader."""
    return BucketReader(device)
