"""Which keys have an effect on which algorithm: each is changed, and every number that comes out is compared."""

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import (
    AGGREGATIONS_READ,
    ESTIMATORS_READ,
    LOSSES_READ,
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
)
from rlpost.config import register, to_object
from rlpost.overrides import compose
from rlpost.rules.reads import readers_of, unread
from rlpost.trajectory import Status

OTHER = {
    "gamma": 0.5,
    "lam": 0.5,
    "norm_adv_by_std_in_grpo": False,
    "whiten_advantages": True,
    "clip_ratio_low": 0.01,
    "clip_ratio_high": 0.01,
    "clip_ratio_c": 1.01,
    "sapo_tau_pos": 3.0,
    "sapo_tau_neg": 3.0,
    "loss_scale_factor": 3,
    "kl_loss_coef": 0.5,
    "kl_loss_type": "abs",
    "kl_penalty": "abs",
    "kl_ctrl.type": "adaptive",
    "kl_ctrl.kl_coef": 0.5,
    "kl_ctrl.horizon": 5,
    "kl_ctrl.target_kl": 9.0,
    "filter_groups.metric": "length",
    "rollout_correction.rollout_is_threshold": 1.01,
    "rollout_correction.rollout_rs_threshold": 1.01,
    "rollout_correction.rollout_rs_threshold_lower": 0.99,
}
ELSEWHERE = {"name", "filter_groups.max_num_gen_batches", "filter_groups.on_exhausted"}  # nothing here reads them


def variants():
    """One difference each from an algorithm in which everything else is off."""
    yield from ({"adv_estimator": name} for name in ESTIMATORS_READ)
    yield from ({"loss_mode": name} for name in LOSSES_READ)
    yield from ({"loss_agg_mode": name} for name in AGGREGATIONS_READ)
    yield {"use_kl_loss": True}
    yield {"use_kl_in_reward": True}
    yield {"use_kl_in_reward": True, "kl_penalty": "k2", "kl_ctrl": KLControlConfig(type="adaptive")}
    yield {"filter_groups": FilterGroupsConfig(enable=True, metric="reward")}
    yield {"rollout_correction": RolloutCorrectionConfig(rollout_is="token")}
    yield {"rollout_correction": RolloutCorrectionConfig(rollout_rs="token")}


def outcome(make_batch, cfg: AlgoConfig) -> list[float]:
    """Every number that an algorithm gives for some batches: advantages, loss, metrics, what is kept, its state."""
    return [number for phase in (0.0, 1.0, 2.0) for number in outcome_of(make_batch, cfg, phase)]


def outcome_of(make_batch, cfg: AlgoConfig, phase: float) -> list[float]:
    wave = torch.sin(torch.arange(12) * 1.7 + phase)
    rewards = [0, 0, 1, 0, 2, 0, 0, 0, 3, 0, 1, 6]
    batch = make_batch(".MM .MM M.M .MM", [7, 3, 7, 3], rewards=rewards).update(
        {
            "old_logprobs": -1.5 + wave.roll(1) * 0.3,
            "rollout_logprobs": -1.5 + wave.roll(2) * 0.3,
            "ref_logprobs": -1.5 + wave.roll(3),
            "values": wave.roll(4),
        }
    )
    algo = Algorithm(cfg, max_response_length=8)
    columns, metrics = algo.advantages(batch)
    batch.update(columns)
    batch.update({"loss_weights": algo.loss_weights("actor", batch["response_mask"], batch.cu_seqlens)})
    output = SimpleNamespace(logprobs=(-1.5 + wave).requires_grad_(), entropy=wave + 1.0)
    loss, more = algo.policy_loss(batch, output)
    loss.backward()
    answers = [
        SimpleNamespace(status=Status.STOP, reward=reward, reward_parts={"length": 1.0}) for reward in (0.0, 1.0)
    ]
    numbers = [loss.item(), float(algo.keep(SimpleNamespace(id="g", trajectories=answers)).keep)]
    numbers += [*output.logprobs.grad.tolist(), *batch["advantages"].tolist()]
    numbers += [algo.state_dict()["kl_coef"]] if cfg.use_kl_in_reward else []  # what the next step subtracts
    return [*numbers, *(metric.value for metric in [*metrics.values(), *more.values()])]


def keys_of(cfg, prefix=""):
    for field in fields(cfg):
        if is_dataclass(value := getattr(cfg, field.name)):
            yield from keys_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def changed(cfg, key, value):
    name, _, rest = key.partition(".")
    return replace(cfg, **{name: changed(getattr(cfg, name), rest, value) if rest else value})


def test_every_key_with_a_rule_is_tried():
    assert {key for key in keys_of(AlgoConfig()) if readers_of(f"algo.{key}")} == set(OTHER) | ELSEWHERE


@pytest.mark.parametrize("variant", list(variants()), ids=lambda variant: " ".join(map(str, variant.values()))[:40])
def test_a_key_has_an_effect_exactly_where_the_table_says_so(make_batch, variant):
    register()
    cfg = to_object(compose(["algo=ppo"])[0])
    cfg.algo = AlgoConfig(**({"adv_estimator": "reinforce_plus_plus"} | variant))
    before = outcome(make_batch, cfg.algo)
    for key, value in OTHER.items():
        if key == "kl_ctrl.type" and cfg.algo.kl_ctrl.type == value:
            value = "fixed"
        has_effect = outcome(make_batch, changed(cfg.algo, key, value)) != before
        assert has_effect == (not unread(cfg, {f"algo.{key}": value})), key
