"""Schema of the `algo` group: everything that defines the learning rule. Names follow verl."""

from dataclasses import dataclass, field

from rlpost.problems import refuse

# see the table in kl.py
KL_PENALTIES = ("k1", "k2", "k3", "low_var_kl", "abs")
KL_LOSSES = ("k2", "k1+", "k3+", "k3", "low_var_kl", "abs")

# What is registered, and the keys of `AlgoConfig` that each reads; tests hold the tables to the code.
ESTIMATORS_READ: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam", "whiten_advantages"),
    "grpo": ("norm_adv_by_std_in_grpo", "whiten_advantages"),
    "rloo": ("whiten_advantages",),
    "reinforce_plus_plus": ("gamma",),
    "reinforce_plus_plus_baseline": (),
}
WITH_CRITIC = ("gae",)  # those that bootstrap from a value function
LOSSES_READ: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    "gspo": ("clip_ratio_low", "clip_ratio_high"),
    "cispo": ("clip_ratio_low", "clip_ratio_high"),
    "sapo": ("sapo_tau_pos", "sapo_tau_neg"),
    "reinforce": (),
}
AGGREGATIONS_READ: dict[str, tuple[str, ...]] = {
    "token-mean": (),
    "seq-mean-token-mean": (),
    "seq-mean-token-sum": (),
    "seq-mean-token-sum-norm": ("loss_scale_factor",),
}


@dataclass(slots=True, kw_only=True)
class KLControlConfig:
    """Coefficient of the KL penalty in the reward: `fixed`, or `adaptive` towards `target_kl` (Ziegler et al. 2019)."""

    type: str = "fixed"  # fixed, or adaptive: raised while the KL is above target_kl, lowered below it
    kl_coef: float = 0.001  # coefficient, or with adaptive its first value
    horizon: int = 10000  # in sequences
    target_kl: float = 0.1  # nats a token

    def __post_init__(self) -> None:
        if self.type not in ("fixed", "adaptive"):
            refuse(f"algo.kl_ctrl.type={self.type}: expected 'fixed' or 'adaptive'")
        if self.kl_coef < 0.0:
            refuse(f"algo.kl_ctrl.kl_coef={self.kl_coef}: must be >= 0 (it is subtracted from the reward)")
        if self.horizon < 1 or self.target_kl <= 0.0:
            refuse(
                f"algo.kl_ctrl.horizon={self.horizon}, algo.kl_ctrl.target_kl={self.target_kl}: must be >= 1 and > 0"
            )


@dataclass(slots=True, kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups whose `metric` is the same for all samples are replaced by new prompts."""

    enable: bool = False  # replace groups without a difference
    metric: str = "accuracy"  # a reward part, or "reward" for the shaped total
    max_num_gen_batches: int = 10  # budget: at most this many times train_batch_size prompts a step
    on_exhausted: str = "error"  # error: end the run; train: go on with the groups that were kept

    def __post_init__(self) -> None:
        if self.on_exhausted not in ("error", "train"):
            refuse(f"algo.filter_groups.on_exhausted={self.on_exhausted}: expected 'error' or 'train'")
        if self.max_num_gen_batches < 1:
            refuse(f"algo.filter_groups.max_num_gen_batches={self.max_num_gen_batches}: must be >= 1")


@dataclass(slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """Correction for behaviour (engine) and proximal (trainer) policies that differ.

    `rollout_is` weighs the loss by the truncated ratio proximal/behaviour (TIS); `rollout_rs` rejects by masking.
    Levels: `token`, `sequence` (product over tokens), `geometric` (its length-normalised form). A rejected token
    contributes 0 and stays in the loss's denominator.
    """

    rollout_is: str | None = None  # token, sequence or geometric: what is weighed; null: nothing
    rollout_is_threshold: float = 2.0  # upper truncation of the weight
    rollout_rs: str | None = None  # token, sequence or geometric: what is rejected; null: nothing
    rollout_rs_threshold: float = 2.0  # upper bound of the accepted ratio
    rollout_rs_threshold_lower: float | None = None  # null: 1 / rollout_rs_threshold
    rollout_token_veto_threshold: float | None = None  # a single token below this ratio rejects its sequence

    @property
    def is_on(self) -> bool:
        """Whether anything is weighed or rejected."""
        return any((self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold is not None))

    def __post_init__(self) -> None:
        for name in ("rollout_is", "rollout_rs"):
            if getattr(self, name) not in (None, "token", "sequence", "geometric"):
                refuse(
                    f"algo.rollout_correction.{name}={getattr(self, name)}: "
                    "expected null, 'token', 'sequence' or 'geometric'"
                )
        for name in ("rollout_is_threshold", "rollout_rs_threshold"):
            if getattr(self, name) < 1.0:
                refuse(
                    f"algo.rollout_correction.{name}={getattr(self, name)}: must be >= 1, the ratio of equal policies"
                )
        for name in ("rollout_rs_threshold_lower", "rollout_token_veto_threshold"):
            if getattr(self, name) is not None and not 0.0 <= getattr(self, name) <= 1.0:
                refuse(f"algo.rollout_correction.{name}={getattr(self, name)}: must lie in [0, 1], or null")


@dataclass(slots=True, kw_only=True)
class AlgoConfig:
    """The learning rule. A named algorithm is a YAML file over these keys."""

    name: str = "grpo"  # label of the preset; choose by the group, algo=ppo

    # advantages
    adv_estimator: str = "grpo"  # registered name or dotted path of a function; see `rlpost.algos.advantages`
    gamma: float = 1.0  # discount of later rewards, a token
    lam: float = 1.0  # GAE's decay: 1 is the whole return less the value, 0 one step
    norm_adv_by_std_in_grpo: bool = True  # divide by the group's deviation; false is Dr.GRPO's
    whiten_advantages: bool = False  # over the batch's response tokens; REINFORCE++ does so whatever is set here

    # policy loss
    loss_mode: str = "ppo_clip"  # registered name or dotted path of a function
    clip_ratio_low: float = 0.2  # the ratio's floor is 1 - it
    clip_ratio_high: float = 0.2  # the ratio's ceiling is 1 + it
    clip_ratio_c: float | None = 3.0  # dual clip (Ye et al. 2020); null: off
    sapo_tau_pos: float = 1.0  # temperature of SAPO's gate where the advantage is above 0
    sapo_tau_neg: float = 1.05  # the same where it is at most 0
    loss_agg_mode: str = "token-mean"  # from losses of tokens to the loss of a mini-batch
    loss_scale_factor: int | None = None  # Dr.GRPO's constant length in tokens; null: data.max_response_length
    entropy_coeff: float = 0.0  # weight of an entropy bonus

    # KL to the reference policy
    use_kl_loss: bool = False  # add the KL to the reference to the loss
    kl_loss_coef: float = 0.001  # weight of that loss
    kl_loss_type: str = "k3+"  # k2, k1+, k3+, k3, low_var_kl or abs; + has the gradient of the reverse KL
    use_kl_in_reward: bool = False  # subtract the KL to the reference from each token's reward
    kl_penalty: str = "k1"  # k1, k2, k3, low_var_kl or abs
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)

    # what is trained on
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            refuse(f"algo.gamma={self.gamma}: must lie in [0, 1]")
        if not 0.0 <= self.lam <= 1.0:
            refuse(f"algo.lam={self.lam}: must lie in [0, 1]")
        if not 0.0 <= self.clip_ratio_low <= 1.0:
            refuse(f"algo.clip_ratio_low={self.clip_ratio_low}: must lie in [0, 1] (the ratio's floor is 1 - it)")
        if self.clip_ratio_high < 0.0:
            refuse(f"algo.clip_ratio_high={self.clip_ratio_high}: must be >= 0")
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1.0:
            refuse(f"algo.clip_ratio_c={self.clip_ratio_c}: dual clip needs a bound above 1, or null for none")
        if min(self.sapo_tau_pos, self.sapo_tau_neg) <= 0.0:
            refuse(f"algo.sapo_tau_pos={self.sapo_tau_pos}, algo.sapo_tau_neg={self.sapo_tau_neg}: must be > 0")
        if self.loss_scale_factor is not None and self.loss_scale_factor < 1:
            refuse(f"algo.loss_scale_factor={self.loss_scale_factor}: must be >= 1 token, or null")
        self._check_kl()

    def _check_kl(self) -> None:
        if self.kl_loss_type == "k1":
            refuse(
                "algo.kl_loss_type=k1: as a loss its expected gradient on on-policy data is zero, so only noise "
                "is left. Set k1+ (the value of k1 with the gradient of the reverse KL) or k2"
            )
        elif self.kl_loss_type not in KL_LOSSES:
            refuse(f"algo.kl_loss_type={self.kl_loss_type}: expected one of {', '.join(KL_LOSSES)}")
        if self.kl_penalty not in KL_PENALTIES:
            refuse(f"algo.kl_penalty={self.kl_penalty}: expected one of {', '.join(KL_PENALTIES)}")
        if self.kl_loss_coef < 0.0:
            refuse(f"algo.kl_loss_coef={self.kl_loss_coef}: must be >= 0")

    @property
    def needs_reference(self) -> bool:
        """True when any KL term to the reference policy is on."""
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        """True for estimators that bootstrap from a value function."""
        return self.adv_estimator in WITH_CRITIC
