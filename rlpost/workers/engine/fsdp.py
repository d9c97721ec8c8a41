"""`FSDPEngine`: one model under FSDP2 `fully_shard`, on GPUs and on CPU, from one rank up."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from rlpost import heartbeat
from rlpost.algos.ragged import fetch
from rlpost.batch import Batch, send
from rlpost.metrics import Metric, Metrics, Reduce, merge
from rlpost.platform import platform
from rlpost.trajectory import Provenance
from rlpost.workers.config import ModelConfig, TrainRoleConfig
from rlpost.workers.engine import attention, checkpoint, compiling, head, optim
from rlpost.workers.engine.base import MicroLoss, Output, TrainEngine
from rlpost.workers.engine.loading import load_sharded
from rlpost.workers.engine.parallel import make_parallel
from rlpost.workers.engine.scaling import LossScaler
from rlpost.workers.engine.weights import WeightNames, named_weights


class FSDPEngine(TrainEngine):
    """See `TrainEngine`. The default process group must exist.

    Args:
        path: checkpoint folder.
        model_cfg: the `model` section.
        cfg: the role's section.
        vocab_size: ids that may be sampled; larger ids are masked in the logprob head.
        temperature: of the sampling.
        tokenizer_path: folder whose tokenizer an export takes.
        critic: a value head instead of logprobs.
        train: with an optimizer and float32 master weights; without it weights are kept in the compute dtype.
        total_updates: optimizer updates of the whole run, for a decaying learning rate.
        seed: of weights that no checkpoint has (LoRA).
    """

    def __init__(
        self,
        path: str,
        model_cfg: ModelConfig,
        cfg: TrainRoleConfig,
        *,
        vocab_size: int,
        temperature: float,
        tokenizer_path: str,
        critic: bool = False,
        train: bool = True,
        total_updates: int | None = None,
        seed: int = 0,
    ):
        here = platform()
        self.device = torch.device("cpu") if here.kind == "cpu" else torch.device("cuda", torch.cuda.current_device())
        self.dtype = here.dtype(cfg.dtype)
        self.parallel = make_parallel(self.device.type, cfg.fsdp.fsdp_size, cfg.ulysses_sequence_parallel_size)
        self.temperature = temperature
        self.updates = 0
        self.skipped = False
        self.scaler = LossScaler.of(self.dtype)
        self._cfg, self._path, self._tokenizer_path, self._critic = cfg, path, tokenizer_path, critic
        self._vocab_size, self._total_updates = vocab_size, total_updates
        kernel = attention.choose_kernel(model_cfg.attn_implementation, self.device.type, self.dtype)
        self.model = load_sharded(
            path,
            model_cfg,
            critic=critic,
            attention=attention.register(kernel),
            vocab_size=vocab_size,
            parallel=self.parallel,
            device=self.device,
            master_dtype=torch.float32 if train else self.dtype,
            compute_dtype=self.dtype,
            reshard_after_forward=self._reshards(),
            seed=seed,
        )
        self._names = WeightNames(self.model)
        if not train:
            self.model.requires_grad_(False)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if train:
            optim.learning_rate(cfg.optim.lr_warmup_steps, cfg.optim, total_updates)  # fails now rather than later
            self.optimizer = optim.make_optimizer(self._parameters, cfg.optim)

    # --- passes ---

    @torch.no_grad()
    def forward(
        self,
        micro_batches: list[Batch],
        entropy: bool = False,
        *,
        temperature: float | None = None,
        adapter: bool = True,
    ) -> list[Output]:
        """See `TrainEngine.forward`.

        Args:
            micro_batches: need `token_ids`; with `provenance`, only MODEL tokens get a logprob.
            entropy: also compute it.
            temperature: in place of the engine's own.
            adapter: False for the model before its LoRA.
        """
        self.model.eval()
        with nullcontext() if adapter else self.model.adapter_off():
            outputs = []
            for micro_batch in micro_batches:
                with record_function("rlpost.forward"):
                    outputs.append(self._run(micro_batch, entropy, temperature)[1])
                heartbeat.beat()
        self._reshard()
        return [_to_host(output) for output in outputs]

    def train_step(self, micro_batches: list[Batch], loss: MicroLoss) -> Metrics:
        """See `TrainEngine.train_step`. Metrics come from one rank of each sequence group."""
        own = None
        while own is None:  # once, but for overflows of float16
            parts = self.accumulate(micro_batches, loss)
            with record_function("rlpost.update"):
                own = self.update()
            heartbeat.beat()
        return merge([*parts, own]) if self.parallel.leads_sequence else {}

    def accumulate(
        self, micro_batches: Sequence[Batch], loss: MicroLoss, begin: Callable[[Batch], Batch] | None = None
    ) -> list[Metrics]:
        """Forward and backward of every micro-batch: gradients, summed over ranks, for `update`; metrics of `loss`.

        Gradients are `scaler.scale` times too large. `begin` sees each micro-batch before its forward pass and gives
        what is run.
        """
        self.model.train()
        self._bad_losses = torch.zeros((), device=self.device)
        alone = torch.distributed.get_world_size() == 1
        parts: list[Metrics] = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            if begin is not None:
                micro_batch = begin(micro_batch)
            # a rank without others needs no reduction of its own for each: gradients add up where they are
            self.model.set_requires_gradient_sync(not alone or number == len(micro_batches))
            with record_function("rlpost.forward"):
                micro, output, total = self._run_for_loss(micro_batch)
            with record_function("rlpost.loss"):
                if len(micro):
                    share, metrics = loss(micro, output)
                    total = share + total
                    parts.append(metrics)
                self._bad_losses += ~total.detach().isfinite()
            with record_function("rlpost.backward"):
                total.backward(torch.full_like(total, self.scaler.scale))
            heartbeat.beat()
        self._reshard()
        return fetch(parts)

    def _run_for_loss(self, batch: Batch) -> tuple[Batch, Output, Tensor]:
        """The micro-batch on the device, its output, and a 0 through which every parameter gets a gradient, so that
        all ranks reduce the same ones even where no token is trained."""
        raw, output = self._run(batch, entropy=True, temperature=None)
        return batch.to(self.device), output, 0.0 * raw.sum()

    def _run(self, batch: Batch, entropy: bool, temperature: float | None) -> tuple[Tensor, Output]:
        """This rank's values by source, and the `Output` by token. An empty batch runs as one sequence of padding.

        Whatever follows from the batch alone is worked out on the host, so that nothing here waits for the device.
        """
        group, size = self.parallel.sequence_group, self.parallel.sequence_size
        num_tokens = batch.num_tokens
        padding = -num_tokens % size or (size if num_tokens == 0 else 0)
        lengths = torch.nn.functional.pad(batch.seqlens, (0, 1), value=padding) if padding else batch.seqlens
        ends = lengths.cumsum(0)
        cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
        positions = torch.arange(num_tokens + padding) - (ends - lengths).repeat_interleave(lengths)
        token_ids, targets = self._targets(batch, padding)
        part = self._slice(num_tokens + padding)
        rows = head.predicts(cu_seqlens, targets, num_tokens + padding)[part].nonzero().squeeze(-1)
        bounds = self._send(cu_seqlens.int())
        if self.model.compiled:
            compiling.varies(bounds)
        packing = attention.Packing(bounds, max(2, int(lengths.max())), group)
        main, extra = self.model(
            self._send(token_ids[part]), self._send(positions[part]), packing,
            self._send(rows), self._send(head.next_tokens(token_ids)[part][rows]),
            self.temperature if temperature is None else temperature, entropy,
        )  # fmt: skip
        last = self._send(ends - 1)

        def by_token(by_source: Tensor) -> Tensor:
            return head.to_predicted(attention.gather_slices(by_source, group), last)[:num_tokens]

        if self._critic:
            return main, Output(values=by_token(main))
        return main, Output(logprobs=by_token(main), entropy=None if extra is None else by_token(extra))

    def _send(self, tensor: Tensor) -> Tensor:
        return send(tensor, self.device)

    def _targets(self, batch: Batch, padding: int) -> tuple[Tensor, Tensor | None]:
        """Padded token ids, and which of them get a logprob (None: all); on the host."""
        token_ids, targets = batch["token_ids"], None
        if "provenance" in batch:
            targets = batch["provenance"] == Provenance.MODEL
        scored = token_ids if targets is None else token_ids[targets]
        if not self._critic and scored.numel() and int(scored.max()) >= self._vocab_size:
            raise ValueError(
                f"token id {int(scored.max())} has probability 0: only ids below {self._vocab_size} (the tokenizer's) "
                "are ever sampled. Do tokenizer and checkpoint belong together?"
            )
        if targets is not None:
            targets = torch.nn.functional.pad(targets, (0, padding))
        return torch.nn.functional.pad(token_ids, (0, padding)), targets

    def _slice(self, num_tokens: int) -> slice:
        """This rank's part of a pack."""
        group, size = self.parallel.sequence_group, self.parallel.sequence_size
        rank = 0 if group is None else torch.distributed.get_rank(group)
        return slice(rank * num_tokens // size, (rank + 1) * num_tokens // size)

    def update(self) -> Metrics | None:
        """Clip and step, unless a loss of any rank or the gradient is not finite; then forget the gradient.

        None, on all ranks: only the gradient was not finite, and its scale may be to blame, which is smaller now; the
        same micro-batches are to be accumulated again.
        """
        torch.distributed.all_reduce(self._bad_losses)
        norm, bad_losses = torch.stack(
            [optim.gradient_norm(self._parameters, self.parallel.shard_group), self._bad_losses]
        ).tolist()
        scale = self.scaler.scale
        norm /= scale
        rate = optim.learning_rate(self.updates, self._cfg.optim, self._total_updates)
        finite = math.isfinite(norm) and bad_losses == 0
        if not finite and bad_losses == 0 and self.scaler.shrink():
            self.optimizer.zero_grad(set_to_none=True)
            return None
        self.skipped = not finite
        scaling = self.scaler.settle(finite)
        if finite:
            optim.clip_(self._parameters, norm, self._cfg.grad_clip, scale)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            with record_function("rlpost.optimizer"):
                self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        if torch.distributed.get_rank() != 0:
            return {}  # the same on all ranks; counted once
        return {
            "grad_norm": Metric(norm) if finite else Metric(0.0, 0.0),
            "lr": Metric(rate),
            "updates": Metric(float(finite), reduce=Reduce.SUM),
            "skipped_updates": Metric(float(not finite), reduce=Reduce.SUM),
            "nonfinite_losses": Metric(bad_losses / self.parallel.sequence_size, reduce=Reduce.SUM),
            **scaling,
        }

    def _reshards(self) -> bool:
        """Whether gathered weights are freed after every pass of a layer; if not, the end of `accumulate` does it."""
        setting = self._cfg.fsdp.reshard_after_forward
        return self.parallel.shard_group.size() > 1 if setting is None else setting

    def _reshard(self) -> None:
        """The root keeps its gathered weights after a pass without backward: free them."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- weights and state ---

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.named_weights`."""
        return named_weights(self._names, dtype, self.device)

    def to(self, device: str, *, params: bool = True, optimizer: bool = True) -> None:
        """See `TrainEngine.to`; nothing to do on a CPU."""
        if self.device.type == "cpu" or not (params or optimizer):
            return
        target = torch.device("cpu") if device == "cpu" else self.device
        if params:
            self.model.to(target, non_blocking=True)  # so the host copy is in pinned memory
        if optimizer and hasattr(self, "optimizer"):
            optim.move_state(self.optimizer, target)
        platform().synchronize()
        platform().empty_cache()

    def save(self, folder: Path) -> dict[str, str]:
        """See `TrainEngine.save`."""
        return checkpoint.save(folder, self.model, self.optimizer, self.scaler, self.updates)

    def load(self, folder: Path) -> None:
        """See `TrainEngine.load`."""
        self.updates = checkpoint.load(folder, self.model, self.optimizer, self.scaler)

    def export_hf(self, folder: Path) -> None:
        """See `TrainEngine.export_hf`. Weights are written in the compute dtype."""
        checkpoint.export_hf(
            folder, self.named_weights(self.dtype), self.model.model, self._path, self._tokenizer_path, self.dtype
        )


def _to_host(output: Output) -> Output:
    def move(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float().cpu()

    return Output(logprobs=move(output.logprobs), entropy=move(output.entropy), values=move(output.values))
