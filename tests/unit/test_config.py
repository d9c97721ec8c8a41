"""Every YAML composes, every wrong key is refused with the near ones, and rules between sections hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.config import CONFIG_DIR, SECTIONS, all_keys, register, to_object
from rlpost.launch import check_overrides
from rlpost.overrides import compose as composed

GROUPS = {g: sorted(p.stem for p in (CONFIG_DIR / g).glob("*.yaml")) for g in [*SECTIONS, "experiment"]}
NEEDS = {
    "model=hf": ["model.path=m"],
    "data=files": ["data.train_files=t.jsonl"],
    "reward=model": ["reward.reward_model.path=m"],
}  # choices that leave a key to the user


@pytest.fixture(autouse=True)
def registered():
    register()


def compose(*overrides):
    return to_object(composed(list(overrides))[0])


@pytest.mark.parametrize("choice", [f"{group}={name}" for group, names in GROUPS.items() for name in names])
def test_every_choice_of_every_group_composes_and_passes_its_checks(choice):
    assert compose(choice, *NEEDS.get(choice, []))


def test_root_defaults_are_the_quickstart():
    cfg = compose()
    assert cfg.model.path.startswith("maker:") and "addition" in str(cfg.data.train_files)


def test_rollout_computes_in_the_actors_dtype_unless_told_otherwise():
    assert compose().rollout.dtype == "auto"
    assert compose("actor.dtype=float16").rollout.dtype == "float16"
    mixed = compose("actor.dtype=float16", "rollout.dtype=bfloat16")
    assert (mixed.actor.dtype, mixed.rollout.dtype) == ("float16", "bfloat16")
    assert compose("rollout.dtype=float16").actor.dtype == "auto"


def test_engines_that_never_sleep_are_not_built_to():
    assert compose().rollout.free_cache_engine
    assert not compose("trainer=fully_async").rollout.free_cache_engine
    assert not compose("trainer=fully_async", "trainer.share_gpus=true").rollout.free_cache_engine


def test_a_model_brings_its_learning_rate_and_another_does_not_inherit_it():
    assert compose("model=hf", "model.path=m").actor.optim.lr == 1e-6
    assert compose().actor.optim.lr > 1e-6
    assert compose("actor.optim.lr=0.5").actor.optim.lr == 0.5


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("algo.clip_ratio_lo=0.1", "algo.clip_ratio_low"),
        ("trainer.total_trainig_steps=3", "trainer.total_training_steps"),
        ("actor.optim.learning_rate=1", "actor.optim.lr"),
        ("rolout.n=4", "rollout.n"),
        ("+data.trian_batch_size=4", "data.train_batch_size"),
        ("actor.lr=1", "actor.optim.lr"),
    ],
)
def test_unknown_key_is_refused_with_near_ones(override, near):
    message = check_overrides([override])
    assert message is not None and f"'{near}'" in message


def test_unknown_choice_lists_the_choices():
    message = check_overrides(["algo=grop"])
    assert message is not None and "grpo" in message


def test_wrong_key_inside_a_sweep_is_found_before_anything_runs():
    assert check_overrides(["algo=ppo,grpo,dapo", "seed=1,2"]) is None
    assert "gproo" in (check_overrides(["algo=ppo,gproo", "seed=1,2"]) or "")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["rollout.n=1"], ["rollout.n=1", "algo.adv_estimator=grpo"]),
        (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "renormalises"]),
        (["rollout.top_k=20"], ["rollout.top_k=20"]),
        (["actor.ppo_mini_batch_size=4096"], ["actor.ppo_mini_batch_size", "data.train_batch_size"]),
        (["actor.ppo_max_token_len_per_gpu=4"], ["actor.ppo_max_token_len_per_gpu", "data.max_prompt_length"]),
        (["rollout.max_model_len=4"], ["rollout.max_model_len", "data.max_response_length"]),
        (["trainer.critic_warmup=3"], ["trainer.critic_warmup", "critic"]),
        (["algo=dapo", "algo.filter_groups.metric=acuracy"], ["algo.filter_groups.metric", "accuracy"]),
        (["rollout.val_kwargs.n=4"], ["rollout.val_kwargs.temperature"]),
        (["model=hf"], ["model.path"]),
        (["algo.clip_ratio_c=0.5"], ["algo.clip_ratio_c"]),
        (["rollout.temperature=0"], ["rollout.temperature"]),
        (["rollout.num_workers=0"], ["rollout.num_workers=0"]),
        (["rollout.weight_sync=tcp"], ["rollout.weight_sync=tcp", "auto", "gloo", "nccl"]),
        (["rollout.weight_sync_timeout_s=0"], ["rollout.weight_sync_timeout_s=0"]),
        (["trainer.max_ckpt_to_keep=0"], ["trainer.max_ckpt_to_keep=0"]),
        (["trainer.total_training_steps=0"], ["trainer.total_training_steps=0"]),
        (["trainer.parity_probe_size=0"], ["trainer.parity_probe_size=0"]),
        (["trainer.logprob_diff_limit=0"], ["trainer.logprob_diff_limit=0"]),
        (["trainer.timeouts.train_s=0"], ["trainer.timeouts.train_s=0", "null"]),
        (["trainer.timeouts.trian_s=5"], ["trainer.timeouts.trian_s", "train_s"]),
        (["trainer.grace_period_s=-1"], ["trainer.grace_period_s=-1"]),
        (["trainer.name=fully_async"], ["trainer.name=fully_async", "trainer=fully_async"]),
        (["trainer.max_staleness=1"], ["trainer.max_staleness", "add trainer=fully_async"]),
        (["rollout.logprobs_every=0"], ["rollout.logprobs_every=0"]),
        (
            ["rollout.logprobs_every=8", "algo.rollout_correction.rollout_is=token"],
            ["rollout.logprobs_every=8", "algo.rollout_correction"],
        ),
        (["trainer=fully_async", "trainer.on_stale=maybe"], ["trainer.on_stale=maybe", "abort"]),
        (["trainer=fully_async", "trainer.require_batches=3"], ["require_batches=3", "data.train_batch_size"]),
        (
            ["trainer=fully_async", "trainer.trigger_parameter_sync_step=4", "trainer.max_staleness=2"],
            ["trainer.max_staleness=2", "3 versions", "sync every 3 steps"],
        ),
        (["cluster.n_gpus_per_node=0"], ["cluster.n_gpus_per_node=0"]),
        (["actor.grad_clip=0"], ["grad_clip=0", ".inf"]),
        (["actor.dtype=fp16"], ["dtype=fp16", "actor", "float16"]),
        (["actor.optim.betas=[0.9]"], ["optim.betas=[0.9]"]),
        (["reward.terms.mine.fn=a.b", "reward.terms.mine.wieght=1"], ["'reward.terms.mine.weight'"]),
    ],
)
def test_rules_name_the_keys_and_the_fix(overrides, names):
    message = check_overrides(overrides)
    assert message is not None
    for name in names:
        assert name in message


def test_a_reward_of_ones_own_is_named_on_the_command_line():
    assert compose("reward.terms.accuracy.fn=my_rewards.score").reward.terms["accuracy"].fn == "my_rewards.score"
    verl = compose("reward.terms.accuracy.fn=verl", "+reward.terms.accuracy.kwargs.path=my_rewards.compute_score")
    assert verl.reward.terms["accuracy"].kwargs == {"path": "my_rewards.compute_score"}
    both = compose("+reward.terms={style: {fn: my_rewards.style, weight: 0.5}}").reward.terms
    assert set(both) == {"accuracy", "style"} and both["style"].weight == 0.5


def test_a_sweep_over_a_pattern_and_an_empty_word_are_no_crash():
    assert check_overrides(["algo=glob(g*)", "seed=1"]) is None
    assert check_overrides([""]) is not None


def test_several_broken_rules_are_reported_at_once():
    message = check_overrides(["rollout.n=1", "rollout.max_model_len=4"])
    assert message is not None and "rollout.n=1" in message and "rollout.max_model_len" in message


def test_misspelled_key_in_a_yaml_file_is_refused(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nalgo:\n  gama: 0.9\n")
    result = run_main("--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job")
    assert result.returncode != 0 and "gama" in result.stderr


def run_main(*args):
    return subprocess.run(
        [sys.executable, "-m", "rlpost.main", *args],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )


def test_cfg_job_and_help_print_and_exit_zero():
    shown = run_main("--cfg", "job", "algo=ppo")
    assert shown.returncode == 0 and "adv_estimator: gae" in shown.stdout
    assert run_main("--help").returncode == 0


def test_wrong_key_exits_2_and_names_the_near_key():
    result = run_main("algo.clip_ratio_lo=0.1")
    assert result.returncode == 2 and "'algo.clip_ratio_low'" in result.stderr and "Traceback" not in result.stderr


def test_config_modules_import_neither_torch_nor_ray():
    code = "import sys, rlpost.launch; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert shown.stdout.strip() == "[]"


def test_all_keys_lists_nested_keys():
    assert {"algo.kl_ctrl.kl_coef", "actor.optim.lr", "seed"} <= set(all_keys())


def test_wrong_value_of_a_right_key_is_not_called_an_unknown_key():
    message = check_overrides(["actor.optim.lr=fast"])
    assert "fast" in message and "actor.optim.lr" in message and "is not a key" not in message


def test_wrong_choice_names_the_near_ones_and_no_way_to_add_it():
    assert "algo=drgpo: no such choice; did you mean 'drgrpo'" in check_overrides(["algo=drgpo"])
    assert "To append" not in check_overrides(["rollout.tempereture=0.7"])


@pytest.mark.parametrize(
    ("overrides", "every"),
    [
        (["data.train_batch_size=64"], 8),
        (["data.train_batch_size=5", "actor.ppo_mini_batch_size=5"], 1),
        (["data.train_batch_size=64", "algo.rollout_correction.rollout_is=token"], 1),
        (["data.train_batch_size=64", "rollout.logprobs_every=3"], 3),
    ],
)
def test_engine_is_asked_for_the_logprobs_that_parity_and_corrections_need(overrides, every):
    assert compose(*overrides).logprobs_every == every
