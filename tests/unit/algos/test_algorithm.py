import math
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from rlpost.algos.algorithm import Algorithm
from rlpost.algos.config import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from rlpost.algos.losses import POLICY_LOSSES, PolicyTerms, TokenLoss
from rlpost.batch import Batch, NoColumn
from rlpost.metrics import Reduce, merge
from rlpost.trajectory import NOT_ASKED

ROWS, GROUP = ".MM .M M.M ..M", [7, 3, 7, 3]
MODEL_TOKENS = [1, 2, 4, 5, 7, 10]
EVERY = [0, 1, 2, 3]
REWARDS = [0, 0, 1, 0, 2, 0, 0, 3, 0, 0, 6]


def algorithm(max_response_length=8, critic_warmup=0, cliprange_value=None, **cfg) -> Algorithm:
    return Algorithm(
        AlgoConfig(**cfg),
        max_response_length=max_response_length,
        critic_warmup=critic_warmup,
        cliprange_value=cliprange_value,
    )


def full_batch(make_batch, usable=None):
    """A batch with every column that training may ask for, all different."""

    def wave(phase):
        return torch.sin(torch.arange(11) * 1.7 + phase)

    batch = make_batch(ROWS, GROUP, usable, rewards=REWARDS)
    return batch.update(
        {
            "old_logprobs": -1.5 + wave(0.1) * 0.3,
            "rollout_logprobs": -1.5 + wave(0.4) * 0.3,
            "ref_logprobs": -1.5 + wave(0.9),
            "values": wave(2.0),
            "returns": wave(3.0),
            "advantages": wave(4.0),
        }
    )


def model(theta, batch):
    """A differentiable stand-in for a forward pass whose result at a token depends on that token's columns only."""
    x = batch["ref_logprobs"].double()
    return SimpleNamespace(
        logprobs=-1.5 + 0.2 * torch.sin(theta * x), entropy=1.0 + theta * x.square(), values=theta * x
    )


def gradient(algo, micro_batches, loss="policy_loss"):
    theta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    metrics = []
    for micro in micro_batches:
        scalar, reported = getattr(algo, loss)(micro, model(theta, micro))
        scalar.backward()
        metrics.append(reported)
    return theta.grad, merge(metrics)


# --- decisions ---


@pytest.mark.parametrize(
    ("on_policy", "cfg", "needs"),
    [
        ([0, 1, 2, 3], {}, {"old_logprobs": []}),
        ([2, 0], {}, {"old_logprobs": [1, 3]}),
        ([], {}, {"old_logprobs": EVERY}),
        ([2, 0], {"use_kl_in_reward": True}, {"old_logprobs": EVERY, "ref_logprobs": EVERY}),
        ([2, 0], {"use_kl_loss": True}, {"old_logprobs": [1, 3], "ref_logprobs": EVERY}),
        ([2, 0], {"adv_estimator": "gae"}, {"old_logprobs": [1, 3], "values": EVERY}),
    ],
)
def test_needs_names_the_columns_and_rows_to_infer(on_policy, cfg, needs):
    assert algorithm(**cfg).needs(4, on_policy) == needs


def test_trains_the_critic_alone_while_it_warms_up():
    algo = algorithm(adv_estimator="gae", critic_warmup=2)
    assert [algo.trains(step) for step in (1, 2, 3)] == [("critic",), ("critic",), ("critic", "actor")]
    assert algorithm().trains(1) == ("actor",)


def test_critic_warmup_without_a_critic_is_refused():
    with pytest.raises(ValueError, match="trainer.critic_warmup=3: algo.adv_estimator=grpo has no critic"):
        algorithm(critic_warmup=3)


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [
        ("adv_estimator", "gropo", "grpo"),
        ("loss_mode", "ppo_clop", "ppo_clip"),
        ("loss_agg_mode", "token-meen", "token-mean"),
    ],
)
def test_unknown_names_are_refused_at_construction(key, name, near):
    with pytest.raises(ValueError, match=f"algo.{key}={name}: .*'{near}'"):
        algorithm(**{key: name})


def test_keep_follows_the_config():
    group = SimpleNamespace(id="g", trajectories=[])
    assert algorithm().keep(group).keep
    verdict = algorithm(filter_groups=FilterGroupsConfig(enable=True)).keep(group)
    assert (verdict.keep, verdict.reason) == (False, "too_few_usable")


def test_loss_weights_of_the_critic_are_a_token_mean():
    algo = algorithm(loss_agg_mode="seq-mean-token-sum-norm", max_response_length=5)
    mask, cu_seqlens = torch.tensor([True, True, False, True]), torch.tensor([0, 2, 4])
    assert algo.loss_weights("actor", mask, cu_seqlens).tolist() == pytest.approx([0.1, 0.1, 0, 0.1])
    assert algo.loss_weights("critic", mask, cu_seqlens).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


# --- advantages ---


def test_advantages_report_statistics_of_usable_rows(make_batch):
    batch = make_batch("M M M", [0, 0, 0], [True, True, False], rewards=[1, 3, math.nan])
    columns, metrics = algorithm(norm_adv_by_std_in_grpo=False).advantages(batch)
    assert columns["advantages"].tolist() == [-1, 1, 0]
    assert metrics["critic/score/mean"].value == 2 and metrics["critic/score/mean"].weight == 2
    assert metrics["critic/score/max"].value == 3 and metrics["critic/score/max"].reduce is Reduce.MAX
    assert metrics["critic/advantages/min"].value == -1
    assert metrics["critic/advantages/zero_fraction"].value == 0
    assert "rewards" not in columns


def test_advantages_of_a_critic_report_explained_variance(make_batch):
    batch = make_batch("MM", [0], rewards=[2, 2], values=[4, 1])
    columns, metrics = algorithm(adv_estimator="gae").advantages(batch)
    # returns 4, 2 (variance 2), returns - values 0, 1 (variance 1/2)
    assert columns["returns"].tolist() == [4, 2]
    assert metrics["critic/vf_explained_var"].value == pytest.approx(0.75)


def test_kl_penalty_enters_the_rewards_and_drives_the_controller(make_batch):
    control = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=1.0, horizon=10)
    algo = algorithm(use_kl_in_reward=True, kl_ctrl=control, norm_adv_by_std_in_grpo=False)
    batch = make_batch(
        ".M M.M",
        [0, 0],
        rewards=[0, 4, 0, 0, 2],
        old_logprobs=[9, -1, -1, 9, -1],
        ref_logprobs=[0, -2, -3, 0, -4],
    )
    columns, metrics = algo.advantages(batch)
    assert columns["rewards"].tolist() == [0, 3.5, -1, 0, 0.5]  # minus half of k1 = 1, 2, 3
    assert columns["advantages"].tolist() == [0, 2, -2, 0, -2]  # scores 3.5 and -0.5
    assert metrics["actor/reward_kl_penalty"].value == pytest.approx(2.0)
    assert metrics["actor/reward_kl_penalty_coeff"].value == 0.5
    assert metrics["critic/score/mean"].value == 3.0 and metrics["critic/rewards/mean"].value == 1.5
    assert algo.state_dict() == {"kl_coef": pytest.approx(0.5 * (1 + 0.2 * 2 / 10))}


def test_reward_on_a_token_of_a_tool_is_refused(make_batch):
    batch = make_batch("M M.M", [0, 0], rewards=[1, 0, 2, 0])
    with pytest.raises(ValueError, match="row 1 of the batch has a reward of 2 on its token 1"):
        algorithm().advantages(batch)


# --- losses ---


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_detached_logprobs_stand_in_for_old_logprobs_that_nobody_asked_for(make_batch, name):
    batch = full_batch(make_batch)
    algo = algorithm(loss_mode=name, rollout_correction=RolloutCorrectionConfig(rollout_is="sequence"))
    theta = torch.tensor(0.7, dtype=torch.float64)
    batch.update({"old_logprobs": model(theta, batch).logprobs})
    batch.update({"loss_weights": algo.loss_weights("actor", batch["response_mask"], batch.cu_seqlens)})
    recomputed, metrics = gradient(algo, [batch])
    free, free_metrics = gradient(algo, [batch.update({"old_logprobs": torch.full((11,), NOT_ASKED)})])
    torch.testing.assert_close(free, recomputed, rtol=1e-5, atol=1e-8)
    assert free_metrics["actor/ratio_mean"].value == 1.0
    assert free_metrics["actor/ppo_kl"].value == 0.0
    expected = {name: pytest.approx(metric.value, rel=1e-5, abs=1e-6) for name, metric in metrics.items()}
    assert {name: metric.value for name, metric in free_metrics.items()} == expected


def test_rows_whose_old_logprobs_were_asked_for_keep_them_beside_others(make_batch):
    batch = full_batch(make_batch)
    algo = algorithm(rollout_correction=RolloutCorrectionConfig(rollout_is="token", rollout_rs="geometric"))
    batch.update({"loss_weights": algo.loss_weights("actor", batch["response_mask"], batch.cu_seqlens)})
    old = batch["old_logprobs"].clone()
    own = model(torch.tensor(0.7), batch).logprobs
    first = (batch.row_of_token == 0) | (batch.row_of_token == 3)
    filled, metrics = gradient(algo, [batch.update({"old_logprobs": torch.where(first, own, old)})])
    left, left_metrics = gradient(algo, [batch.update({"old_logprobs": torch.where(first, NOT_ASKED, old)})])
    torch.testing.assert_close(left, filled, rtol=1e-5, atol=1e-8)
    expected = {name: pytest.approx(metric.value, rel=1e-5, abs=1e-6) for name, metric in metrics.items()}
    assert {name: metric.value for name, metric in left_metrics.items()} == expected
    assert left_metrics["actor/ratio_mean"].value != 1.0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_logprob_of_the_policy_that_is_not_finite_is_not_hidden_by_standing_in(make_batch, number):
    batch = full_batch(make_batch).update({"old_logprobs": torch.full((11,), NOT_ASKED)})
    algo = algorithm()
    batch.update({"loss_weights": algo.loss_weights("actor", batch["response_mask"], batch.cu_seqlens)})
    logprobs = torch.full((11,), -1.0)
    logprobs[MODEL_TOKENS[0]] = number
    loss, _ = algo.policy_loss(batch, SimpleNamespace(logprobs=logprobs, entropy=None, values=None))
    assert not loss.isfinite()


def test_loss_without_old_logprobs_is_an_error_not_a_guess(make_batch):
    batch = full_batch(make_batch)
    columns = {name: values for name, values in batch.columns().items() if name != "old_logprobs"}
    with pytest.raises(KeyError, match="no column 'old_logprobs'"):
        gradient(algorithm(), [Batch(batch.cu_seqlens, columns)])


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[3, 1], [], [2, 0]], [[1, 2, 3], [0], []]])
def test_any_partition_gives_the_same_gradient_and_metrics(make_batch, name, mode, parts):
    algo = algorithm(
        loss_mode=name,
        loss_agg_mode=mode,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        entropy_coeff=0.1,
        rollout_correction=RolloutCorrectionConfig(
            rollout_is="token", rollout_is_threshold=1.1, rollout_rs="sequence", rollout_rs_threshold=1.3
        ),
    )
    batch = full_batch(make_batch, [True, True, True, False])
    batch.update({"loss_weights": algo.loss_weights("actor", batch["response_mask"], batch.cu_seqlens)})
    whole, whole_metrics = gradient(algo, [batch])
    split, split_metrics = gradient(algo, [batch.select(rows) for rows in parts])
    torch.testing.assert_close(split, whole)
    assert whole.abs() > 1e-3
    assert {k: m.value for k, m in split_metrics.items()} == pytest.approx(
        {k: m.value for k, m in whole_metrics.items()}, rel=1e-5, abs=1e-6
    )


def test_policy_loss_adds_kl_and_entropy_by_hand(make_batch):
    algo = algorithm(loss_mode="reinforce", use_kl_loss=True, kl_loss_type="k2", kl_loss_coef=0.5, entropy_coeff=0.25)
    batch = make_batch(
        ".MM",
        [0],
        advantages=[9, 1, -2],
        old_logprobs=[NOT_ASKED] * 3,
        rollout_logprobs=[0, -1, -2],
        ref_logprobs=[9, -3, -2],
        loss_weights=[0, 0.5, 0.5],
    )
    logprobs = torch.tensor([9.0, -1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([9.0, 2.0, 4.0], requires_grad=True)
    loss, metrics = algo.policy_loss(batch, SimpleNamespace(logprobs=logprobs, entropy=entropy, values=None))
    # reinforce: 1, -4; k2 of x = 2, 0: 2, 0; entropy 2, 4
    assert loss.item() == pytest.approx(0.5 * (1 + 0.5 * 2 - 0.25 * 2) + 0.5 * (-4 - 0.25 * 4))
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 0.5 * (-1 + 0.5 * 2), 0.5 * 2])
    assert entropy.grad.tolist() == pytest.approx([0, -0.125, -0.125])
    assert metrics["actor/pg_loss"].value == pytest.approx(-1.5)
    assert metrics["actor/kl_loss"].value == pytest.approx(1.0)
    assert metrics["actor/entropy"].value == pytest.approx(3.0)


def test_entropy_is_only_reported_when_it_has_no_coefficient(make_batch):
    batch = full_batch(make_batch)
    algo = algorithm()
    batch.update({"loss_weights": algo.loss_weights("actor", batch["response_mask"], batch.cu_seqlens)})
    entropy = torch.full((11,), 2.0, requires_grad=True)
    logprobs = torch.full((11,), -1.0, requires_grad=True)
    loss, metrics = algo.policy_loss(batch, SimpleNamespace(logprobs=logprobs, entropy=entropy, values=None))
    loss.backward()
    assert not algo.needs_entropy and algorithm(entropy_coeff=0.01).needs_entropy
    assert entropy.grad is None and metrics["actor/entropy"].value == 2.0
    _, metrics = algo.policy_loss(batch, SimpleNamespace(logprobs=logprobs, entropy=None, values=None))
    assert "actor/entropy" not in metrics


def test_rejected_tokens_contribute_nothing_but_stay_in_the_denominator(make_batch):
    algo = algorithm(
        loss_mode="reinforce",
        use_kl_loss=True,
        kl_loss_type="k2",
        kl_loss_coef=1.0,
        rollout_correction=RolloutCorrectionConfig(rollout_rs="token", rollout_is="token", rollout_is_threshold=1.25),
    )
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = make_batch(
        "MM",
        [0],
        advantages=[1, 1],
        old_logprobs=[NOT_ASKED] * 2,
        rollout_logprobs=[-1 - math.log(1.5), 1.0],
        ref_logprobs=[-1, 5],
        loss_weights=[0.5, 0.5],
    )
    loss, metrics = algo.policy_loss(batch, SimpleNamespace(logprobs=logprobs, entropy=None, values=None))
    loss.backward()
    # token 0: ratio 1.5, weight 1.25; token 1: ratio e^-2, below 1/2: rejected, its KL too
    assert loss.item() == pytest.approx(0.5 * 1.25)
    assert logprobs.grad.tolist() == pytest.approx([-0.625, 0.0])
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].value == 0.5
    assert metrics["actor/pg_loss"].value == pytest.approx(0.625)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_empty_micro_batch_gives_a_zero_on_the_graph(make_batch, name):
    algo = algorithm(
        loss_mode=name,
        use_kl_loss=True,
        entropy_coeff=0.1,
        rollout_correction=RolloutCorrectionConfig(
            rollout_is="sequence", rollout_rs="geometric", rollout_token_veto_threshold=0.1
        ),
    )
    batch = full_batch(make_batch).update({"loss_weights": torch.ones(11)}).select([])
    logprobs = torch.zeros(0, requires_grad=True)
    output = SimpleNamespace(logprobs=logprobs, entropy=torch.zeros(0), values=logprobs)
    loss, metrics = algo.policy_loss(batch, output)
    loss.backward()
    assert loss.item() == 0.0 and logprobs.grad.shape == (0,)
    assert all(m.weight == 0 and m.value == 0 for m in metrics.values())
    loss, metrics = algo.value_loss(batch, output)
    assert loss.item() == 0.0 and loss.requires_grad
    assert all(m.weight == 0 and m.value == 0 for m in metrics.values())


def test_value_loss_by_hand(make_batch):
    batch = make_batch("M.M", [0], values=[1, 0, 1], returns=[2, 0, 0], loss_weights=[0.5, 0, 0.5])
    values = torch.tensor([1.0, 9.0, 2.0], requires_grad=True)
    algo = algorithm(adv_estimator="gae", cliprange_value=0.5)
    loss, metrics = algo.value_loss(batch, SimpleNamespace(logprobs=None, entropy=None, values=values))
    assert loss.item() == pytest.approx(0.5 * 0.5 + 0.5 * 2.0)
    assert metrics["critic/vf_loss"].value == pytest.approx(1.25)
    loss.backward()
    assert values.grad.tolist() == [-0.5, 0.0, 1.0]


def test_value_loss_is_partition_invariant(make_batch):
    algo = algorithm(adv_estimator="gae", cliprange_value=0.2)
    batch = full_batch(make_batch)
    batch.update({"loss_weights": algo.loss_weights("critic", batch["response_mask"], batch.cu_seqlens)})
    whole, _ = gradient(algo, [batch], "value_loss")
    split, _ = gradient(algo, [batch.select(rows) for rows in ([3, 0], [], [2], [1])], "value_loss")
    torch.testing.assert_close(split, whole)


# --- state and extension ---


def test_algorithm_survives_pickle_and_restores_its_state():
    algo = algorithm(kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.5))
    algo.load_state_dict({"kl_coef": 0.125})
    copy = pickle.loads(pickle.dumps(algo))
    assert copy.state_dict() == {"kl_coef": 0.125}
    assert copy.cfg == algo.cfg and copy.needs(3, [1]) == algo.needs(3, [1])


def ratio_estimator(batch, cfg):
    return {"advantages": (batch["old_logprobs"] - batch["rollout_logprobs"]).exp()}


def test_estimator_that_reads_old_logprobs_says_so_and_gets_all(make_batch, monkeypatch):
    batch = full_batch(make_batch)
    monkeypatch.setitem(sys.modules, "own_estimators", SimpleNamespace(ratio=ratio_estimator))
    with pytest.raises(ValueError, match="algo.adv_estimator=own_estimators.ratio reads .* reads_old_logprobs = True"):
        algorithm(adv_estimator="own_estimators.ratio").advantages(batch)
    monkeypatch.setattr(ratio_estimator, "reads_old_logprobs", True, raising=False)
    algo = algorithm(adv_estimator="own_estimators.ratio")
    assert algo.needs(4, [0, 1])["old_logprobs"] == EVERY
    columns, _ = algo.advantages(batch)
    assert torch.equal(columns["advantages"], ratio_estimator(batch, algo.cfg)["advantages"])


def test_other_columns_that_an_estimator_misses_are_named_as_they_are(make_batch, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_estimators", SimpleNamespace(missing=lambda batch, cfg: batch["entropy"]))
    with pytest.raises(NoColumn, match="no column 'entropy'; it has .*'rewards'") as caught:
        algorithm(adv_estimator="own_estimators.missing").advantages(full_batch(make_batch))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def own_loss(terms: PolicyTerms, cfg: AlgoConfig) -> TokenLoss:
    return TokenLoss(2.0 * terms.logprobs)


def test_loss_mode_takes_a_dotted_path(make_batch, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_losses", SimpleNamespace(own_loss=own_loss))
    columns = {"advantages": [0, 0], "old_logprobs": [-1, -3], "rollout_logprobs": [-1, -1], "loss_weights": [0.5, 0.5]}
    batch = make_batch("MM", [0], **columns)
    output = SimpleNamespace(logprobs=torch.tensor([-1.0, -3.0]), entropy=None, values=None)
    loss, _ = algorithm(loss_mode="own_losses.own_loss").policy_loss(batch, output)
    assert loss.item() == -4.0
