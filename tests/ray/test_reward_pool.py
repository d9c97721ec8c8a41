"""The killable processes of `RewardScorer` inside a Ray actor."""

from pathlib import Path

import numpy as np
import ray

from rlpost.rewards.base import Answer, Reward
from rlpost.rewards.config import RewardConfig, RewardTermConfig
from rlpost.rewards.scorer import RewardScorer, Scored
from rlpost.trajectory import Prompt


class ScoringActor:
    """Builds and asks a scorer in its own process."""

    def __init__(self, cfg: RewardConfig):
        self.scorer = RewardScorer(cfg, 8)

    async def score(self, prompt: Prompt, texts: list[str]) -> list[Scored]:
        return await self.scorer.score(prompt, [Answer(text=text, token_ids=[1]) for text in texts])

    def close(self) -> None:
        self.scorer.close()


def test_pool_survives_a_hang_inside_an_actor(local_ray: None, tmp_path: Path) -> None:
    (tmp_path / "actor_rewards.py").write_text(
        "import time\n\n"
        "def fn(prompt, answers):\n"
        "    time.sleep(60 * (answers[0].text == 'hang'))\n"
        "    return [1.0 for _ in answers]\n"
    )
    terms = {"mine": RewardTermConfig(fn="actor_rewards.fn", per_answer=True)}
    prompt = Prompt(id="x/0/0", index=0, token_ids=np.array([1]), text="q", data_source="d")
    environment = {"env_vars": {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}}
    actor = ray.remote(num_cpus=0)(ScoringActor).options(runtime_env=environment)
    handle = actor.remote(RewardConfig(terms=terms, timeout_s=1.0))
    before, hanging, after = ray.get(handle.score.remote(prompt, ["a", "hang", "b"]))
    assert before == after == Reward(value=1.0, parts={"mine": 1.0})
    assert "timed out" in str(hanging)
    ray.get(handle.close.remote())
