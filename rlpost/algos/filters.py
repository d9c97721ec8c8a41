"""Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): which groups are worth training on."""

from dataclasses import dataclass

from rlpost.algos.config import FilterGroupsConfig
from rlpost.trajectory import Group, Status, Trajectory


@dataclass(slots=True, frozen=True)
class Keep:
    """`keep`, and for a dropped group the reason, fit for the name of a metric."""

    keep: bool
    reason: str = ""


def keep_group(group: Group, cfg: FilterGroupsConfig) -> Keep:
    """Drop groups that carry no signal: fewer than two usable answers, or the same `metric` for all of them.

    Only usable answers are compared. With the filter off every group is kept (and one without signal contributes 0).

    Raises:
        ValueError: an answer was scored without the part that `metric` names.
    """
    if not cfg.enable:
        return Keep(True)
    usable = [t for t in group.trajectories if t.status in (Status.STOP, Status.LENGTH)]
    if len(usable) < 2:
        return Keep(False, "too_few_usable")
    values = [_metric(t, cfg.metric, group.id) for t in usable]
    if min(values) < max(values):
        return Keep(True)
    return Keep(False, f"all_{values[0]:g}" if values[0] in (0.0, 1.0) else "all_equal")


def _metric(trajectory: Trajectory, metric: str, group_id: str) -> float:
    if metric == "reward":
        return trajectory.reward
    if metric not in trajectory.reward_parts:
        raise ValueError(
            f"algo.filter_groups.metric={metric}: an answer of group '{group_id}' was scored without this part (it has "
            f"{sorted(trajectory.reward_parts) or 'none'}); name one of its parts, or 'reward' for the total"
        )
    return trajectory.reward_parts[metric]
