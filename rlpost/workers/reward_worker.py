"""The actor around a reward model. Workflows hold its handle and so import this module: it loads no torch by itself."""

from collections.abc import Sequence

from rlpost import heartbeat
from rlpost.host import exported
from rlpost.rewards.config import RewardModelConfig
from rlpost.rewards.model import Messages


class RewardModelWorker:
    """`RewardModel` in a process of its own; see there."""

    def __init__(self, path: str, cfg: RewardModelConfig, device: str):
        from rlpost.workers.reward_model import RewardModel

        heartbeat.start(exported().get(heartbeat.VARIABLE), heartbeat.numberless("reward model"))
        self._model = RewardModel(path, cfg, device)

    @heartbeat.during("reward")
    def score(self, texts: Sequence[str | Messages]) -> list[float]:
        """See `RewardModel.score`."""
        return self._model.score(texts)
