"""Whether the checkpoint that `trainer.resume` means can be continued: told before engines and ranks start."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpost.algos.config import WITH_CRITIC
from rlpost.config import Config
from rlpost.data import PromptStream
from rlpost.trainer.config import AsyncTrainerConfig
from rlpost.trainer.state import CheckpointStore


def check_resume(checkpoints: CheckpointStore, cfg: Config, stream: PromptStream, total_steps: int) -> Path | None:
    """The checkpoint, once it was held against the config and the data of this run; None for a fresh start.

    Raises:
        ValueError: no checkpoint at that path, or all that keeps this run from continuing it.
    """
    folder = checkpoints.find(cfg.trainer.resume)
    if folder is None:
        return None
    problems = list(_problems(checkpoints.read(folder), cfg, stream, total_steps))
    if problems:
        raise ValueError(
            f"trainer.resume={cfg.trainer.resume}: {folder} cannot be continued: "
            + "; ".join(problems)
            + ". Restore what it was, or start anew with trainer.resume=never (from its weights: "
            "model.path=<run folder>/hf, where the run has ended)"
        )
    return folder


def _problems(saved: Mapping[str, Any], cfg: Config, stream: PromptStream, total_steps: int) -> Iterator[str]:
    if saved["step"] > total_steps:
        yield (
            f"it was written after step {saved['step']}, but the run ends at step {total_steps} "
            "(trainer.total_training_steps or trainer.total_epochs)"
        )
    yield from _other_tensors(saved["config"], cfg)
    asynchronous, was = isinstance(cfg.trainer, AsyncTrainerConfig), "buffer" in saved["source"]
    if asynchronous != was:
        kinds = {True: "trainer=fully_async, with groups in flight", False: "trainer=colocated"}
        yield f"it is one of {kinds[was]}, not of {kinds[asynchronous].partition(',')[0]}"
        return
    if was:
        sizes = {len(group.trajectories) for _, _, group in saved["source"]["buffer"]["slots"] if group is not None}
        if sizes - {cfg.rollout.n}:
            yield f"rollout.n={cfg.rollout.n}, but it holds finished groups of {', '.join(map(str, sorted(sizes)))}"
    yield from stream.differences((saved["source"]["prompts"] if was else saved["source"])["stream"])


def _other_tensors(before: Mapping[str, Any], cfg: Config) -> Iterator[str]:
    """What decides which tensors a checkpoint holds."""
    rank, was = cfg.model.lora_rank, before["model"]["lora_rank"]
    if rank != was:
        yield f"model.lora_rank={rank}, but it was written with {was}"
    elif rank and cfg.model.target_modules != before["model"]["target_modules"]:
        yield (
            f"model.target_modules={cfg.model.target_modules}, but it was written with "
            f"{before['model']['target_modules']}"
        )
    estimator = before["algo"]["adv_estimator"]
    if cfg.algo.needs_critic and estimator not in WITH_CRITIC:
        yield f"algo.adv_estimator={cfg.algo.adv_estimator} needs a critic, and {estimator}, of which it is, had none"
