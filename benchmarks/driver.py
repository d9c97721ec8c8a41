"""What the driver itself does in a step: its time and bytes, with engines and trainer ranks that answer at once.

    python -m benchmarks.driver [--sequences 256 1024 4096] [--tokens 2048 8192] [--n 8] [--ranks 8] [--steps 3]
                                [--save-rollouts] [--profile] [--out DIR]

Source, pool, workflow workers with a reward, batch, advantages, dispatch, gate, ledger and reporter are a run's own.
Engines return answers that were made before, and one process plays all trainer ranks. `cpu_s` is processor time of the
driver's process, threads included, so that what else the machine does matters little; all figures are means a step.
"""

import argparse
import asyncio
import cProfile
import inspect
import logging
import pickle
import pstats
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.common import write
from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig
from rlpost.metrics import Metric, Metrics, Reduce
from rlpost.platform import RAY_ENV, platform
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.tasks.quickstart import character_tokenizer
from rlpost.tracking.tracking import Tracking
from rlpost.trainer.colocated import ColocatedSource
from rlpost.trainer.config import TrainerConfig
from rlpost.trainer.gate import ParityGate
from rlpost.trainer.history import LEDGER
from rlpost.trainer.ledger import Ledger
from rlpost.trainer.replay import ReplayStore
from rlpost.trainer.report import Reporter
from rlpost.trainer.run_state import RunState
from rlpost.trainer.state import CheckpointStore
from rlpost.trainer.trainer import Trainer
from rlpost.trainer.update import Updates
from rlpost.trajectory import Prompt, Status
from rlpost.workers.config import ActorConfig, ModelConfig, RolloutConfig
from rlpost.workers.dispatch import InferWork, TrainWork
from rlpost.workers.group import WorkerGroup
from rlpost.workers.model import ModelInfo
from rlpost.workers.model_worker import WorkerSetup
from rlpost.workers.placement import Placement
from rlpost.workers.rollout.base import ENGINES, Completion, SamplingSpec
from rlpost.workers.rollout.hf import HFEngine
from rlpost.workers.rollout.pool import RolloutPool

PROMPT_TOKENS = 256
MINI_BATCHES = 4  # so that old logprobs are inferred, as in most recipes
WARM_UP = 1  # steps that are not counted
ENGINE = "canned"


class CannedEngine(HFEngine):
    """Answers at once, always with the same tokens, of which the trainer is as sure as the engine."""

    async def start(self) -> None:
        """Load nothing."""

    async def ping(self) -> None:
        """There is nothing that could hang."""

    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec, seed: int, request_id: str, n: int = 1
    ) -> list[Completion]:
        """`n` answers as long as they may be."""
        tokens = np.arange(spec.max_tokens, dtype=np.int64) % spec.vocab_size
        sampled = np.zeros(spec.max_tokens, np.float32), np.full(spec.max_tokens, 0, np.int32)
        return [Completion(token_ids=tokens, logprobs=sampled[0], versions=sampled[1], status=Status.LENGTH)] * n

    async def shutdown(self) -> None:
        """Nothing was started."""


def register() -> None:
    """Make the engine known; every Ray worker runs this first."""
    ENGINES.register(ENGINE)(CannedEngine)


@ray.remote(num_cpus=0)
class Rank:
    """Plays any number of `ModelWorker`s, and counts the bytes that reach them."""

    def __init__(self) -> None:
        self._bytes = 0

    def infer(self, role: str, work: InferWork, temperature: float | None = None) -> torch.Tensor:
        """Zeros."""
        self._bytes += _tensor_bytes(work.rows.columns())
        return torch.zeros(work.rows.num_tokens)

    def train(self, role: str, work: TrainWork, objective: Any) -> Metrics:
        """The bytes since the last call."""
        received, self._bytes = self._bytes + _tensor_bytes(work.rows.columns()), 0
        received += sum(step.loss_weights.nbytes for step in work.steps)
        return {"actor/received_bytes": Metric(received, reduce=Reduce.SUM)}

    def save(self, folder: Path) -> dict[str, str]:
        """There is no state."""
        return {}


class NoSync:
    """Plays `WeightSync`."""

    async def push(self, version: int) -> Metrics:
        """The engines need no weights."""
        return {}


class Prompts:
    """Endless prompts of `PROMPT_TOKENS`, as a `PromptStream` hands them out."""

    def __init__(self) -> None:
        self._next = 0

    def next(self, n: int) -> list[Prompt]:
        """The next `n`."""
        indices, self._next = range(self._next, self._next + n), self._next + n
        token_ids = np.ones(PROMPT_TOKENS, np.int64)
        return [Prompt(id=f"p/0/{i}", index=i, token_ids=token_ids, text="?", data_source="p") for i in indices]

    def state_dict(self) -> dict[str, int]:
        """The cursor."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore it."""
        self._next = state["next"]


class Clock:
    """Processor and wall time spent in calls of watched objects, by name."""

    def __init__(self) -> None:
        self.cpu_s: Counter[str] = Counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.cpu_s[name] += time.process_time() - start

    def watch(self, target: Any, **names: str) -> Any:
        """`target`, whose methods among `names` are timed under the name given."""
        return _Watched(target, self, names)


class _Watched:
    def __init__(self, target: Any, clock: Clock, names: dict[str, str]):
        self._target, self._clock, self._names = target, clock, names

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._target, attribute)
        name = self._names.get(attribute)
        return value if name is None else _timed(value, self._clock, name)


def _timed(call: Callable, clock: Clock, name: str) -> Callable:
    if inspect.iscoroutinefunction(call):

        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            with clock(name):
                return await call(*args, **kwargs)

        return timed_async

    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock(name):
            return call(*args, **kwargs)

    return timed


class Recorder:
    """A tracker that notes what each step took."""

    def __init__(self, clock: Clock):
        self._clock, self._last = clock, time.process_time()
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """One step has ended."""
        now = time.process_time()
        self.steps.append({"total": now - self._last, **self._clock.cpu_s, **scalars})
        self._last = now
        self._clock.cpu_s.clear()

    def note(self, text: str) -> None:
        """Nobody watches."""

    def close(self, failed: bool = False) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size of a step."""

    sequences: int
    tokens: int  # of a sequence
    n: int
    ranks: int
    save_rollouts: bool

    @property
    def groups(self) -> int:
        """Prompts a step."""
        return self.sequences // self.n


async def run(case: Case, steps: int, info: ModelInfo, folder: Path) -> list[dict[str, float]]:
    """What each step of a run with these sizes took."""
    clock, max_tokens = Clock(), case.tokens - PROMPT_TOKENS
    recorder = Recorder(clock)
    reward = RewardConfig(terms={"length": RewardTermConfig(fn="length", kwargs={"max_length": case.tokens})})
    where = Placement(num_ranks=1, num_replicas=1, tensor_parallel=1, platform=platform())
    rollout = RolloutConfig(name=ENGINE, n=case.n, dtype="float32", num_workers=2)
    pool = RolloutPool(
        rollout, info, reward, where, seed=1, max_prompt_length=PROMPT_TOKENS, max_response_length=max_tokens
    )
    actor = ActorConfig(
        ppo_mini_batch_size=max(1, case.groups // MINI_BATCHES), ppo_max_token_len_per_gpu=max(16384, case.tokens)
    )
    setup = WorkerSetup(model=info, model_cfg=ModelConfig(path=info.path), actor=actor)
    rank = Rank.remote()
    group = WorkerGroup([rank] * case.ranks, setup)
    workers = clock.watch(group, infer="infer", train="train")
    algorithm = Algorithm(AlgoConfig(), max_response_length=max_tokens)
    ledger, tokenizer = Ledger(folder / LEDGER), character_tokenizer()
    source = ColocatedSource(
        stream=Prompts(),
        algorithm=algorithm,
        pool=pool,
        trainers=group,
        sync=NoSync(),
        spec=SamplingSpec(temperature=1.0, max_tokens=max_tokens, vocab_size=info.vocab_size),
        n=case.n,
        filter_groups=FilterGroupsConfig(),
        reward=reward,
        sleep=False,
        ledger=ledger,
    )
    reporter = Reporter(
        Tracking([recorder]),
        folder,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        rollout_dir=folder / "rollouts" if case.save_rollouts else None,
    )
    cfg = TrainerConfig(resume="never", export_hf=False, save_freq=-1, val_before_train=False)
    trainer = Trainer(
        cfg,
        algorithm=clock.watch(algorithm, advantages="advantages"),
        source=clock.watch(source, take="take"),
        workers=workers,
        updates=Updates(cfg, algorithm, workers, ReplayStore(folder, {}), reporter),
        gate=ParityGate(workers, 1e-3, 16, case.n, 1.0),
        evaluator=None,
        reporter=clock.watch(reporter, rollouts="rollouts"),
        state=RunState(CheckpointStore(folder / "checkpoints", None), source, algorithm, group, reporter, ledger),
        ledger=ledger,
        groups_per_step=case.groups,
        n=case.n,
        total_steps=WARM_UP + steps,
    )
    await pool.start()
    try:
        await trainer.fit()
        groups = await source.take(case.groups)
        received = _pickled_bytes(groups)
    finally:
        await pool.shutdown()
        ray.kill(rank)
        ledger.close()
    return [step | {"rollout_bytes": received} for step in recorder.steps[WARM_UP:]]


def row(case: Case, steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Means of a case, as a row of the table."""

    def mean(name: str) -> float:
        return sum(step.get(name, 0.0) for step in steps) / len(steps)

    parts = {f"{name} cpu_s": mean(name) for name in ("take", "infer", "advantages", "train", "rollouts")}
    return {
        "sequences": case.sequences,
        "tokens each": case.tokens,
        "saved": "yes" if case.save_rollouts else "no",
        "wall_s": mean("timing_s/step"),
        "driver cpu_s": mean("total"),
        **parts,
        "rest cpu_s": mean("total") - sum(parts.values()),
        "rollouts in MB": mean("rollout_bytes") / 1e6,
        "to trainers MB": mean("actor/received_bytes") / 1e6,
    }


def _tensor_bytes(columns: dict[str, torch.Tensor]) -> int:
    return sum(column.nbytes for column in columns.values())


def _pickled_bytes(value: Any) -> int:
    buffers: list[int] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw().nbytes))
    return len(head) + sum(buffers)


def _model(folder: Path) -> ModelInfo:
    """Only the tokenizer is there; nobody loads weights."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    return ModelInfo(
        path=str(folder),
        tokenizer_path=str(folder),
        vocab_size=len(tokenizer),
        embedding_size=len(tokenizer),
        stop_token_ids=(),
        max_position_embeddings=1 << 31,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024, 4096], help="a step")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="of a sequence")
    parser.add_argument("--n", type=int, default=8, help="sequences a prompt")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--steps", type=int, default=3, help="that are counted")
    parser.add_argument("--save-rollouts", action="store_true", help="as trainer.rollout_data_dir does")
    parser.add_argument("--profile", action="store_true", help="show the functions that take longest")
    parser.add_argument("--out", type=Path, help="folder for driver.json and driver.md")
    return parser.parse_args()


def main() -> None:
    """Measure every combination of sizes."""
    args, rows = _parse(), []
    logging.basicConfig(level=logging.WARNING)
    env = RAY_ENV | {"PYTHONPATH": str(Path(__file__).parents[1])}
    hook = f"{register.__module__}.{register.__name__}" if __name__ != "__main__" else "benchmarks.driver.register"
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": env, "worker_process_setup_hook": hook},
    )
    register()
    profile = cProfile.Profile()
    try:
        for tokens in args.tokens:
            for sequences in args.sequences:
                case = Case(
                    sequences=sequences,
                    tokens=tokens,
                    n=args.n,
                    ranks=args.ranks,
                    save_rollouts=args.save_rollouts,
                )
                with tempfile.TemporaryDirectory() as folder:
                    info = _model(Path(folder) / "model")
                    if args.profile:
                        profile.enable()
                    rows.append(row(case, asyncio.run(run(case, args.steps, info, Path(folder)))))
                    profile.disable()
    finally:
        ray.shutdown()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    write(
        args.out,
        "driver",
        rows,
        f"n={args.n}, {args.ranks} ranks, {MINI_BATCHES} mini-batches, mean of {args.steps} steps",
    )


if __name__ == "__main__":
    main()
