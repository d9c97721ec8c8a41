"""Validation: greedy or sampled answers on held-out prompts, metrics for each set."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlpost.trajectory import Group, Prompt, Status
from rlpost.workers.rollout.base import SamplingSpec

logger = logging.getLogger(__name__)

Generate = Callable[[Sequence[Prompt], int, SamplingSpec], Awaitable[list[Group]]]  # prompts, n, spec -> scored groups


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one or more of k samples is right, from n with `correct` right (Chen et al. 2021, eq. 1)."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def summarize(groups: Sequence[Group]) -> dict[str, float]:
    """`accuracy`, `reward`, `response_length`, `truncated`, `error_rate`, with several samples `pass@k`.

    Failed scores count in `error_rate` and nowhere else: pass@k is over groups with k scores. A sample is right when
    its `accuracy` part is above 0.5.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    scored = [t for t in trajectories if t.status is not Status.REWARD_ERROR]
    report = {"error_rate": 1.0 - len(scored) / len(trajectories), "num_prompts": float(len(groups))}
    if not scored:
        return report
    report["reward"] = sum(t.reward for t in scored) / len(scored)
    report["response_length"] = sum(len(t.response_ids) for t in scored) / len(scored)
    report["truncated"] = sum(t.status is Status.LENGTH for t in scored) / len(scored)
    for part in sorted({name for t in scored for name in t.reward_parts}):
        values = [t.reward_parts[part] for t in scored if part in t.reward_parts]
        report[part] = sum(values) / len(values)
    n = max(len(g.trajectories) for g in groups)
    if n > 1 and "accuracy" in report:
        right = [
            [t.reward_parts.get("accuracy", 0.0) > 0.5 for t in g.trajectories if t.status is not Status.REWARD_ERROR]
            for g in groups
        ]
        for k in sorted({k for k in (2, 4, 8, 16, 32, 64) if k < n} | {n}):
            rates = [pass_at_k(len(group), sum(group), k) for group in right if len(group) >= k]
            if rates:
                report[f"pass@{k}"] = sum(rates) / len(rates)
    return report


class Evaluator:
    """Samples and scores every validation set.

    Args:
        sets: name -> prompts.
        n: samples a prompt.
        spec: sampling of validation.
        decode: token ids -> text, for the table of answers.
        batch_size: prompts in flight at once; None: all.
    """

    def __init__(
        self,
        sets: Mapping[str, list[Prompt]],
        n: int,
        spec: SamplingSpec,
        decode: Callable[[Any], str],
        batch_size: int | None = None,
    ):
        self.sets, self._n, self._spec, self._decode, self._batch_size = sets, n, spec, decode, batch_size

    async def run(self, generate: Generate) -> tuple[dict[str, float], list[Group]]:
        """`val/<set>/<metric>` for every set, and all groups."""
        report: dict[str, float] = {}
        everything: list[Group] = []
        for name, prompts in self.sets.items():
            groups: list[Group] = []
            size = self._batch_size or len(prompts)
            for start in range(0, len(prompts), size):
                groups += await generate(prompts[start : start + size], self._n, self._spec)
            errors = [t.error for g in groups for t in g.trajectories if t.status is Status.REWARD_ERROR]
            if errors:
                logger.warning("validation: %d answers of '%s' have no score: %s", len(errors), name, errors[0])
            report |= {f"val/{name}/{metric}": value for metric, value in summarize(groups).items()}
            everything += groups
        return report, everything

    def rows(self, groups: Sequence[Group], samples: int | None = None) -> list[dict[str, Any]]:
        """Table rows of the first `samples` answers (None: all) to each prompt; no `reward` where scoring failed."""
        return [
            {
                "data_source": g.data_source,
                "prompt": g.prompt.text,
                "answer": self._decode(t.response_ids),
                "ground_truth": str(g.prompt.ground_truth),
                "reward": None if t.status is Status.REWARD_ERROR else round(t.reward, 3),
            }
            for g in groups
            for t in g.trajectories[:samples]
        ]
