"""Every file in config/algo composes to a valid `AlgoConfig`, says what it should, and computes."""

from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig
from rlpost.config import CONFIG_DIR, register
from rlpost.rewards.config import OverlongBufferConfig

PRESETS = {
    "ppo": {"adv_estimator": "gae", "whiten_advantages": True},
    "grpo": {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_type": "k3+"},
    "dapo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean", "use_kl_loss": False},
    "drgrpo": {"norm_adv_by_std_in_grpo": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
    "rloo": {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_penalty": "k1"},
    "reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "kl_penalty": "k1"},
    "reinforce_plus_plus_baseline": {"adv_estimator": "reinforce_plus_plus_baseline", "kl_loss_type": "k2"},
    "gspo": {"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    "cispo": {"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
    "sapo": {"loss_mode": "sapo", "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
}


def composed(preset: str):
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(f"algo/{preset}")


def typed(preset: str) -> AlgoConfig:
    cfg = OmegaConf.to_object(composed(preset).algo)
    assert isinstance(cfg, AlgoConfig)
    return cfg


def test_every_preset_is_listed_here():
    assert sorted(path.stem for path in (CONFIG_DIR / "algo").glob("*.yaml")) == sorted(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_states_its_algorithm(preset):
    cfg = typed(preset)
    assert cfg.name == preset
    assert {key: getattr(cfg, key) for key in PRESETS[preset]} == PRESETS[preset]


def test_dapo_filters_on_accuracy_and_shapes_the_length():
    cfg = composed("dapo")
    assert cfg.algo.filter_groups.enable and cfg.algo.filter_groups.metric == "accuracy"
    shaping = OverlongBufferConfig(**OmegaConf.to_container(cfg.reward.overlong_buffer))
    assert shaping == OverlongBufferConfig(enable=True, len=None, penalty_factor=1.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_prefers_the_better_answer(preset, make_batch):
    """One step of the whole rule: the gradient raises the logprobs of the rewarded answer and lowers the other's."""
    algo = Algorithm(typed(preset), max_response_length=4)
    batch = make_batch(".MM .MM", [0, 0], rewards=[0, 0, 1, 0, 0, 0])
    same = torch.full((6,), -1.0)
    batch.update({name: same for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")})
    batch.update({"values": torch.zeros(6)})
    columns, _ = algo.advantages(batch)
    batch.update(columns)
    batch.update({"loss_weights": algo.loss_weights("actor", batch["response_mask"], batch.cu_seqlens)})
    logprobs = same.clone().requires_grad_()
    loss, _ = algo.policy_loss(batch, SimpleNamespace(logprobs=logprobs, entropy=None, values=None))
    loss.backward()
    assert logprobs.grad.sign().tolist() == [0, -1, -1, 0, 1, 1]
