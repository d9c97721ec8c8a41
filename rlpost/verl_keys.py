"""verl's keys and ours: what docs/verl_keys.md is made of, `explain` looks up, and a wrong key is answered with."""

from dataclasses import dataclass

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True)
class Row:
    """Some keys of verl below one prefix, and what they are here.

    Attributes:
        theirs: the prefix.
        ours: our prefix; None where there is no such key, and `note` says why or what to do.
        keys: what follows the prefix, `name` where it is called the same here and else `name=ours`.
        note: what else there is to know.
    """

    theirs: str
    ours: str | None
    keys: str
    note: str = ""

    def pairs(self) -> list[tuple[str, str | None]]:
        """verl's whole keys and ours."""
        found: list[tuple[str, str | None]] = []
        for word in self.keys.split():
            name, _, other = word.partition("=")
            ours = None if self.ours is None else f"{self.ours}.{other or name}"
            found.append((f"{self.theirs}.{name}", ours))
        return found


# fmt: off
ROWS: tuple[Row, ...] = (
    Row("data", "data", "train_files val_files", "also `hf://`, `reasoning-gym://` and `task://` sources"),
    Row("data", "data", "prompt_key reward_fn_key train_batch_size max_prompt_length max_response_length"),
    Row("data", "data", "val_batch_size shuffle seed train_max_samples val_max_samples"),
    Row("data", "data", "filter_overlong_prompts", "`truncation=error` is `filter_overlong_prompts=false`"),
    Row("data", "data", "apply_chat_template_kwargs=chat_template_kwargs"),
    Row("actor_rollout_ref.model", "model", "path", "with `model=hf`"),
    Row("actor_rollout_ref.model", "model", "tokenizer_path trust_remote_code override_config"),
    Row("actor_rollout_ref.model", "model", "custom_chat_template=chat_template"),
    Row("actor_rollout_ref.model", "model", "lora_rank lora_alpha target_modules enable_gradient_checkpointing"),
    Row("actor_rollout_ref.model", None, "use_remove_padding", "always on: batches are packed"),
    Row(ACTOR, "actor", "strategy", "`fsdp2`"),
    Row(ACTOR, "actor", "ppo_mini_batch_size", "prompts, as there"),
    Row(ACTOR, "actor", "ppo_max_token_len_per_gpu ppo_epochs grad_clip shuffle ulysses_sequence_parallel_size"),
    Row(ACTOR, None, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz",
        "always dynamic: `actor.ppo_max_token_len_per_gpu` is the budget of a micro-batch"),
    Row(ACTOR, "model", "use_torch_compile=compile", "`auto`, `on` or `off`: decoder layers and logprob head"),
    Row(ACTOR, "algo", "clip_ratio_low clip_ratio_high clip_ratio_c"),
    Row(ACTOR, "algo", "clip_ratio=clip_ratio_low", "set both `algo.clip_ratio_low` and `algo.clip_ratio_high`"),
    Row(ACTOR, "algo", "policy_loss.loss_mode=loss_mode", "`vanilla` is `ppo_clip`"),
    Row(ACTOR, "algo", "loss_agg_mode loss_scale_factor entropy_coeff use_kl_loss kl_loss_coef"),
    Row(ACTOR, "algo", "kl_loss_type", "`kl` is `k1`, `mse` is `k2`; `k1` as a loss is refused, use `k1+`"),
    Row(ACTOR, "actor", "optim.lr optim.betas optim.weight_decay", "also `actor.optim.eps`"),
    Row(ACTOR, "actor", "optim.lr_warmup_steps optim.lr_scheduler_type optim.min_lr_ratio"),
    Row(ACTOR, "actor", "fsdp_config.param_offload=fsdp.param_offload "
        "fsdp_config.optimizer_offload=fsdp.optimizer_offload "
        "fsdp_config.reshard_after_forward=fsdp.reshard_after_forward fsdp_config.fsdp_size=fsdp.fsdp_size"),
    Row(ACTOR, "actor", "fsdp_config.dtype=dtype", "of passes; `rollout.dtype=auto` is the same"),
    Row(ACTOR, None, "fsdp_config.model_dtype", "always float32: master weights"),
    Row(ACTOR, None, "checkpoint.save_contents checkpoint.load_contents",
        "always all that a resume needs; `trainer.export_hf` writes the model besides"),
    Row("actor_rollout_ref.ref", "ref", "log_prob_max_token_len_per_gpu fsdp_config.param_offload=param_offload"),
    Row("actor_rollout_ref.ref", None,
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz",
        "always dynamic: `ref.log_prob_max_token_len_per_gpu`"),
    Row(ROLLOUT, "rollout", "name", "chosen by group: `rollout=vllm`, `rollout=sglang`, `rollout=hf`"),
    Row(ROLLOUT, "rollout", "n temperature top_p top_k dtype max_model_len"),
    Row(ROLLOUT, "rollout", "tensor_model_parallel_size gpu_memory_utilization max_num_seqs"),
    Row(ROLLOUT, "rollout", "max_num_batched_tokens enforce_eager free_cache_engine"),
    Row(ROLLOUT, "rollout", "engine_kwargs.vllm=engine_kwargs engine_kwargs.sglang=engine_kwargs"),
    Row(ROLLOUT, "rollout", "val_kwargs.n val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k"),
    Row(ROLLOUT, "rollout", "val_kwargs.do_sample=val_kwargs.temperature", "`do_sample=false` is `temperature=0`"),
    Row(ROLLOUT, "rollout", "agent.num_workers=num_workers agent.default_agent_loop=workflow"),
    Row(ROLLOUT, "rollout", "checkpoint_engine.backend=weight_sync", "`auto` chooses by topology"),
    Row(ROLLOUT, "rollout", "checkpoint_engine.update_weights_bucket_megabytes=update_weights_bucket_megabytes"),
    Row(ROLLOUT, "rollout", "calculate_log_probs=logprobs_every",
        "on for about eight groups a step; `rollout.logprobs_every=1` asks the engine for those of all"),
    Row(ROLLOUT, None, "mode", "always asynchronous requests"),
    Row(ROLLOUT, None, "load_format", "the engine loads the checkpoint, the first weight sync replaces it"),
    Row(ROLLOUT, None, "prompt_length response_length", "`data.max_prompt_length` and `data.max_response_length`"),
    Row(ROLLOUT, None, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu",
        "always dynamic: `actor.ppo_max_token_len_per_gpu`"),
    Row("actor_rollout_ref", "trainer", "nccl_timeout=timeouts.train_s",
        "a minute more than the longest of `trainer.timeouts` is the process group's limit"),
    Row("actor_rollout_ref", None, "hybrid_engine", "`trainer=colocated` or `trainer=fully_async`"),
    Row("algorithm", "algo", "adv_estimator", "set by the presets: `algo=grpo`, `algo=ppo` (`gae`), `algo=rloo`, ..."),
    Row("algorithm", "algo", "gamma lam norm_adv_by_std_in_grpo use_kl_in_reward"),
    Row("algorithm", "algo", "kl_penalty", "`kl` is `k1`, `mse` is `k2`"),
    Row("algorithm", "algo", "kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl"),
    Row("algorithm", "algo", "filter_groups.enable filter_groups.metric filter_groups.max_num_gen_batches",
        "`metric` names a term of `reward.terms` (`acc` is `accuracy`) or is `reward` (`score`)"),
    Row("algorithm", "algo", "rollout_correction.rollout_is rollout_correction.rollout_is_threshold "
        "rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold "
        "rollout_correction.rollout_rs_threshold_lower rollout_correction.rollout_token_veto_threshold"),
    Row("critic", None, "enable", "there is a critic when `algo.adv_estimator=gae` (`algo=ppo`)"),
    Row("critic", "critic", "model.path=path", "null: the actor's checkpoint with a new value head"),
    Row("critic", "critic", "cliprange_value ppo_mini_batch_size ppo_epochs ppo_max_token_len_per_gpu grad_clip "
        "shuffle ulysses_sequence_parallel_size"),
    Row("critic", "critic", "optim.lr optim.betas optim.weight_decay optim.lr_warmup_steps optim.lr_scheduler_type "
        "optim.min_lr_ratio"),
    Row("critic", None, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz",
        "always dynamic: `critic.ppo_max_token_len_per_gpu`"),
    Row("custom_reward_function", "reward", "path=terms name=terms",
        "`reward.terms.accuracy.fn=package.module.function`; for a function written for verl "
        "`reward.terms.accuracy.fn=verl reward.terms.accuracy.kwargs.path=package.module.compute_score`"),
    Row("reward", "reward", "custom_reward_function.path=terms custom_reward_function.name=terms",
        "`reward.terms.accuracy.fn=package.module.function`, as above"),
    Row("reward", "reward", "num_workers=num_processes", "for each of `rollout.num_workers`"),
    Row("reward", None, "sandbox_fusion.url", "`reward=code`: a sandbox on this host, see docs/rewards.md"),
    Row("reward", "reward", "reward_model.path", "with `reward=model`"),
    Row("reward", "reward", "reward_kwargs.overlong_buffer_cfg.enable=overlong_buffer.enable "
        "reward_kwargs.overlong_buffer_cfg.len=overlong_buffer.len "
        "reward_kwargs.overlong_buffer_cfg.penalty_factor=overlong_buffer.penalty_factor"),
    Row("trainer", "trainer", "total_epochs total_training_steps save_freq test_freq val_before_train critic_warmup "
        "rollout_data_dir log_val_generations"),
    Row("trainer", "trainer", "resume_mode=resume resume_from_path=resume", "`trainer.resume=auto`, `never` or a path"),
    Row("trainer", "trainer", "max_actor_ckpt_to_keep=max_ckpt_to_keep max_critic_ckpt_to_keep=max_ckpt_to_keep"),
    Row("trainer", None, "default_local_dir", "`hydra.run.dir`"),
    Row("trainer", None, "balance_batch", "always on: tokens are balanced over ranks"),
    Row("trainer", "cluster", "nnodes n_gpus_per_node"),
    Row("trainer", "tracking", "logger project_name experiment_name"),
    Row("async_training", "trainer", "staleness_threshold trigger_parameter_sync_step partial_rollout",
        "with `trainer=fully_async`"),
    Row("async_training", "trainer", "require_batches",
        "with `trainer=fully_async`; times `actor.ppo_mini_batch_size` it is `data.train_batch_size` here"),
    Row("rollout", "trainer", "nnodes=rollout_gpus n_gpus_per_node=rollout_gpus",
        "with `trainer=fully_async`: how many GPUs roll out; `trainer.train_gpus` the others"),
)
# fmt: on

HEAD = """# From verl's keys to ours

`python -m rlpost.tools.explain actor_rollout_ref.rollout.n` looks one up; a run that is given verl's key says ours.
This page is written from `rlpost/verl_keys.py` by `python -m rlpost.tools.explain --write docs`.
"""

_EXACT: dict[str, tuple[str | None, str]] = {
    theirs: (ours, row.note) for row in ROWS for theirs, ours in row.pairs() if theirs != ours
}


def from_verl(key: str, value: str = "") -> str | None:
    """What verl's `key` is here, as a sentence; None where it is no key of verl that we know, or is called the same.

    With its `value`, where that means the same here: what to write.
    """
    if key not in _EXACT:
        return None
    ours, note = _EXACT[key]
    if ours is None:
        return f"{key} is a key of verl that has none here: {note}"
    write = f": write {ours}={value}" if value and not note else ""
    return f"{key} is verl's name for {ours}" + (f" ({note})" if note else "") + write


def ours_of(key: str) -> str | None:
    """Our name of verl's `key`, where there is one."""
    return next((ours for row in ROWS for theirs, ours in row.pairs() if theirs == key), None)


def verl_names(key: str) -> list[str]:
    """verl's names of our `key`."""
    return [theirs for row in ROWS for theirs, ours in row.pairs() if ours == key]


def markdown() -> str:
    """docs/verl_keys.md."""
    lines = [HEAD, "| verl | rlpost |", "|---|---|"]
    for row in ROWS:
        pairs = row.pairs()
        theirs = ", ".join(f"`{key}`" for key, _ in pairs)
        ours = ", ".join(dict.fromkeys(f"`{key}`" for _, key in pairs if key is not None))
        if [t for t, _ in pairs] == [o for _, o in pairs]:
            ours = "the same"
        lines.append(f"| {theirs} | {'; '.join(part for part in (ours, row.note) if part)} |")
    return "\n".join(lines) + "\n"
