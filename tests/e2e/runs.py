"""Whole runs as a user starts them: a command in a process of its own, and everything it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TRAIN = "task://rlpost.tasks.addition.problems?digits=2&size={size}&seed=1&split=train"
VAL = "task://rlpost.tasks.addition.problems?digits=2&size=16&seed=2&split=val"
PARITY = "tests.e2e.rewards.parity"  # varies although the model is random


def write_checkpoint(folder: Path) -> Path:
    """A random two-layer Qwen3 with the quickstart's tokenizer; its embedding has rows that belong to no token."""
    from rlpost.tasks.quickstart import character_tokenizer
    from tests import tiny

    tokenizer = character_tokenizer()
    tiny.write_qwen3(
        folder,
        vocab_size=len(tokenizer) + 9,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(folder)
    return folder


def small(checkpoint: Path, *changes: str, train_size: int = 64) -> list[str]:
    """Overrides of a run that lasts a second or two once it has started; `changes` come last and win.

    What nothing would read is refused, so a critic and validation are only spoken of where there is one.
    """
    has_critic = any(change.startswith("algo=ppo") for change in changes)
    return [
        "model=hf",
        f"model.path={checkpoint}",
        "rollout=hf",
        "tracking=console",
        f"data.train_files='{TRAIN.format(size=train_size)}'",
        f"data.val_files.addition='{VAL}'",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=4",
        "actor.optim.lr=1e-2",
        *(["critic.ppo_mini_batch_size=4", "critic.optim.lr=1e-2"] if has_critic else []),
        f"reward.terms.accuracy.fn={PARITY}",
        "reward.timeout_s=100",
        "trainer.export_hf=false",
        *([] if "data.val_files=null" in changes else ["trainer.log_val_generations=1"]),
        *changes,
    ]


class Run:
    """`python -m <module> <overrides>`, started in `folder`, whose processes are told by that working directory.

    The command heads a process group, as one that is typed into a terminal does.
    """

    def __init__(self, folder: Path, *overrides: str, module: str = "rlpost.main"):
        folder.mkdir(parents=True, exist_ok=True)
        self.cwd, self.folder = folder.resolve(), folder.resolve() / "run"
        self.overrides, self.module = overrides, module
        self.start()

    def start(self) -> None:
        """Start the command; once more after it has ended."""
        command = [sys.executable, "-m", self.module, *self.overrides]
        if "-m" not in self.overrides:
            command.append(f"hydra.run.dir={self.folder}")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(self.cwd / "stdout.txt", "w") as out, open(self.cwd / "stderr.txt", "w") as err:
            self.process = subprocess.Popen(
                command, cwd=self.cwd, env=environment, stdout=out, stderr=err, start_new_session=True
            )

    def wait(self, timeout_s: float = 400.0) -> int:
        """The exit status; a run that does not end is killed, and its last words are shown."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {timeout_s} s; stderr: {self.stderr[-3000:]}") from None

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Until `condition` holds while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"ended before, status {self.process.returncode}; stderr: {self.stderr[-3000:]}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not within {timeout_s} s; stderr: {self.stderr[-3000:]}")
            time.sleep(0.1)  # conditions may look at every process there is

    def succeed(self) -> dict[str, Any]:
        """Wait for exit status 0 and return the summary, the last line of standard output."""
        assert self.wait() == 0, self.stderr[-3000:]
        return json.loads(self.stdout.splitlines()[-1])

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the process group."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def has_checkpoint(self, step: int) -> bool:
        return (self.folder / "checkpoints" / f"global_step_{step}" / "manifest.json").is_file()

    @property
    def stdout(self) -> str:
        return (self.cwd / "stdout.txt").read_text()

    @property
    def stderr(self) -> str:
        return (self.cwd / "stderr.txt").read_text()

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def steps(self) -> dict[int, dict[str, float]]:
        """Training metrics by step; a step that was logged twice is an error."""
        training = [line for line in self.lines() if "timing_s/step" in line]
        steps = [line["step"] for line in training]
        assert len(steps) == len(set(steps)), f"steps logged: {steps}"
        return dict(zip(steps, training, strict=True))

    def processes(self) -> list[str]:
        """Every process that runs in the working directory: the command, Ray, engines, rewards."""
        found = [p for p in psutil.process_iter() if _cwd(p) == str(self.cwd)]
        return [_name(p) for p in found]

    def left_behind(self, limit_s: float = 15.0) -> list[str]:
        """Processes that outlive the command by more than the moment it takes them to notice."""
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def _cwd(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.cwd()
    except psutil.Error:
        return None


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return f"{process.pid}: gone"
