"""What keys of verl and TRL are where nothing is given, if it is something else here. Data only.

Of verl 0.9.1 (its ppo_trainer.yaml), TRL 1.16 and, for the PPOConfig that it has not, TRL 0.24, each with
what transformers' TrainingArguments adds.
"""

from __future__ import annotations

VERL: dict[str, object] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
    "trainer.test_freq": -1,
}
VERL_CRITIC: dict[str, object] = {
    "critic.cliprange_value": 0.5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": [0.9, 0.999],
}
"""Those of a run that has a critic."""
VERL_LORA: dict[str, object] = {"actor_rollout_ref.model.lora_alpha": 16}
"""Key of a run that trains adapters."""
VERL_LENGTH: dict[str, object] = {"trainer.total_epochs": 30}
"""Where no number of steps is given."""
VERL_SFT: dict[str, object] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.01,
    "optim.betas": [0.9, 0.999],
    "optim.lr_scheduler_type": "constant",
    "optim.lr_warmup_steps_ratio": 0.0,
    "trainer.test_freq": -1,
}
"""Those of its trainer for supervised fine-tuning."""
VERL_SFT_LENGTH: dict[str, object] = {"trainer.total_epochs": 4}

_TRAINER: dict[str, object] = {
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
_SAMPLED: dict[str, object] = {"learning_rate": 1e-6, "max_completion_length": 512}
_OWN: dict[str, dict[str, object]] = {
    "SFTConfig": {"learning_rate": 2e-5, "max_length": 1024, "truncation_mode": "keep_start"},
    "DPOConfig": {"learning_rate": 1e-6, "max_length": 1024, "truncation_mode": "keep_start", "beta": 0.1},
    "RewardConfig": {"learning_rate": 1e-4, "max_length": 1024},
    "GRPOConfig": {
        **_SAMPLED,
        "num_generations": 8,
        "beta": 0.0,
        "use_bias_correction_kl": True,
        "epsilon": 0.2,
        "loss_type": "dapo",
    },
    "RLOOConfig": {**_SAMPLED, "num_generations": 2, "beta": 0.05, "epsilon": 0.2},
    "PPOConfig": {
        "learning_rate": 5e-5,
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "kl_coef": 0.05,
        "lam": 0.95,
        "response_length": 53,
        "temperature": 0.7,
    },
    "GKDConfig": {"learning_rate": 2e-5, "max_new_tokens": 128, "temperature": 0.9, "beta": 0.5, "lmbda": 0.5},
    "DistillationConfig": {**_SAMPLED, "beta": 1.0},
}
TRL = {name: {**_TRAINER, **own} for name, own in _OWN.items()}
"""By the class of the arguments."""
TRL_LORA: dict[str, object] = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None}
"""Those of use_peft."""
PEFT_LORA: dict[str, object] = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": None}
"""Those of PEFT's own LoraConfig, for a script that makes one."""
TRL_VLLM: dict[str, object] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
"""Those of a GRPOConfig that samples with vLLM."""
TRL_LENGTH: dict[str, object] = {"num_train_epochs": 3}
"""Where no number of steps or of rollouts is given."""
