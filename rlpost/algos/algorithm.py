"""`Algorithm`: a config turned into the handful of decisions and formulas the trainer asks for."""

from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from rlpost.algos.advantages import ESTIMATORS, response_tokens, row_scores
from rlpost.algos.aggregate import AGGREGATIONS, loss_weights
from rlpost.algos.config import AlgoConfig
from rlpost.algos.correction import rollout_correction
from rlpost.algos.filters import Keep, keep_group
from rlpost.algos.kl import kl_controller, kl_estimate
from rlpost.algos.losses import POLICY_LOSSES, PolicyTerms, value_loss
from rlpost.algos.ragged import extremes, weighted_means
from rlpost.batch import Batch, NoColumn
from rlpost.metrics import Metric, Metrics
from rlpost.registry import Registry, load_dotted
from rlpost.trajectory import NOT_ASKED, Group

F = TypeVar("F", bound=Callable)


class ModelOutput(Protocol):
    """What a forward pass says about the tokens of a micro-batch: float32 `[N]` each, where computed."""

    @property
    def logprobs(self) -> Tensor | None: ...

    @property
    def entropy(self) -> Tensor | None: ...

    @property
    def values(self) -> Tensor | None: ...


class Algorithm:
    """The learning rule. Picklable: trainer workers hold a copy and call the losses.

    Args:
        cfg: `adv_estimator` and `loss_mode` are registered names or dotted paths of functions.
        max_response_length: in tokens, `loss_scale_factor` where that is null.
        critic_warmup: first steps in which only the critic is trained.
        cliprange_value: see `value_loss`.

    Raises:
        ValueError: an unknown name, or a warm-up without a critic.
    """

    def __init__(
        self,
        cfg: AlgoConfig,
        *,
        max_response_length: int,
        critic_warmup: int = 0,
        cliprange_value: float | None = None,
    ):
        if critic_warmup and not cfg.needs_critic:
            raise ValueError(
                f"trainer.critic_warmup={critic_warmup}: algo.adv_estimator={cfg.adv_estimator} has no critic"
            )
        self.cfg = cfg
        self._estimator = _resolve(ESTIMATORS, cfg.adv_estimator, "algo.adv_estimator")
        self._policy_loss = _resolve(POLICY_LOSSES, cfg.loss_mode, "algo.loss_mode")
        AGGREGATIONS.get(cfg.loss_agg_mode, "algo.loss_agg_mode")
        self._reads_old_logprobs = cfg.use_kl_in_reward or getattr(self._estimator, "reads_old_logprobs", False)
        self._scale_factor = cfg.loss_scale_factor or max_response_length
        self._critic_warmup, self._cliprange_value = critic_warmup, cliprange_value
        self._kl = kl_controller(cfg.kl_ctrl)

    # --- what is needed, kept and trained ---

    def needs(self, num_rows: int, on_policy: Collection[int]) -> dict[str, list[int]]:
        """Columns to infer before training, of `old_logprobs`, `ref_logprobs` and `values`, and the rows to infer.

        A step's first update trains a policy that *is* the proximal one: old = current.detach(), for free. Its rows
        hold `NOT_ASKED` instead; with one update a step these are all.

        Args:
            num_rows: of the batch.
            on_policy: rows that the actor's first update trains and no later one.
        """
        every = list(range(num_rows))
        old = every if self._reads_old_logprobs else sorted(set(every).difference(on_policy))
        needed = {"ref_logprobs": self.cfg.needs_reference, "values": self.cfg.needs_critic}
        return {"old_logprobs": old} | {name: every for name, needs in needed.items() if needs}

    @property
    def needs_entropy(self) -> bool:
        """True when the policy's loss uses the entropy; otherwise it is reported if present."""
        return self.cfg.entropy_coeff != 0.0

    def trains(self, step: int) -> tuple[str, ...]:
        """Roles trained at `step` (from 1), in order."""
        if not self.cfg.needs_critic:
            return ("actor",)
        return ("critic",) if step <= self._critic_warmup else ("critic", "actor")

    def keep(self, group: Group) -> Keep:
        """Whether to train on `group`; see `keep_group`."""
        return keep_group(group, self.cfg.filter_groups)

    def loss_weights(self, role: str, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Shares `[N]` of a whole mini-batch's tokens; see `aggregate.py`. The critic's loss is a mean over tokens."""
        mode = self.cfg.loss_agg_mode if role == "actor" else "token-mean"
        return loss_weights(response_mask, cu_seqlens, mode, scale_factor=self._scale_factor)

    # --- once a step, over the whole batch ---

    def advantages(self, batch: Batch) -> tuple[dict[str, Tensor], Metrics]:
        """Columns for `batch`: `advantages`, with a critic `returns`, with a KL penalty the `rewards` that include it.

        Raises:
            ValueError: a reward that lies on a token the model did not write, or an estimator that reads `old_logprobs`
                and does not say so.
        """
        _check_rewards(batch)
        if not self._reads_old_logprobs:  # some rows' may be missing: an estimator that reads them must say so
            batch = Batch(batch.cu_seqlens, {n: values for n, values in batch.columns().items() if n != "old_logprobs"})
        usable = batch["usable"]
        metrics = extremes("critic/score", row_scores(batch)[usable])
        columns: dict[str, Tensor] = {}
        if self.cfg.use_kl_in_reward:
            columns["rewards"], kl_metrics = self._penalised_rewards(batch)
            metrics |= kl_metrics
            batch = Batch(batch.cu_seqlens, batch.columns() | columns)
        metrics |= extremes("critic/rewards", row_scores(batch)[usable])
        columns |= self._estimate(batch)
        return columns, metrics | _advantage_metrics(batch, columns)

    def _estimate(self, batch: Batch) -> dict[str, Tensor]:
        try:
            return self._estimator(batch, self.cfg)
        except NoColumn as error:
            if error.name != "old_logprobs":
                raise
            raise ValueError(
                f"algo.adv_estimator={self.cfg.adv_estimator} reads old_logprobs, which are not inferred for all rows: "
                "set reads_old_logprobs = True on the function, and they are"
            ) from error

    def _penalised_rewards(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Rewards minus coef * KL at each response token, `[N]`; the controller sees the batch's mean KL."""
        mask = response_tokens(batch)
        kl = kl_estimate(self.cfg.kl_penalty, batch["old_logprobs"], batch["ref_logprobs"], mask)
        coef = self._kl.coef
        metrics = weighted_means({"actor/reward_kl_penalty": kl}, mask)
        self._kl.update(metrics["actor/reward_kl_penalty"].value, int(batch["usable"].sum()))
        return batch["rewards"] - coef * kl, metrics | {"actor/reward_kl_penalty_coeff": Metric(coef)}

    # --- for each micro-batch ---

    def policy_loss(self, micro: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the actor's loss: a `MicroLoss` of the engine. May be empty (N = 0)."""
        terms = self._terms(micro, output)
        token = self._policy_loss(terms, self.cfg)
        correction = rollout_correction(
            terms.old_logprobs,
            terms.rollout_logprobs,
            terms.response_mask,
            terms.cu_seqlens,
            self.cfg.rollout_correction,
        )
        loss = token.loss * correction.weights
        reported = {"actor/pg_loss": loss.masked_fill(~correction.keep, 0.0)}
        if self.cfg.use_kl_loss:
            assert terms.ref_logprobs is not None
            kl = kl_estimate(self.cfg.kl_loss_type, terms.logprobs, terms.ref_logprobs, terms.response_mask)
            loss = loss + self.cfg.kl_loss_coef * kl
            reported["actor/kl_loss"] = kl
        if self.needs_entropy:
            assert terms.entropy is not None
            loss = loss - self.cfg.entropy_coeff * terms.entropy
        if terms.entropy is not None:
            reported["actor/entropy"] = terms.entropy
        shares = micro["loss_weights"]
        total = (loss.masked_fill(~correction.keep, 0.0) * shares).sum()
        # weighed like the loss itself: where a mini-batch's shares add up to 1, its `actor/pg_loss` is the loss
        return total, token.metrics | correction.metrics | weighted_means(reported, shares)

    def value_loss(self, micro: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the critic's loss: a `MicroLoss` of the engine. May be empty (N = 0)."""
        assert output.values is not None
        mask, shares = micro["response_mask"], micro["loss_weights"]
        token = value_loss(output.values, micro["values"], micro["returns"], mask, self._cliprange_value)
        loss = token.loss.masked_fill(~mask, 0.0)
        return (loss * shares).sum(), token.metrics | weighted_means({"critic/vf_loss": loss}, shares)

    def _terms(self, micro: Batch, output: ModelOutput) -> PolicyTerms:
        assert output.logprobs is not None
        old = micro["old_logprobs"]
        return PolicyTerms(
            logprobs=output.logprobs,
            old_logprobs=torch.where(old == NOT_ASKED, output.logprobs.detach(), old),
            advantages=micro["advantages"],
            response_mask=micro["response_mask"],
            cu_seqlens=micro.cu_seqlens,
            rollout_logprobs=micro["rollout_logprobs"],
            ref_logprobs=micro["ref_logprobs"] if self.cfg.use_kl_loss else None,
            entropy=output.entropy,
        )

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """What changes over a run: the coefficient of the KL penalty."""
        return {"kl_coef": self._kl.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._kl.coef = state["kl_coef"]


def _resolve(registry: Registry[F], name: str, key: str) -> F:
    return cast(F, load_dotted(name, key)) if "." in name else registry.get(name, key)


def _check_rewards(batch: Batch) -> None:
    """No usable row may have a reward where no advantage would see it."""
    usable = batch["usable"].repeat_interleave(batch.seqlens)
    lost = (usable & ~batch["response_mask"] & (batch["rewards"] != 0)).nonzero().flatten()
    if len(lost):
        position = int(lost[0])
        row = int(torch.searchsorted(batch.cu_seqlens, position, right=True)) - 1
        raise ValueError(
            f"row {row} of the batch has a reward of {float(batch['rewards'][position]):g} on its token "
            f"{position - int(batch.cu_seqlens[row])}, which the model did not write and no advantage would see: put "
            "it on the MODEL token that earned it"
        )


def _advantage_metrics(batch: Batch, columns: dict[str, Tensor]) -> Metrics:
    mask = response_tokens(batch)
    advantages = columns["advantages"]
    metrics = extremes("critic/advantages", advantages[mask])
    metrics |= weighted_means({"critic/advantages/zero_fraction": advantages == 0}, mask)
    if "returns" in columns:
        returns, values = columns["returns"][mask], batch["values"][mask]
        metrics |= extremes("critic/returns", returns) | extremes("critic/values", values)
        if len(returns) > 1 and (spread := float(returns.var())) > 0.0:
            metrics["critic/vf_explained_var"] = Metric(1.0 - float((returns - values).var()) / spread)
    return metrics
