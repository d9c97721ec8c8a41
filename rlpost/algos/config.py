"""Schema of the `algo` group: everything that defines the learning rule. Names follow verl."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class KLControlConfig:
    """Coefficient of the KL penalty in the reward: `fixed`, or `adaptive` towards `target_kl` (Ziegler et al. 2019)."""

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000  # in sequences
    target_kl: float = 0.1  # nats a token

    def __post_init__(self) -> None:
        if self.type not in ("fixed", "adaptive"):
            raise ValueError(f"algo.kl_ctrl.type={self.type}: expected 'fixed' or 'adaptive'")


@dataclass(slots=True, kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups whose `metric` is the same for all samples are replaced by new prompts."""

    enable: bool = False
    metric: str = "accuracy"  # a reward part, or "reward" for the shaped total
    max_num_gen_batches: int = 10  # budget: at most this many times train_batch_size prompts a step
    on_exhausted: str = "error"  # error: end the run; train: go on with the groups that were kept

    def __post_init__(self) -> None:
        if self.on_exhausted not in ("error", "train"):
            raise ValueError(f"algo.filter_groups.on_exhausted={self.on_exhausted}: expected 'error' or 'train'")
        if self.max_num_gen_batches < 1:
            raise ValueError(f"algo.filter_groups.max_num_gen_batches={self.max_num_gen_batches}: must be >= 1")


@dataclass(slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """Correction for behaviour (engine) and proximal (trainer) policies that differ.

    `rollout_is` weighs the loss by the truncated ratio proximal/behaviour (TIS); `rollout_rs` rejects by masking.
    Levels: `token`, `sequence` (product over tokens), `geometric` (its length-normalised form).
    """

    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0  # upper truncation of the weight
    rollout_rs: str | None = None
    rollout_rs_threshold: float = 2.0  # upper bound of the accepted ratio
    rollout_rs_threshold_lower: float | None = None  # null: 1 / rollout_rs_threshold
    rollout_token_veto_threshold: float | None = None  # a single token below this ratio rejects its sequence

    def __post_init__(self) -> None:
        for name in ("rollout_is", "rollout_rs"):
            if getattr(self, name) not in (None, "token", "sequence", "geometric"):
                raise ValueError(
                    f"algo.rollout_correction.{name}={getattr(self, name)}: expected null, 'token', 'sequence' or 'geometric'"
                )


@dataclass(slots=True, kw_only=True)
class AlgoConfig:
    """The learning rule. A named algorithm is a YAML file over these keys."""

    name: str = "grpo"

    # advantages
    adv_estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    whiten_advantages: bool = False  # over all response tokens of the batch; PPO and REINFORCE++ do

    # policy loss
    loss_mode: str = "ppo_clip"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0  # dual clip (Ye et al. 2020); null: off
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None  # Dr.GRPO's constant length; null: data.max_response_length
    entropy_coeff: float = 0.0

    # KL to the reference policy
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    use_kl_in_reward: bool = False
    kl_penalty: str = "k1"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)

    # what is trained on
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"algo.gamma={self.gamma}: must lie in [0, 1]")
        if not 0.0 <= self.lam <= 1.0:
            raise ValueError(f"algo.lam={self.lam}: must lie in [0, 1]")
        if not 0.0 <= self.clip_ratio_low <= 1.0:
            raise ValueError(f"algo.clip_ratio_low={self.clip_ratio_low}: must lie in [0, 1] (the ratio's floor is 1 - it)")
        if self.clip_ratio_high < 0.0:
            raise ValueError(f"algo.clip_ratio_high={self.clip_ratio_high}: must be >= 0")
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1.0:
            raise ValueError(f"algo.clip_ratio_c={self.clip_ratio_c}: dual clip needs a bound above 1, or null for none")

    @property
    def needs_reference(self) -> bool:
        """True when any KL term to the reference policy is on."""
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        """True for estimators that bootstrap from a value function."""
        return self.adv_estimator == "gae"
