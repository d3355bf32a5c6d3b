"""Names that verl, TRL, OpenRLHF and NeMo-RL have for our keys, so that their users are led to the right one.

Data only; `suggest.py` reads it. An alias is not a key: it is refused, and the refusal says what to write instead.
"""

from __future__ import annotations

import dataclasses

VALUE = "VALUE"
"""Stands in an assignment for the value that was given."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """Names that others have for something, and how it is written here."""

    names: str
    """Separated by spaces; each is a whole dotted name, or the end of one (`rollout.n` is found in
    `actor_rollout_ref.rollout.n`). The longest end that is known wins."""
    to: tuple[str, ...] = ()
    """Assignments, or keys alone where the value means something else here; none where there is no such key."""
    note: str = ""
    """The difference between their key and ours."""
    values: tuple[tuple[str, str], ...] = ()
    """Single values, in lower case, that are written in another way."""


_NO_KL = (("0", "kl=null"), ("0.0", "kl=null"))
_ALGORITHMS = (
    ("ppo", "recipe=ppo"),
    ("gae", "recipe=ppo"),
    ("grpo", "recipe=grpo"),
    ("group_norm", "recipe=grpo"),
    ("dr_grpo", "recipe=grpo advantage.name=dr_grpo"),
    ("rloo", "recipe=grpo advantage.name=rloo"),
    ("reinforce_plus_plus", "recipe=grpo advantage.name=reinforce_plus_plus"),
    ("reinforce", "recipe=grpo advantage.name=reinforce_plus_plus"),
    ("reinforce_plus_plus_baseline", "recipe=grpo advantage.name=reinforce_plus_plus_baseline"),
    ("reinforce_baseline", "recipe=grpo advantage.name=reinforce_plus_plus_baseline"),
    ("gdpo", "recipe=grpo advantage.name=gdpo"),
    ("opo", "recipe=grpo advantage.name=opo"),
)
_ESTIMATORS = (
    ("kl", "kl.estimator=k1"),
    ("k1", "kl.estimator=k1"),
    ("mse", "kl.estimator=k2"),
    ("k2", "kl.estimator=k2"),
    ("low_var_kl", "kl.estimator=k3"),
    ("k3", "kl.estimator=k3"),
    ("abs", "kl.estimator=abs"),
)
_SCHEDULES = (("constant_with_warmup", "constant"), ("cosine_with_min_lr", "cosine"))
_DTYPES = (("bf16", "bfloat16"), ("fp32", "float32"), ("torch.bfloat16", "bfloat16"), ("torch.float32", "float32"))
_TRUNCATIONS = (("left", "truncate"), ("right", "truncate"), ("middle", "truncate"))
_PER_STEP = "a step has rollout.num_prompts x rollout.group_size rows, cut into actor.num_mini_batches optimizer steps"
PACKED = "rows are packed without padding, and balanced, always"
SLEEP = "engine.sleep=true keeps roles that share a pool in CPU memory while others have their turn"
_BY_TOKENS = "micro-batches are cut by tokens, never by rows"


def _same(prefix: str, values: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((written, f"{prefix}={meant}") for written, meant in values)


ALIASES: tuple[Alias, ...] = (
    # The algorithm.
    Alias("algorithm algorithm.name adv_estimator advantage_estimator", ("recipe",), values=_ALGORITHMS),
    Alias("gamma discount_factor", (f"advantage.discount={VALUE}",)),
    Alias("lam lambd lambda gae_lam", (f"advantage.gae_lambda={VALUE}",)),
    Alias(
        "whiten_advantages normalize_advantages",
        (f"advantage.whiten={VALUE}",),
        values=_same("advantage.whiten", (("true", "true"), ("false", "false"))),
    ),
    Alias("whiten_rewards", ("advantage.whiten",), "advantages are whitened, rewards are not"),
    Alias(
        "scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
        ("advantage.name",),
        values=_same(
            "advantage.name",
            (("group", "grpo"), ("true", "grpo"), ("none", "dr_grpo"), ("false", "dr_grpo"), ("batch", "lite_ppo")),
        ),
    ),
    # The KL to the reference.
    Alias(
        "beta kl_coef init_kl_coef kl_loss_coef kl_penalty_coef reference_policy_kl_penalty kl_beta",
        (f"kl.coef={VALUE}",),
        values=_NO_KL,
    ),
    Alias("kl_loss_type kl_estimator algorithm.kl_penalty", ("kl.estimator",), values=_ESTIMATORS),
    Alias("kl_ctrl.target_kl kl_target", (f"kl.adaptive.target={VALUE}",)),
    Alias("kl_horizon kl_ctrl.horizon", (f"kl.adaptive.horizon={VALUE}",)),
    Alias("use_unbiased_kl use_bias_correction_kl", (f"kl.importance_corrected={VALUE}",)),
    Alias("ref_update_interval ref_model_sync_steps", (f"reference.refresh_every_steps={VALUE}",)),
    Alias("use_kl_loss", ("kl.placement",), values=(("true", "kl.placement=loss"),)),
    Alias("use_kl_in_reward", ("kl.placement",), values=(("true", "kl.placement=reward"),)),
    # Updates.
    Alias("learning_rate actor_learning_rate optim.lr optimizer.kwargs.lr policy_lr", (f"actor.optimizer.lr={VALUE}",)),
    Alias("critic_learning_rate critic.optim.lr value.optimizer.kwargs.lr", (f"critic.optimizer.lr={VALUE}",)),
    Alias(
        "lr_scheduler_type lr_scheduler warmup_style lr_scheduler_name lr_decay_style",
        (f"actor.optimizer.schedule={VALUE}",),
        values=_same("actor.optimizer.schedule", _SCHEDULES),
    ),
    Alias("lr_warmup_ratio lr_warmup_steps_ratio", (f"actor.optimizer.warmup_ratio={VALUE}",)),
    Alias("warmup_steps lr_warmup_steps", ("actor.optimizer.warmup_ratio",), "as a part of trainer.num_steps"),
    Alias("adam_beta1 adam_beta2 adam_betas beta1 beta2", ("actor.optimizer.betas",), "both at once: [0.9, 0.95]"),
    Alias("grad_clip max_norm clip_grad gradient_clipping", (f"actor.optimizer.max_grad_norm={VALUE}",)),
    Alias("l2", (f"actor.optimizer.weight_decay={VALUE}",)),
    Alias("ppo_epochs num_ppo_epochs num_iterations update_epochs", (f"actor.num_epochs={VALUE}",)),
    Alias("max_epochs", (f"actor.num_epochs={VALUE}",)),
    Alias("clip_ratio cliprange eps_clip epsilon clip_eps", (f"loss.clip_low={VALUE}", f"loss.clip_high={VALUE}")),
    Alias("clip_ratio_low eps_clip_low ratio_clip_min", (f"loss.clip_low={VALUE}",)),
    Alias("clip_ratio_high eps_clip_high epsilon_high ratio_clip_max", (f"loss.clip_high={VALUE}",)),
    Alias("clip_ratio_c ratio_clip_c dual_clip_ratio delta", (f"loss.dual_clip={VALUE}",)),
    Alias("cliprange_value value_clip eps_clip_value", (f"critic.clip={VALUE}",)),
    Alias(
        "critic_warmup critic_warmup_steps num_critic_only_steps freezing_actor_steps",
        (f"critic.warmup_steps={VALUE}",),
    ),
    Alias("entropy_coeff entropy_loss_coef ent_coef entropy_weight", (f"actor.entropy_coef={VALUE}",)),
    Alias("mini_batch_size ppo_mini_batch_size train_global_batch_size", ("actor.num_mini_batches",), _PER_STEP),
    Alias(
        "micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu train_micro_batch_size "
        "micro_train_batch_size log_prob_micro_batch_size_per_gpu per_device_train_batch_size "
        "gradient_accumulation_steps micro_rollout_batch_size",
        ("engine.max_tokens_per_micro_batch",),
        _BY_TOKENS,
    ),
    Alias(
        "ppo_max_token_len_per_gpu max_token_len_per_gpu",
        (f"engine.max_tokens_per_micro_batch={VALUE}",),
    ),
    Alias(
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing recompute_granularity",
        ("engine.activations",),
        values=(("true", "engine.activations=checkpoint"), ("false", "engine.activations=keep")),
    ),
    # Rollouts.
    Alias(
        "rollout.n num_generations n_samples_per_prompt num_generations_per_prompt num_samples_per_prompt "
        "rollout_n group_num",
        (f"rollout.group_size={VALUE}",),
    ),
    Alias(
        "data.train_batch_size rollout_batch_size num_prompts_per_step gen_batch_size",
        (f"rollout.num_prompts={VALUE}",),
    ),
    Alias("batch_size train_batch_size global_batch_size", ("rollout.num_prompts", "data.num_examples"), _PER_STEP),
    Alias(
        "max_response_length max_completion_length generate_max_len max_new_tokens response_length max_tokens",
        (f"rollout.max_response_tokens={VALUE}",),
    ),
    Alias(
        "max_prompt_length prompt_max_len max_input_length rollout.prompt_length", (f"data.max_prompt_tokens={VALUE}",)
    ),
    Alias(
        "max_total_sequence_length max_model_len max_seq_len max_length",
        ("data.max_prompt_tokens", "rollout.max_response_tokens"),
        "prompts and responses have limits of their own",
    ),
    Alias(
        "mask_truncated_completions overlong_filtering mask_no_eos_with_zero apply_overlong_filtering",
        (f"rollout.mask_truncated={VALUE}",),
    ),
    Alias(
        "dynamic_sampling filter_groups filter_groups.enable dynamic_filtering use_dynamic_sampling",
        ("rollout.dynamic_sampling=10",),
    ),
    Alias("max_num_gen_batches dynamic_sampling_max_gen_batches", (f"rollout.dynamic_sampling={VALUE}",)),
    Alias("over_sampling_batch_size oversampling_batch_size", (f"rollout.over_sampling={VALUE}",)),
    Alias("zero_variance_filter mask_zero_variance_groups", ("rollout.dynamic_sampling=0",)),
    Alias(
        "overlong_buffer overlong_buffer.len overlong_buffer_cfg.len overlong_buffer_len overlong_tokens "
        "overlong_cache",
        (f"reward.overlong.buffer_tokens={VALUE}",),
    ),
    Alias(
        "overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor overlong_penalty_factor "
        "overlong_reward_penalty",
        (f"reward.overlong.factor={VALUE}",),
    ),
    Alias("reward_kwargs.max_resp_len", (f"reward.overlong.max_tokens={VALUE}",)),
    Alias(
        "use_vllm", ("rollout.engine",), values=(("true", "rollout.engine=vllm"), ("false", "rollout.engine=native"))
    ),
    Alias(
        "rollout.name generation.backend",
        (f"rollout.engine={VALUE}",),
        "native, hf or vllm",
        values=(("sglang", "rollout.engine"), ("trtllm", "rollout.engine")),
    ),
    Alias("gpu_memory_utilization", ("rollout.cache_tokens",), "the cache is sized in tokens"),
    Alias("max_num_seqs", (f"rollout.max_batch_rows={VALUE}",)),
    Alias("stop_strings stop_token_ids", ("rollout.stop",), "texts; the model's own end is always a stop"),
    Alias(
        "tensor_model_parallel_size tensor_parallel_size ds_tensor_parallel_size tp_size tensor_model_parallel",
        (f"actor.mesh.tp={VALUE}",),
        "each rollout rank holds a whole model",
    ),
    Alias(
        "rollout.tensor_model_parallel_size vllm_tensor_parallel_size rollout.data_parallel_size "
        "rollout.expert_parallel_size rollout.pipeline_model_parallel_size",
        note="each rollout rank holds a whole model",
    ),
    Alias(
        "ulysses_sequence_parallel_size ring_attn_size context_parallel_size sequence_parallel_size sp_size",
        (f"actor.mesh.sp={VALUE}",),
    ),
    Alias("fsdp_size zero_stage fsdp_config.fsdp_size", ("actor.mesh.dp_shard",), "how many ranks share one copy"),
    Alias(
        "dp_replicate",
        note="it is what the others leave: the role's ranks (cluster.pools, or its placement.num_ranks) divided "
        "by dp_shard x sp x tp",
    ),
    # Model, data and reward.
    Alias("model_name model_name_or_path pretrain base_model model.name actor_model", (f"model.path={VALUE}",)),
    Alias("critic_pretrain critic.model.path", (f"critic.path={VALUE}",)),
    Alias(
        "torch_dtype precision bf16 mixed_precision fp16",
        (f"model.dtype={VALUE}",),
        values=(("true", "model.dtype=bfloat16"), ("false", "model.dtype=float32"), *_same("model.dtype", _DTYPES)),
    ),
    Alias("lora_rank lora_r lora.rank peft.r", (f"model.lora.rank={VALUE}",), values=(("0", "model.lora=null"),)),
    Alias("lora_alpha lora.alpha", (f"model.lora.alpha={VALUE}",)),
    Alias("train_files prompt_data dataset_name train_dataset train_data input_data", (f"data.train={VALUE}",)),
    Alias("val_files eval_dataset validation_files val_data", (f"data.validation={VALUE}",)),
    Alias("truncation", ("data.on_too_long",), values=(("error", "data.on_too_long=error"),)),
    Alias(
        "filter_overlong_prompts",
        ("data.on_too_long",),
        values=(("true", "data.on_too_long=drop"), ("false", "data.on_too_long=error")),
    ),
    Alias(
        "custom_reward_function.path custom_reward_function.name reward_funcs reward_fn remote_rm_url",
        ("reward.function",),
        "as file.py:function",
    ),
    Alias("reward_kwargs", ("reward.parameters",), "arguments of the function by name"),
    Alias(
        "reward_weights gdpo_reward_keys gdpo_reward_weights multi_objective_aggregation",
        ("reward.functions", "advantage.name"),
        "each reward has a name and a weight; advantage.name=gdpo normalises each apart",
    ),
    Alias(
        "reward_pretrain reward_model.path reward_model.model.path reward_model.model_path reward_model_path",
        (f"reward.path={VALUE}",),
    ),
    # The frame.
    Alias("max_steps total_training_steps max_num_steps num_training_steps", (f"trainer.num_steps={VALUE}",)),
    Alias("total_epochs num_train_epochs num_episodes max_num_epochs total_episodes", (f"trainer.num_epochs={VALUE}",)),
    Alias(
        "save_freq save_steps save_period save_interval",
        (f"checkpoint.every_steps={VALUE}",),
        values=(("-1", "checkpoint.every_steps=null"),),
    ),
    Alias("max_actor_ckpt_to_keep save_total_limit max_ckpt_num keep_top_k", (f"checkpoint.keep={VALUE}",)),
    Alias("test_freq eval_steps val_period eval_interval", (f"validation.every_steps={VALUE}",)),
    Alias("experiment_name run_name exp_name", (f"trainer.name={VALUE}",)),
    Alias("default_local_dir output_dir save_path ckpt_path checkpoint_dir", (f"trainer.runs_dir={VALUE}",)),
    Alias(
        "resume_mode resume_from_checkpoint load_checkpoint resume_from_path resume",
        note="it is an option of the command: rally train RUN_FOLDER --resume",
    ),
    Alias(
        "logger report_to log_with",
        ("tracking",),
        "a list of any of tensorboard, wandb, mlflow, trackio, swanlab; each run writes metrics.jsonl in any case",
    ),
    Alias("use_wandb", ("tracking",), values=(("true", "tracking=wandb"),)),
    Alias("project_name wandb_project", (f"tracking.project={VALUE}",)),
    Alias(
        "logging_steps",
        note="each run writes metrics.jsonl, rollouts/ and curve.png into its folder, at every step",
    ),
    Alias(
        "n_gpus_per_node gpus_per_node num_gpus_per_node actor_num_gpus_per_node",
        (f"cluster.pools={{main: [{VALUE}]}}",),
        "processes on each node; cluster.device says what they compute on",
    ),
    Alias(
        "nnodes num_nodes actor_num_nodes",
        ("cluster.pools",),
        "a count of processes for each node: {main: [8, 8]} is two nodes",
    ),
    # What has a key of another kind, or needs none.
    Alias("use_token_level_loss", ("aggregation",), values=(("true", "aggregation=token"),)),
    Alias("val_kwargs.temperature", (f"validation.temperature={VALUE}",)),
    Alias("val_kwargs.n n_samples_per_eval_prompt", (f"validation.num_samples={VALUE}",)),
    Alias("val_kwargs.do_sample", ("validation.temperature",), values=(("false", "validation.temperature=0"),)),
    Alias("eos_token", (f"model.tokenizer.eos_token={VALUE}",)),
    Alias("chat_template_path", (f"model.tokenizer.chat_template={VALUE}",), "a file, in Jinja"),
    Alias("custom_chat_template", ("model.tokenizer.chat_template",), "a file with the template in it"),
    Alias("use_rslora", (f"model.lora.rslora={VALUE}",)),
    Alias("lora.target_modules lora_target_modules model.target_modules", (f"model.lora.target_modules={VALUE}",)),
    Alias("val_max_samples", (f"validation.max_prompts={VALUE}",), values=(("-1", "validation.max_prompts=null"),)),
    Alias("trainer.device", (f"cluster.device={VALUE}",)),
    Alias(
        "use_remove_padding use_rmpad use_dynamic_bsz log_prob_use_dynamic_bsz padding_free balance_batch "
        "group_by_length",
        note=PACKED,
    ),
    Alias(
        "param_offload optimizer_offload grad_offload offload_policy free_cache_engine enforce_eager "
        "vllm_enable_sleep_mode",
        note=SLEEP,
    ),
    Alias(
        "log_prob_micro_batch_size reward_model.micro_batch_size forward_micro_batch_size_per_gpu "
        "forward_max_token_len_per_gpu log_prob_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu "
        "max_num_batched_tokens per_device_eval_batch_size val_batch_size "
        "local_rollout_forward_batch_size",
        note=f"{_BY_TOKENS}, engine.max_tokens_per_micro_batch each; results do not depend on it",
    ),
    Alias(
        "enable_chunked_prefill load_format layered_summon use_shm use_torch_compile vllm_mode rollout.mode "
        "return_raw_chat ignore_eos disable_log_stats vllm_gpu_memory_utilization dataloader_num_workers "
        "engine_kwargs calculate_log_probs multi_stage_wake_up strategy model_engine use_mbridge vanilla_mbridge "
        "override_transformer_config use_fused_kernels use_liger_kernel use_liger_loss "
        "ddp_find_unused_parameters",
        note="there is nothing to choose here",
    ),
    Alias("overlong_buffer.log overlong_buffer_cfg.log", note="reward/mean has the penalty in it"),
    Alias("critic.model.enable_gradient_checkpointing", note="engine.activations is one setting for all roles"),
    Alias(
        "expert_model_parallel_size expert_tensor_parallel_size moe_parallel_size",
        note="the ranks of mesh.tp share the experts (docs/engine.md)",
    ),
    Alias("override_config.max_position_embeddings", note="config.json of the model says it"),
    Alias("prompt_key", note="the column is `prompt` (docs/data.md)"),
    Alias("val_kwargs.top_p val_kwargs.top_k", note="validation samples as training does, but for its temperature"),
    Alias("val_before_train", note="a run is validated before its first step, always"),
    Alias("reward_manager reward_manager.name", note="the reward function decides (docs/reward.md)"),
    Alias("attention_dropout embd_pdrop resid_pdrop hidden_dropout", note="models are trained without dropout"),
    Alias("vf_coef", note="actor and critic have optimizers of their own"),
    Alias(
        "pipeline_model_parallel_size pipeline_parallel_size", note="layers are not cut over ranks; mesh.dp_shard is"
    ),
    Alias("remove_unused_columns", note="columns that nobody names are not read"),
    Alias(
        "log_val_generations log_completions num_completions_to_print rollout_data_dir validation_data_dir",
        ("tracking.rollouts_gib",),
        "all rollouts lie in the run's folder in any case: rally show RUN",
    ),
    Alias("colocate_all_models colocate_actor_ref", note="roles on the same pool share its processes, as by default"),
)

VALUES: dict[str, tuple[tuple[str, str], ...]] = {
    "kl.coef": _NO_KL,
    "kl.estimator": _ESTIMATORS,
    "recipe": _ALGORITHMS,
    "model.dtype": _same("model.dtype", _DTYPES),
    "actor.optimizer.schedule": _same("actor.optimizer.schedule", _SCHEDULES),
    "critic.optimizer.schedule": _same("critic.optimizer.schedule", _SCHEDULES),
    "data.on_too_long": _same("data.on_too_long", _TRUNCATIONS),
}
"""Values of our own keys that others write, in lower case, and what is meant by them."""
