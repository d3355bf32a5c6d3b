"""Names that only whole configs have, besides those of `aliases.py`. Data only."""

from __future__ import annotations

from rallypoint.config.aliases import PACKED, SLEEP, VALUE, Alias

SAME: tuple[Alias, ...] = (
    Alias("top_k", (f"rollout.top_k={VALUE}",), values=(("-1", "rollout.top_k=null"), ("0", "rollout.top_k=null"))),
    Alias("temperature", (f"rollout.temperature={VALUE}",)),
    Alias("top_p", (f"rollout.top_p={VALUE}",)),
    Alias("min_p", (f"rollout.min_p={VALUE}",)),
    Alias("repetition_penalty", (f"rollout.repetition_penalty={VALUE}",)),
    Alias("warmup_ratio", (f"actor.optimizer.warmup_ratio={VALUE}",)),
    Alias("weight_decay", (f"actor.optimizer.weight_decay={VALUE}",)),
    Alias("max_grad_norm", (f"actor.optimizer.max_grad_norm={VALUE}",)),
    Alias("betas", (f"actor.optimizer.betas={VALUE}",)),
    Alias("min_lr_ratio", (f"actor.optimizer.min_lr_ratio={VALUE}",)),
    Alias("lr", (f"actor.optimizer.lr={VALUE}",)),
    Alias("seed", (f"seed={VALUE}",)),
    Alias("data.shuffle shuffle_dataset", (f"data.shuffle={VALUE}",)),
    Alias("actor_rollout_ref.model.path", (f"model.path={VALUE}",)),
    Alias("trust_remote_code", (f"model.trust_remote_code={VALUE}",)),
)
"""Keys of the same name in a section of ours; for whole configs, since a single one is found by likeness."""

IDLE: tuple[Alias, ...] = (
    Alias(
        "profiler profile global_profiler",
        note="each run measures its phases, and rally show says where the time goes",
    ),
    Alias(
        "reshard_after_forward forward_prefetch entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
        "entropy_checkpointing checkpoint_engine.update_weights_bucket_megabytes enable_prefix_caching "
        "enable_sleep_mode filter_overlong_prompts_workers preprocessing_num_workers dataset_num_proc "
        "skip_tokenizer_init megatron.sequence_parallel megatron.use_distributed_optimizer use_orig_params "
        "wrap_policy.min_num_params use_v1",
        note="it changes how fast a run is and what memory it takes there; here there is nothing to choose",
    ),
    Alias(
        "use_dist_checkpointing dist_checkpointing_path load_weight save_contents load_contents async_save",
        note="checkpoints have one form here, and weights are read from the model's folder",
    ),
    Alias("image_key video_key audio_key freeze_vision_tower", note="models read text alone"),
    Alias("optim.total_training_steps lr_decay_steps", note="the schedule ends with trainer.num_steps"),
    Alias(
        "reward_model.use_dynamic_bsz reward_model.use_remove_padding reward_model.model.use_remove_padding "
        "reward_model.model.use_rmpad reward_model.forward_max_token_len_per_gpu",
        note=PACKED,
    ),
    Alias("reward_model.model.fsdp_config.param_offload reward_model.param_offload", note=SLEEP),
    Alias(
        "rollout.dtype megatron.dtype fsdp_config.dtype fsdp_config.model_dtype mixed_precision.reduce_dtype",
        note="model.dtype says what all roles compute in",
    ),
    Alias("enable_activation_offload", ("engine.activations",), values=(("true", "engine.activations=offload"),)),
    Alias("virtual_pipeline_model_parallel_size", note="layers are not cut over ranks; mesh.dp_shard is"),
    Alias(
        "reward_model.rollout.name reward_model.rollout.gpu_memory_utilization "
        "reward_model.rollout.tensor_model_parallel_size reward_model.rollout.dtype "
        "reward_model.rollout.enforce_eager reward_model.rollout.free_cache_engine",
        note="a reward model scores rows in one pass here, without an engine that generates",
    ),
    Alias("eval_strategy evaluation_strategy", note="a run is validated where data.validation is given"),
    Alias("hydra", note="it says where hydra looks for files and writes them"),
    Alias("rollout.do_sample", note="rollouts are sampled, by rollout.temperature"),
)
"""Keys of theirs that need nothing here; a single one, typed by hand, is rare."""

KNOWN = {name: alias for alias in (*SAME, *IDLE) for name in alias.names.split()}
"""By each of their names."""
