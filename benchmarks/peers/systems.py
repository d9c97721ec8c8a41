"""How each system is told to do a cell: the fastest settings it documents first, then what is known to run."""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.cell import MAX_PROMPT, Cell
from benchmarks.peers.steps import Step, rlpost_steps, trl_steps, verl_steps
from rlpost.tracking.jsonl import read_jsonl

REWARD_FILE = Path(__file__).with_name("reward.py")
LEARNING_RATE = 1e-6


class System(ABC):
    """A trainer that runs as a process of its own.

    Attributes:
        packages: whose versions are told.
        variants: tried in order until one trains.
        alone: a second one on the same host would disturb it, on another GPU too.
    """

    name: str
    packages: tuple[str, ...]
    variants: tuple[str, ...] = ("fast", "plain")
    environment: dict[str, str] = {}
    alone = False

    def __init__(self, cell: Cell, overrides: Sequence[str] = ()):
        self.cell, self.overrides = cell, list(overrides)

    @abstractmethod
    def command(self, variant: str, folder: Path) -> list[str]:
        """The command line; what it writes goes below `folder`."""

    @abstractmethod
    def steps(self, folder: Path) -> list[Step]:
        """Of a run that writes into `folder`, as far as it has come; its output is in `log.txt`."""


class Verl(System):
    """verl 0.9: FSDP2, remove-padding, dynamic batches; fast adds fused kernels, Liger and no recomputation."""

    name = "verl"
    packages = ("verl", "vllm", "torch", "transformers", "liger-kernel")
    alone = True  # its weights go through a socket in /tmp with the number of Ray's job, which every first job has
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0"}

    def command(self, variant: str, folder: Path) -> list[str]:
        cell, fast = self.cell, variant == "fast"
        actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
        return [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            "algorithm.adv_estimator=grpo",
            f"data.train_files={cell.prompts}.parquet",
            f"data.val_files={cell.prompts}.parquet",
            f"data.train_batch_size={cell.num_prompts}",
            f"data.max_prompt_length={MAX_PROMPT}",
            f"data.max_response_length={cell.lengths.longest}",
            "data.shuffle=False",
            "data.dataloader_num_workers=0",
            f"{model}.path={cell.model}",
            f"{model}.use_remove_padding=True",
            f"{model}.enable_gradient_checkpointing={not fast}",
            f"{model}.use_fused_kernels={fast}",
            f"{model}.fused_kernel_options.impl_backend=torch",
            f"{model}.use_liger={fast}",
            f"{actor}.strategy=fsdp2",
            f"{actor}.fsdp_config.reshard_after_forward=False",
            f"{actor}.ppo_mini_batch_size={cell.num_prompts}",
            f"{actor}.use_dynamic_bsz=True",
            f"{actor}.ppo_max_token_len_per_gpu={cell.micro_tokens}",
            f"{actor}.use_kl_loss=False",
            f"{actor}.entropy_coeff=0",
            f"{actor}.optim.lr={LEARNING_RATE}",
            f"{rollout}.name=vllm",
            f"{rollout}.n={cell.num_samples}",
            f"{rollout}.tensor_model_parallel_size=1",
            f"{rollout}.gpu_memory_utilization={cell.gpu_memory_utilization}",
            f"{rollout}.enforce_eager=False",
            f"{rollout}.ignore_eos={cell.lengths.fixed}",
            f"{rollout}.max_num_seqs={cell.num_sequences}",
            f"{rollout}.max_model_len={MAX_PROMPT + cell.lengths.longest}",
            f"{rollout}.calculate_log_probs=True",
            f"{rollout}.log_prob_use_dynamic_bsz=True",
            f"{rollout}.log_prob_max_token_len_per_gpu={2 * cell.micro_tokens}",
            f"{rollout}.agent.num_workers=4",
            f"reward.custom_reward_function.path={REWARD_FILE}",
            "reward.custom_reward_function.name=compute_score",
            "reward.num_workers=4",
            'trainer.logger=["console"]',
            "trainer.nnodes=1",
            "trainer.n_gpus_per_node=1",
            "trainer.total_epochs=1",
            f"trainer.total_training_steps={cell.steps}",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            f"trainer.default_local_dir={folder}/checkpoints",
            f"hydra.run.dir={folder}/hydra",
            *self.overrides,
        ]

    def steps(self, folder: Path) -> list[Step]:
        return verl_steps(_log(folder), self.cell.num_sequences)


class Trl(System):
    """TRL 1.16: colocated vLLM that sleeps, chunked logprob head (always on), fast with Liger and no recomputation."""

    name = "trl"
    packages = ("trl", "vllm", "torch", "transformers", "accelerate", "liger-kernel")
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}

    def micro_sequences(self) -> int:
        """TRL pads: sequences a pass, of which a step is a multiple, within the token budget at the longest answer."""
        total = self.cell.num_sequences
        most = max(1, min(total, self.cell.micro_tokens // self.cell.lengths.longest))
        return next(count for count in range(most, 0, -1) if total % count == 0)

    def config(self, variant: str, folder: Path) -> dict[str, Any]:
        """Fields of `GRPOConfig`."""
        cell, micro = self.cell, self.micro_sequences()
        common = {
            "output_dir": str(folder / "trl"),
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": cell.num_sequences // micro,
            "num_generations": cell.num_samples,
            "max_completion_length": cell.lengths.longest,
            "max_steps": cell.steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "beta": 0.0,
            "shuffle_dataset": False,
            "report_to": [],
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "gradient_checkpointing": variant != "fast",
        }
        if cell.engine != "vllm":
            return common | {"use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"}}
        engine = {"detokenize": False} | ({"ignore_eos": True} if cell.lengths.fixed else {})
        return common | {
            "bf16": True,
            "use_liger_kernel": variant == "fast",
            # master weights and optimizer in float32, as in the other two: TRL's default for a path
            "model_init_kwargs": {"dtype": "float32", "attn_implementation": "flash_attention_2"},
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": True,
            "vllm_gpu_memory_utilization": cell.gpu_memory_utilization,
            "vllm_max_model_length": MAX_PROMPT + cell.lengths.longest,
            "generation_kwargs": engine,
        }

    def command(self, variant: str, folder: Path) -> list[str]:
        config = self.config(variant, folder)
        for override in self.overrides:
            key, _, value = override.partition("=")
            config[key] = json.loads(value)
        request = {"model": self.cell.model, "prompts": f"{self.cell.prompts}.jsonl", "config": config}
        (folder / "request.json").write_text(json.dumps(request, indent=1))
        return [sys.executable, "-m", "benchmarks.peers.trl_train", str(folder / "request.json")]

    def steps(self, folder: Path) -> list[Step]:
        return trl_steps(_log(folder), self.cell.num_sequences)


class Rlpost(System):
    """This project: keys of the command line only; the parity gate is on."""

    name = "rlpost"
    packages = ("vllm", "torch", "transformers")

    def command(self, variant: str, folder: Path) -> list[str]:
        cell = self.cell
        keys = [
            "algo=grpo",
            "algo.use_kl_loss=false",
            "model=hf",
            f"model.path={cell.model}",
            f"model.enable_gradient_checkpointing={str(variant != 'fast').lower()}",
            "data=files",
            f"data.train_files={cell.prompts}.jsonl",
            f"data.train_batch_size={cell.num_prompts}",
            f"data.max_prompt_length={MAX_PROMPT}",
            f"data.max_response_length={cell.lengths.longest}",
            "data.shuffle=false",
            "reward.terms.accuracy.fn=benchmarks.peers.reward.score_group",
            f"rollout={cell.engine}",
            f"rollout.n={cell.num_samples}",
            f"actor.ppo_mini_batch_size={cell.num_prompts}",
            f"actor.ppo_max_token_len_per_gpu={cell.micro_tokens}",
            f"actor.optim.lr={LEARNING_RATE}",
            f"trainer.total_training_steps={cell.steps}",
            "trainer.export_hf=false",
            "trainer.resume=never",
            "tracking.logger=[console,jsonl]",
            f"hydra.run.dir={folder}/run",
        ]
        if cell.lengths.fixed:
            keys.append(f"model.tokenizer_path={cell.no_eos}")
        if cell.engine == "vllm":
            keys += [
                f"rollout.max_num_seqs={cell.num_sequences}",
                f"rollout.gpu_memory_utilization={cell.gpu_memory_utilization}",
                "rollout.logprobs_every=16",
            ]
        return [sys.executable, "-m", "rlpost.main", *keys, *self.overrides]

    def steps(self, folder: Path) -> list[Step]:
        path = folder / "run" / "metrics.jsonl"
        return rlpost_steps(read_jsonl(path), self.cell.num_sequences) if path.is_file() else []


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Verl, Trl, Rlpost)}


def _log(folder: Path) -> list[str]:
    path = folder / "log.txt"
    return path.read_text(errors="replace").splitlines() if path.is_file() else []
