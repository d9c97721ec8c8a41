"""TRL's side, in TRL's environment: `python -m benchmarks.peers.trl_train REQUEST.json` prints a line a step.

The request holds `model`, `prompts` (JSONL) and `config`, the fields of `GRPOConfig`. Phases are told by two public
hooks: the reward function is called once the answers and their old logprobs are there.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.reward import score
from benchmarks.peers.steps import TRL_MARK


class Clock(TrainerCallback):
    """Prints each step with its phases, once the trainer logs it (which waits for the GPU)."""

    def __init__(self) -> None:
        self.begun = self.scored = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "completions/mean_length" not in logs:
            return
        now = time.time()
        phases = {"generate_and_old_logprobs": self.scored - self.begun, "update": now - self.scored}
        row = {"step": state.global_step, "end_s": now, "phases": phases | {"reported_step": now - self.begun}}
        print(TRL_MARK + json.dumps({**logs, **row}, default=float), flush=True)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    clock = Clock()

    def length_mod_7(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        clock.scored = time.time()
        return [score(messages[0]["content"]) for messages in completions]

    rows = [json.loads(line) for line in Path(request["prompts"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=request["model"],
        reward_funcs=length_mod_7,
        args=GRPOConfig(**request["config"]),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[clock],
    )
    trainer.train()


if __name__ == "__main__":
    main()
