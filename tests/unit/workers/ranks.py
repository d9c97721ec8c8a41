"""Tiny models, ragged batches, and trainer ranks as plain processes (gloo, no Ray)."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from rlpost.algos.algorithm import Algorithm
from rlpost.batch import Batch
from rlpost.host import free_port
from rlpost.metrics import Metric, Reduce, merge, scalars
from rlpost.trajectory import Provenance
from rlpost.workers.config import ActorConfig, CriticConfig, FSDPConfig, ModelConfig, OptimConfig, RefConfig
from rlpost.workers.dispatch import CustomLoss, assemble, plan_infer, plan_train
from rlpost.workers.engine.weights import gather
from rlpost.workers.model_worker import ModelWorker, WorkerSetup
from tests import tiny

VOCAB, EMBEDDING, TEMPERATURE = 37, 40, 0.7
SEED = 0  # of the shuffle


def write_model(folder: Path, tie: bool = True, **overrides: Any) -> Path:
    """A 2-layer Qwen3 with 4 heads and 2 key heads; the embedding has 3 rows more than the tokenizer."""
    shape = {"vocab_size": EMBEDDING, "max_position_embeddings": 128, "initializer_range": 0.2}
    return tiny.write_qwen3(folder, tie_word_embeddings=tie, **shape | overrides)


def ragged_batch() -> Batch:
    """5 groups of 2 ragged sequences; one has no response token, one consists of a single token."""
    lengths = [9, 21, 4, 13, 1, 17, 30, 6, 11, 2]
    responses = [5, 20, 2, 0, 0, 8, 29, 3, 10, 1]
    generator = torch.Generator().manual_seed(3)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.cat([torch.arange(n) >= n - r for n, r in zip(lengths, responses, strict=True)])
    total = int(cu_seqlens[-1])
    return Batch(
        cu_seqlens,
        {
            "token_ids": torch.randint(0, VOCAB, (total,), generator=generator),
            "provenance": torch.where(mask, int(Provenance.MODEL), int(Provenance.TEMPLATE)),
            "response_mask": mask,
            "advantages": torch.randn(total, generator=generator),
            "group": torch.arange(10) // 2,
        },
    )


def policy_loss(micro: Batch, output: Any) -> tuple[torch.Tensor, dict[str, Metric]]:
    """REINFORCE with an entropy bonus: both of the head's gradients are in it."""
    token = -(micro["advantages"] * output.logprobs + 0.05 * output.entropy)
    count = float(micro["response_mask"].sum())
    return (token * micro["loss_weights"]).sum(), {"tokens": Metric(count, reduce=Reduce.SUM)}


def value_loss(micro: Batch, output: Any) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Squared error to the advantages, as any target."""
    return ((output.values - micro["advantages"]).square() * micro["loss_weights"]).sum(), {}


def optim_config(**overrides: Any) -> OptimConfig:
    """A large epsilon, or Adam's first step would be the sign of rounding errors."""
    return OptimConfig(**({"lr": 1e-2, "eps": 1e-2} | overrides))


@dataclass
class Case:
    """One trained model: `roles` get an update or two, everything about them is kept."""

    path: str
    mode: str = "token-mean"
    sequence: int = 1
    fsdp_size: int = -1
    max_tokens: int = 40
    model: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    critic: bool = False
    save_to: str = ""
    load_from: str = ""

    def setup(self) -> WorkerSetup:
        common = {
            "ppo_mini_batch_size": 3,  # of 5 groups: two updates, the second smaller
            "ppo_max_token_len_per_gpu": self.max_tokens // self.sequence,
            "ulysses_sequence_parallel_size": self.sequence,
            "grad_clip": 1e9,
            "optim": optim_config(),
            "fsdp": FSDPConfig(fsdp_size=self.fsdp_size),
            "dtype": "float32",
        } | self.actor
        return WorkerSetup(
            model=tiny.model_info(Path(self.path), VOCAB),
            model_cfg=ModelConfig(path=self.path, **self.model),
            actor=ActorConfig(**common),
            ref=RefConfig(),
            critic=CriticConfig(**common) if self.critic else None,
            temperature=TEMPERATURE,
        )


def run_case(worker: ModelWorker, case: Case) -> dict[str, Any]:
    """Infer, train, infer again on this rank; everything another arrangement of ranks must reproduce."""
    setup = case.setup()
    worker.build(setup)
    if case.load_from:
        worker.load(Path(case.load_from))
    batch = ragged_batch()
    result: dict[str, Any] = {}
    for role in ("actor", "critic") if case.critic else ("actor",):
        result[f"{role}_before"] = infer(worker, role, batch)
        loss = CustomLoss(value_loss if role == "critic" else policy_loss, case.mode, 7.0)
        result[f"{role}_metrics"] = train(worker, role, batch, loss)
        engine = worker.engines[role]
        result[f"{role}_weights"] = {n: w.clone() for n, w in engine.named_weights(torch.float32)}
        result[f"{role}_gradients"] = {
            name: gather([engine.optimizer.state[p]["exp_avg"]], torch.float32, engine.device)[0]
            for name, p in engine.model.named_parameters()
            if p.requires_grad
        }
        result[f"{role}_after"] = infer(worker, role, batch)
    result["ref"] = infer(worker, "ref", batch)
    if case.save_to:
        worker.save(Path(case.save_to))
    return result


def infer(worker: ModelWorker, role: str, batch: Batch, rows: Sequence[int] | None = None) -> torch.Tensor:
    max_tokens, key = worker.setup.budget(role)
    parallel = worker.engines["actor"].parallel
    works, rows = plan_infer(
        batch,
        ("token_ids", "provenance"),
        range(len(batch)) if rows is None else rows,
        dp_size=parallel.dp_size,
        max_tokens=max_tokens,
        key=key,
    )
    return assemble(batch, rows, _collect(worker.infer(role, works[parallel.dp_rank]), parallel))


def train(worker: ModelWorker, role: str, batch: Batch, loss: CustomLoss | Algorithm) -> dict[str, float]:
    max_tokens, key = worker.setup.budget(role)
    parallel = worker.engines[role].parallel
    works = plan_train(
        batch,
        worker.setup.role_config(role),
        lambda mask, cu_seqlens: loss.loss_weights(role, mask, cu_seqlens),
        dp_size=parallel.dp_size,
        max_tokens=max_tokens,
        key=key,
        seed=SEED,
    )
    everyone: list[Any] = [None] * worker.world_size
    torch.distributed.all_gather_object(everyone, worker.train(role, works[parallel.dp_rank], loss))
    return scalars(merge(everyone))


def _collect(own: Any, parallel: Any) -> list[torch.Tensor]:
    """Results of the ranks that lead a sequence group, in order."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return [part for part in everyone if part is not None]


def in_ranks(
    world_size: int, job: Callable[[ModelWorker, Any], Any], argument: Any, folder: Path, gpus: bool = False
) -> Any:
    """`job(worker, argument)` in `world_size` processes, each with a GPU or none; what rank 0 returned, on the host."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = world_size, f"tcp://127.0.0.1:{free_port()}", gpus
    mp.spawn(_rank, (settings, job, argument, folder), nprocs=world_size)
    return torch.load(folder / "result.pt", weights_only=False, map_location="cpu")


def _rank(rank: int, settings: tuple[int, str, bool], job: Callable, argument: Any, folder: Path) -> None:
    world_size, address, gpus = settings
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank) if gpus else ""
    torch.set_num_threads(1)
    worker = ModelWorker(rank, world_size)
    worker.connect(address, 120.0)
    result = job(worker, argument)
    if rank == 0:
        torch.save(result, folder / "result.pt")
    worker.shutdown()


def run_cases(worker: ModelWorker, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: run_case(worker, case) for name, case in cases.items()}
