"""Configs of verl and TRL as ours."""

import re
import shlex
from pathlib import Path

import pytest

from rallypoint.config import load_config, values_of
from rallypoint.config.translate import Translation, from_trl, from_verl
from rallypoint.errors import ConfigError

PYTHON_DOCS = Path(__file__).parents[3] / "docs" / "python.md"

# Keys of the scripts in verl's examples/grpo_trainer, examples/ppo_trainer and recipe/dapo, with values of their kind.
VERL = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.001
algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 algorithm.filter_groups.metric=acc
data.train_files=a.parquet data.val_files=b.parquet data.return_raw_chat=True data.train_batch_size=1024
data.gen_batch_size=1536 data.val_batch_size=1312 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error' data.prompt_key=prompt data.shuffle=False
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.model.use_shm=True
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.use_rmpad=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.model.lora_rank=64
actor_rollout_ref.model.lora_alpha=32 +actor_rollout_ref.model.override_config.attention_dropout=0.
+actor_rollout_ref.model.override_config.embd_pdrop=0. +actor_rollout_ref.model.override_config.resid_pdrop=0.
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 actor_rollout_ref.actor.optim.weight_decay=0.1
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size=128
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.grad_clip=1.0
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.actor.use_token_level_loss=True actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.grad_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
actor_rollout_ref.rollout.log_prob_micro_batch_size=128 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=9000
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True
actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=9000
actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7
actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True
actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.ref.log_prob_micro_batch_size=128
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9000
actor_rollout_ref.ref.ulysses_sequence_parallel_size=8 actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 critic.optim.lr=1e-5
critic.optim.lr_warmup_steps_ratio=0.05
critic.model.use_remove_padding=True critic.model.use_rmpad=True critic.model.path=Qwen/Qwen2-7B-Instruct
critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size=16
critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.grad_offload=False
critic.model.fsdp_config.optimizer_offload=False reward_model.enable=True reward_model.model.path=some/reward
reward_model.model.use_rmpad=True reward_model.model.fsdp_config.param_offload=True reward_model.micro_batch_size=16
reward_model.reward_manager=dapo custom_reward_function.path=mine.py custom_reward_function.name=score
reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=256
reward_model.overlong_buffer.penalty_factor=1.0 trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name=p trainer.experiment_name=e trainer.n_gpus_per_node=8 trainer.nnodes=2
trainer.val_before_train=False trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
trainer.default_local_dir=out trainer.resume_mode=auto
"""


PREFIXES = {
    "A": "actor_rollout_ref.actor", "R": "actor_rollout_ref.rollout", "F": "actor_rollout_ref.ref",
    "M": "actor_rollout_ref.model", "d": "data", "t": "trainer", "c": "critic", "a": "algorithm", "rm": "reward_model",
}  # fmt: skip


def scripts() -> dict[str, list[str]]:
    """Return the keys of verl's scripts, by the name of the script."""
    text = Path(__file__).with_name("verl_scripts.txt").read_text()
    _, *parts = re.split(r"^\[(.+)\]$", text, flags=re.MULTILINE)
    written = zip(parts[::2], parts[1::2], strict=True)
    return {
        name: [re.sub(r"^(\w+)\.", lambda found: f"{PREFIXES.get(found[1], found[1])}.", word) for word in keys.split()]
        for name, keys in written
    }


def loaded(found: Translation, tmp_path):
    (tmp_path / "translated.yaml").write_text(found.as_yaml())
    needed = [
        "model.path=m",
        "data.train=d.jsonl",
        "reward={function: 'r.py:f', path: null}",
    ]
    return load_config(str(tmp_path / "translated.yaml"), needed).config


def test_nine_of_ten_keys_of_the_published_scripts_of_verl_are_known(tmp_path):
    found = from_verl(VERL)
    assert found.num_known / found.num_given >= 0.9, found.unknown
    assert found.num_given == len(VERL.split())
    config = loaded(found, tmp_path)
    assert (config.recipe, config.rollout.num_prompts, config.rollout.group_size) == ("grpo", 1024, 5)
    assert (config.actor.num_mini_batches, config.actor.optimizer.lr) == (4, 1e-6)
    assert config.cluster.pools == {"main": (8, 8)}
    assert config.kl is not None
    assert (config.kl.coef, config.kl.estimator, config.kl.placement) == (0.001, "k3", "loss")
    assert (config.rollout.engine, config.rollout.top_k, config.data.on_too_long) == ("vllm", None, "drop")


@pytest.mark.parametrize("script", scripts())
def test_nine_of_ten_keys_of_each_published_script_of_verl_are_known_and_make_a_config(script, tmp_path):
    found = from_verl(" ".join(map(shlex.quote, scripts()[script])))
    assert found.num_given == len(scripts()[script])
    assert found.num_known / found.num_given >= 0.9, found.unknown
    if found.keys.get("advantage.name") == "gdpo":  # its rewards have no names there
        found.keys["advantage.name"] = "grpo"
    found.keys.setdefault("engine.max_tokens_per_micro_batch", 40_000)
    assert loaded(found, tmp_path).rollout.num_prompts == found.keys["rollout.num_prompts"]


def test_the_docs_say_how_many_keys_of_the_published_scripts_are_known():
    found = [from_verl(" ".join(map(shlex.quote, keys))) for keys in scripts().values()]
    known, given = sum(one.num_known for one in found), sum(one.num_given for one in found)
    assert f"{known} of {given} keys are known" in " ".join(PYTHON_DOCS.read_text(encoding="utf-8").split())


def test_a_setting_of_one_role_does_not_become_that_of_another():
    megatron = from_verl(" ".join(scripts()["examples/ppo_trainer/run_qwen3_8b_megatron.sh"])).keys
    assert [megatron[f"{role}.mesh.tp"] for role in ("actor", "reference", "critic")] == [2, 2, 2], "not 4, of rollout"
    rows = from_verl(" ".join(scripts()["examples/ppo_trainer/run_qwen2-7b_rm_seq_balance.sh"])).keys
    assert rows["engine.max_tokens_per_micro_batch"] == 24_000, "not that of the critic"
    assert "actor.mesh.tp" not in rows
    start = from_verl(" ".join(scripts()["examples/ppo_trainer/run_qwen2.5-0.5b.sh"])).keys
    assert start["engine.activations"] == "checkpoint", "not that of the critic"


@pytest.mark.parametrize(
    ("mode", "name"), [("gspo", "gspo"), ("geo_mean", "gmpo"), ("cispo", "cispo"), ("dppo_tv", "dppo")]
)
def test_the_name_of_a_policy_loss_is_ours_and_keys_that_it_has_not_are_named(mode, name):
    found = from_verl(f"algorithm.adv_estimator=grpo actor.policy_loss.loss_mode={mode} actor.clip_ratio_c=3.0")
    assert found.keys["loss.name"] == name
    assert "loss.dual_clip" not in found.keys, "which their vanilla loss has alone"
    assert found.unknown == []


def test_losses_by_covariance_bring_their_parameters():
    clip = from_verl("policy_loss.loss_mode=clip_cov policy_loss.clip_cov_lb=0.5 policy_loss.clip_cov_ratio=1e-3")
    assert {key: value for key, value in clip.keys.items() if key.startswith("loss.")} == {
        "loss.name": "clip_cov",
        "loss.covariance_low": 0.5,
        "loss.fraction": 1e-3,
        "loss.clip_low": 0.2,  # this and the others as verl has them where they are not given
        "loss.clip_high": 0.2,
    }
    kl = from_verl("policy_loss.loss_mode=kl_cov policy_loss.ppo_kl_coef=2 policy_loss.kl_cov_ratio=0.002")
    assert (kl.keys["loss.name"], kl.keys["loss.coef"], kl.keys["loss.fraction"]) == ("kl_cov", 2, 0.002)
    assert clip.unknown == kl.unknown == []


def test_what_is_not_known_and_what_needs_no_key_is_named():
    text = from_verl("algorithm.adv_estimator=grpo foo.bar=1 actor_rollout_ref.model.use_remove_padding=True").as_yaml()
    assert "# 2 of 3 keys are known." in text
    assert "# Without a counterpart:\n#   foo.bar=1\n" in text
    assert (
        "#   rows are packed without padding, and balanced, always:\n#     actor_rollout_ref.model.use_remove" in text
    )


@pytest.mark.parametrize(
    ("keys", "kl"),
    [
        ("algorithm.adv_estimator=grpo", {"kl": None}),
        ("actor.use_kl_loss=True actor.kl_loss_coef=0.0", {"kl": None}),
        (
            "actor.use_kl_loss=True actor.kl_loss_type=mse",
            {"kl.placement": "loss", "kl.coef": 1e-3, "kl.estimator": "k2"},
        ),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01", {"kl.placement": "reward", "kl.coef": 0.01}),
        ("algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.01", {"kl": None}),
    ],
)
def test_the_kl_of_verl_follows_from_several_keys(keys, kl):
    found = from_verl(keys).keys
    assert {key: value for key, value in found.items() if key.startswith("kl")} == kl


def test_arguments_of_grpo_config_are_a_config(tmp_path):
    found = from_trl(
        """training_args = GRPOConfig(output_dir="out", learning_rate=1e-6, per_device_train_batch_size=8,
        gradient_accumulation_steps=4, num_generations=8, max_prompt_length=256, max_completion_length=128, beta=0.04,
        epsilon=0.2, epsilon_high=0.28, num_iterations=2, loss_type="dr_grpo", scale_rewards=False, bf16=True,
        temperature=0.9, top_p=0.95, logging_steps=1, report_to="wandb", seed=42, max_steps=100, save_steps=100,
        warmup_ratio=0.1, weight_decay=0.1, lr_scheduler_type="cosine", max_grad_norm=0.1, log_completions=True,
        mask_truncated_completions=True, gradient_checkpointing=True)"""
    )
    assert found.unknown == []
    config = loaded(found, tmp_path)
    assert (config.rollout.num_prompts, config.rollout.group_size, config.rollout.temperature) == (4, 8, 0.9)
    assert (config.aggregation, config.advantage.name, config.seed) == ("fixed_length", "dr_grpo", 42)
    assert (config.trainer.num_steps, config.model.dtype, config.actor.num_epochs) == (50, "bfloat16", 2)
    assert found.open["steps of theirs"] == "they are optimizer steps, of which a step here has 2"
    assert (config.checkpoint.every_steps, config.trainer.num_epochs) == (50, None)


def test_arguments_of_ppo_config_are_a_config(tmp_path):
    found = from_trl(
        "PPOConfig(num_ppo_epochs=4, num_mini_batches=2, kl_coef=0.05, cliprange=0.2, vf_coef=0.1, "
        "cliprange_value=0.2, gamma=1.0, lam=0.95, response_length=53, missing_eos_penalty=1.0)"
    )
    assert found.unknown == ["missing_eos_penalty=1.0"]
    config = loaded(found, tmp_path)
    assert (config.recipe, config.actor.num_epochs, config.critic.num_mini_batches) == ("ppo", 4, 2)
    assert config.rollout.max_response_tokens == 53


OF_TRL = {
    "sft": (
        "SFTConfig(max_length=4096, packing=True, per_device_train_batch_size=4, gradient_accumulation_steps=8, "
        "assistant_only_loss=True, learning_rate=2e-5, num_train_epochs=2)",
        {"data.max_row_tokens": 4096, "data.num_examples": 32, "actor.optimizer.lr": 2e-5, "trainer.num_epochs": 2},
    ),
    "dpo": (
        'trl.DPOConfig(beta=0.2, loss_type="ipo", max_length=512, max_steps=30)',
        {
            "preference.beta": 0.2,
            "preference.name": "ipo",
            "data.max_row_tokens": 512,
            "trainer.num_steps": 30,
            "trainer.num_epochs": None,
        },
    ),
    "reward_model": (
        "RewardConfig(max_length=512, per_device_train_batch_size=8, max_steps=-1)",
        {"data.max_row_tokens": 512, "data.num_examples": 8, "trainer.num_epochs": 3.0},
    ),
    "grpo": (
        "RLOOConfig(num_generations=4, per_device_train_batch_size=16)",
        {"advantage.name": "rloo", "kl.coef": 0.05, "kl.placement": "reward", "rollout.num_prompts": 4},
    ),
    "ppo": ("PPOConfig(num_ppo_epochs=4)", {"actor.num_epochs": 4}),
    "opd": (
        'GKDConfig(teacher_model_name_or_path="big", beta=1.0, lmbda=1.0, max_new_tokens=64, temperature=0.9)',
        {"teacher.path": "big", "teacher.loss": "reverse", "rollout.temperature": 0.9},
    ),
}


@pytest.mark.parametrize("recipe", OF_TRL)
def test_every_class_of_trl_is_a_config_of_its_recipe(tmp_path, recipe):
    text, expected = OF_TRL[recipe]
    found = from_trl(text)
    assert found.unknown == []
    (tmp_path / "translated.yaml").write_text(found.as_yaml())
    config = load_config(str(tmp_path / "translated.yaml"), draft=True).config
    assert config.recipe == recipe
    assert {key: value for key, value in values_of(config) if key in expected} == expected


def test_a_command_or_an_argument_of_its_own_says_which_class_is_meant():
    dpo, sft = from_trl("trl dpo --beta 0.2").keys, from_trl("--packing true --max_length 99").keys
    assert (dpo["recipe"], dpo["preference.beta"]) == ("dpo", 0.2)
    assert (sft["recipe"], sft["data.max_row_tokens"]) == ("sft", 99)
    assert from_trl("DPOConfig(temperature=0.5)").open["rollout.temperature=0.5"] == "dpo does not read it"


@pytest.mark.parametrize("text", ["KTOConfig(beta=0.1)", "trl kto --beta 0.1"])
def test_a_class_that_no_recipe_stands_for_is_refused(text):
    with pytest.raises(
        ConfigError, match=r"no recipe stands for TRL's (KTOConfig|kto); expected one of SFTConfig, DPO"
    ):
        from_trl(text)


def test_a_file_and_a_command_line_of_theirs_are_read(tmp_path):
    (tmp_path / "theirs.yaml").write_text("data: {train_batch_size: 8}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    assert from_verl(str(tmp_path / "theirs.yaml")).keys["rollout.num_prompts"] == 8
    assert from_trl("--learning_rate 1e-6 --num_generations 4").keys["rollout.group_size"] == 4


GRPO = (
    "algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16 "
)


@pytest.mark.parametrize(
    "key",
    [
        "reward_model.rollout.response_length=4096",
        "reward.reward_model.rollout.n=9",
        "reward_model.temperature=0.5",
        "actor_rollout_ref.rollout.trace.project_name=other",
        "distillation.distillation_loss.clip_ratio=0.9",
        "actor_rollout_ref.actor.shuffle=False",
    ],
)
def test_a_key_of_another_section_changes_nothing_and_is_named(key):
    plain = from_verl(GRPO + "data.max_response_length=2048 trainer.project_name=p")
    found = from_verl(f"{GRPO} data.max_response_length=2048 trainer.project_name=p {key}")
    assert found.keys == plain.keys
    assert found.unknown == [key]


def test_profiling_sets_nothing():
    found = from_verl(
        GRPO + "actor_rollout_ref.actor.profiler.save_path=out global_profiler.save_path=b profile.options.save_path=c"
    )
    assert found.unknown == []
    assert not [key for key in found.keys if key.startswith("trainer.runs_dir")]


def test_two_keys_of_theirs_with_different_values_for_one_of_ours_are_named():
    found = from_verl(GRPO + "data.max_response_length=2048 actor_rollout_ref.rollout.response_length=1024")
    assert found.keys["rollout.max_response_tokens"] == 2048
    assert found.differs["actor_rollout_ref.rollout.response_length=1024"] == (
        "rollout.max_response_tokens is 2048 by data.max_response_length=2048; it is one key here"
    )
    same = from_verl(GRPO + "data.max_response_length=2048 actor_rollout_ref.rollout.response_length=2048")
    assert same.open.keys() == from_verl(GRPO).open.keys()


@pytest.mark.parametrize("keys", ["clip_ratio_high=0.28 clip_ratio=0.2", "clip_ratio=0.2 clip_ratio_high=0.28"])
def test_a_bound_of_one_side_goes_before_that_of_both(keys):
    found = from_verl(GRPO + " ".join(f"actor_rollout_ref.actor.{key}" for key in keys.split()))
    assert (found.keys["loss.clip_low"], found.keys["loss.clip_high"]) == (0.2, 0.28)
    assert not [key for key in found.open if "clip" in key]


def test_keys_of_a_kl_that_is_off_are_named(tmp_path):
    found = from_verl(GRPO + "algorithm.kl_penalty=kl")
    assert found.open["kl.estimator=k1"] == "the KL is off"
    assert loaded(found, tmp_path).kl is None
    adaptive = from_verl(
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2"
    )
    kl = loaded(adaptive, tmp_path).kl
    assert kl is not None
    assert kl.adaptive is not None
    assert (kl.adaptive.target, kl.adaptive.horizon) == (0.2, 10_000)


def test_keys_that_are_not_given_are_what_they_are_in_verl(tmp_path):
    found = from_verl("data.train_batch_size=64 actor_rollout_ref.actor.optim.lr=1e-6")
    config = loaded(found, tmp_path)
    assert (config.recipe, config.rollout.group_size, config.rollout.max_response_tokens) == ("ppo", 1, 512)
    assert (config.actor.optimizer.betas, config.actor.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    assert (config.critic.optimizer.betas, config.critic.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    assert (config.critic.clip, config.trainer.num_epochs) == (0.5, 30)
    assert (config.loss.name, getattr(config.loss, "dual_clip", None)) == ("clip", 3.0)
    text = found.as_yaml()
    assert "# Not given, and so set to their defaults:\n#   algorithm.adv_estimator=gae\n" in text
    assert "#   actor_rollout_ref.rollout.n=1\n" in text
    assert "#   data.train_batch_size" not in text
    assert "# 2 of 2 keys are known.\n" in text
    cispo = from_verl(GRPO + "actor_rollout_ref.actor.policy_loss.loss_mode=cispo")
    assert "loss.dual_clip" not in cispo.keys
    assert not [said for said in (*cispo.usual, *cispo.open) if "clip_ratio_c" in said or "dual_clip" in said]


def test_the_critic_has_the_mini_batches_of_the_actor_unless_it_has_its_own():
    both = from_verl("data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 actor.ppo_epochs=2").keys
    assert (both["actor.num_mini_batches"], both["critic.num_mini_batches"]) == (4, 4)
    assert (both["actor.num_epochs"], both["critic.num_epochs"]) == (2, 2)
    own = from_verl("data.train_batch_size=64 actor.ppo_mini_batch_size=16 critic.ppo_mini_batch_size=32").keys
    assert (own["actor.num_mini_batches"], own["critic.num_mini_batches"]) == (4, 2)


def test_keys_that_are_not_given_are_what_they_are_in_trl(tmp_path):
    config = loaded(from_trl("GRPOConfig(num_generations=4)"), tmp_path)
    assert (config.actor.optimizer.schedule, config.actor.optimizer.betas) == ("linear", (0.9, 0.999))
    assert (config.trainer.num_epochs, config.rollout.max_response_tokens) == (3, 512)
    assert (config.kl, config.rollout.num_prompts) == (None, 2)
    betas = from_trl("GRPOConfig(adam_beta2=0.95)")
    assert betas.keys["actor.optimizer.betas"] == [0.9, 0.95]
    assert "adam_beta2=0.999" not in betas.usual
    sft = from_trl("SFTConfig(max_steps=20, warmup_steps=5)")
    assert (sft.keys["actor.optimizer.lr"], sft.keys["actor.optimizer.warmup_ratio"]) == (2e-5, 0.25)


def test_steps_go_before_epochs_as_at_theirs(tmp_path):
    found = from_verl(GRPO + "trainer.total_epochs=10 trainer.total_training_steps=500 actor.optim.lr_warmup_steps=50")
    config = loaded(found, tmp_path)
    assert (config.trainer.num_steps, config.trainer.num_epochs, config.actor.optimizer.warmup_ratio) == (
        500,
        None,
        0.1,
    )
    assert found.open["trainer.total_epochs=10"] == "total_training_steps goes before it"
    assert (
        from_verl(GRPO + "trainer.total_epochs=10 trainer.total_training_steps=null").keys["trainer.num_epochs"] == 10
    )
    trl = from_trl("GRPOConfig(max_steps=7, num_train_epochs=2)")
    assert (trl.keys["trainer.num_steps"], trl.keys["trainer.num_epochs"]) == (7, None)
    assert trl.open["num_train_epochs=2"] == "max_steps goes before it"


def test_episodes_of_ppo_are_rollouts_and_its_kl_is_in_the_reward(tmp_path):
    found = from_trl(
        "PPOConfig(total_episodes=1000, per_device_train_batch_size=4, gradient_accumulation_steps=8, kl_coef=0.05, "
        "num_ppo_epochs=2, learning_rate=3e-6)"
    )
    config = loaded(found, tmp_path)
    assert (config.trainer.num_steps, config.trainer.num_epochs) == (32, None)
    assert (config.rollout.num_prompts, config.rollout.group_size, config.rollout.temperature) == (32, 1, 0.7)
    assert (config.critic.num_epochs, config.critic.optimizer.lr) == (2, 3e-6)
    assert config.kl is not None
    assert (config.kl.placement, config.kl.coef) == ("reward", 0.05)


def test_the_batches_of_grpo_follow_from_what_is_sampled_at_once(tmp_path):
    found = from_trl(
        "GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=8, "
        "max_steps=100, num_iterations=2, num_generations=4, importance_sampling_level='sequence', beta=0.01, "
        "sync_ref_model=True, ref_model_sync_steps=64, bf16=True, fp16=False)"
    )
    config = loaded(found, tmp_path)
    assert found.unknown == []
    assert (config.rollout.num_prompts, config.actor.num_mini_batches, config.actor.num_epochs) == (16, 4, 2)
    assert (config.trainer.num_steps, config.reference.refresh_every_steps) == (13, 8)
    assert (config.loss.name, config.model.dtype) == ("gspo", "bfloat16")
    assert (found.keys["loss.clip_low"], found.keys["loss.clip_high"]) == (0.2, 0.2)
    assert "ref_model_mixup_alpha=0.6" in found.differs
    batch = from_trl("GRPOConfig(generation_batch_size=64, num_generations=8)").keys
    assert (batch["rollout.num_prompts"], batch["actor.num_mini_batches"]) == (8, 8)
    idle = from_trl("GRPOConfig(ref_model_sync_steps=64)")
    assert idle.open["ref_model_sync_steps=64"] == "it says nothing without sync_ref_model"
    assert "reference.refresh_every_steps" not in idle.keys


def test_losses_of_trl_bring_their_bounds(tmp_path):
    cispo = loaded(from_trl("GRPOConfig(loss_type='cispo', epsilon_high=5.0)"), tmp_path)
    assert (cispo.loss.name, getattr(cispo.loss, "clip_high", None), cispo.aggregation) == ("cispo", 4.0, "token")
    sapo = loaded(from_trl("GRPOConfig(loss_type='sapo', sapo_temperature_neg=1.1)"), tmp_path)
    assert (sapo.loss.name, getattr(sapo.loss, "tau_negative", None), sapo.aggregation) == ("sapo", 1.1, "sequence")


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --beta 0.1 --learning_rate 1e-5 --use_vllm",
        "--beta=0.1 --bf16 --learning-rate=1e-5 --use_vllm",
        "beta=0.1 --bf16 learning_rate=1e-5 --use_vllm",
        "trl grpo --use_vllm --learning_rate 1e-5 --bf16 --beta 0.1",
        "accelerate launch --num_processes 8 grpo.py --bf16 --use_vllm True --beta 0.1 --learning_rate 1e-5",
    ],
)
def test_a_flag_without_a_value_is_true(flags):
    found = from_trl(flags)
    assert (found.num_given, found.unknown) == (4, [])
    assert (found.keys["model.dtype"], found.keys["rollout.engine"]) == ("bfloat16", "vllm")
    assert (found.keys["actor.optimizer.lr"], found.keys["kl.coef"]) == (1e-5, 0.1)


def test_a_negative_number_is_a_value():
    found = from_trl("--bf16 --beta -0.1 --learning_rate 1e-6")
    assert (found.num_given, found.keys["model.dtype"], found.keys["kl"]) == (3, "bfloat16", None)
    assert found.open["beta=-0.1"] == "a KL has a weight above 0"


SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
# it's ours
MODEL=${MODEL:-me/small}
LR=${ACTOR_LR:-3e-6}
LOGGER=${LOGGER:-'["console","wandb"]'}
prompt_tokens=$((1024 * 2))
RESPONSE_TOKENS=${RESPONSE_TOKENS:-$(( (prompt_tokens + 512) * 2 ))}
estimator=grpo
files="['$OUR_DATA/a.parquet', '$OUR_DATA/b.parquet']"
if [ "${SAMPLER:-vllm}" = hf ]; then engine=hf; else engine=vllm; fi
DATA=(
    algorithm.adv_estimator=$estimator
    data.train_files="$files"
    data.train_batch_size=${BATCH:-64}
    data.max_prompt_length=${prompt_tokens}
    data.max_response_length=${RESPONSE_TOKENS}
)
ACTOR=(actor_rollout_ref.actor.optim.lr=${LR} actor_rollout_ref.actor.ppo_mini_batch_size=16)
"${PYTHON[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.rollout.name=$engine actor_rollout_ref.rollout.n=2 \\
    "trainer.logger=${LOGGER}" \\
    +trainer.experiment_name=run-$(date +%s) \\
    trainer.save_freq=$NOWHERE \\
    model_engine=megatron "$@"
"""


def test_a_script_is_read_with_its_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_DATA", "/data")
    monkeypatch.setenv("BATCH", "32")
    (tmp_path / "run.sh").write_text(SCRIPT)
    found = from_verl(str(tmp_path / "run.sh"))
    expected = {
        "recipe": "grpo",
        "data.train": ["/data/a.parquet", "/data/b.parquet"],
        "rollout.num_prompts": 32,
        "data.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 5120,
        "actor.optimizer.lr": 3e-6,
        "actor.num_mini_batches": 2,
        "model.path": "me/small",
        "rollout.engine": "hf",
        "tracking.to": ["wandb"],
    }
    assert {key: found.keys.get(key) for key in expected} == expected
    assert found.num_given == 13
    assert found.differs["engine=hf"] == "the script has others of it in branches; the first is taken"
    assert found.unknown == [
        "trainer.experiment_name=run-$(...) (a value that only a shell knows)",
        "trainer.save_freq=$NOWHERE (a value that only a shell knows)",
    ]
    assert loaded(found, tmp_path).rollout.group_size == 2


def test_a_script_of_trl_is_read(tmp_path):
    (tmp_path / "run.sh").write_text(
        "N=${N:-4}\naccelerate launch --num_processes 2 \\\n  a.py --num_generations $N --bf16\n"
    )
    found = from_trl(str(tmp_path / "run.sh"))
    assert (found.num_given, found.keys["rollout.group_size"], found.keys["model.dtype"]) == (2, 4, "bfloat16")


def test_a_value_that_only_a_shell_knows_is_no_value():
    found = from_verl("lr=${LR_OF_NOBODY} actor.optim.lr=$lr data.train_batch_size=$(nproc) data.max_prompt_length=9")
    assert (found.num_given, found.num_known) == (3, 1)
    assert [said.partition("=")[0] for said in found.unknown] == ["actor.optim.lr", "data.train_batch_size"]
    assert not {"actor.optimizer.lr", "rollout.num_prompts"} & found.keys.keys()
    assert "data.train_batch_size=1024" not in found.usual
    with pytest.raises(ConfigError, match=r"adv_estimator=\$name: only a shell knows .* give the script"):
        from_verl("algorithm.adv_estimator=$name")


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.profiler.enable=True",
        "global_profiler.tool=nsys",
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=True",
        "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True",
        "actor_rollout_ref.ref.entropy_from_logits_with_chunking=True",
        "actor_rollout_ref.actor.megatron.use_dist_checkpointing=True",
        "data.image_key=images",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4096",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "reward.reward_model.rollout.name=vllm",
        "reward_model.rollout.gpu_memory_utilization=0.8",
    ],
)
def test_keys_that_need_nothing_here_say_so(key):
    found = from_verl(GRPO + key)
    assert (found.unknown, found.keys) == ([], from_verl(GRPO).keys)
    assert key in found.open


def test_gpg_is_a_group_without_its_deviation():
    found = from_verl("algorithm.adv_estimator=gpg actor.policy_loss.loss_mode=gpg")
    assert found.unknown == []
    assert [found.keys[key] for key in ("recipe", "advantage.name", "loss.name")] == [
        "grpo",
        "dr_grpo",
        "policy_gradient",
    ]


@pytest.mark.parametrize("text", ["", "no keys at all", "missing.yaml", "'unclosed"])
def test_what_is_no_config_is_an_error(text):
    with pytest.raises(ConfigError, match="their config"):
        from_verl(text)


def test_a_call_that_is_no_python_is_an_error():
    with pytest.raises(ConfigError, match="as Python"):
        from_trl("GRPOConfig(learning_rate=")


def test_a_loss_is_a_mean_of_what_it_is_there():
    gspo = from_verl(GRPO + "actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    assert (gspo.keys["aggregation"], gspo.keys["loss.clip_high"]) == ("token", 0.2)
    for mode in ("sapo", "geo_mean"):  # of rows, whatever is given
        key = "actor_rollout_ref.actor.loss_agg_mode=token-mean"
        found = from_verl(f"{GRPO} actor_rollout_ref.actor.policy_loss.loss_mode={mode} {key}")
        assert found.keys["aggregation"] == "sequence"
        assert key in found.open
    assert from_trl("GRPOConfig(importance_sampling_level='sequence')").keys["aggregation"] == "token"
    assert (
        from_trl("GRPOConfig(importance_sampling_level='sequence', loss_type='grpo')").keys["aggregation"] == "sequence"
    )


def test_arguments_of_a_reward_function_are_its_parameters(tmp_path):
    given = "path=mine.py reward_kwargs.weight=0.5 reward_kwargs.units.length=m"
    found = from_verl(GRPO + " ".join(f"custom_reward_function.{key}" for key in given.split()))
    assert (found.keys["reward.function"], found.unknown) == ("mine.py:compute_score", [])
    assert found.keys["reward.parameters"] == {"weight": 0.5, "units": {"length": "m"}}


def test_the_device_is_theirs_with_its_processes():
    found = from_verl(GRPO + "trainer.n_gpus_per_node=2 trainer.device=cpu")
    assert (found.keys["cluster.device"], found.keys["cluster.pools"]) == ("cpu", {"main": [2]})
    assert from_verl(GRPO + "trainer.device=cpu").keys["cluster.device"] == "cpu"


def test_a_device_that_torch_does_not_know_by_itself_is_named():
    found = from_verl(GRPO + "trainer.n_gpus_per_node=2 trainer.device=npu")
    assert (found.keys["cluster.device"], found.unknown) == ("cuda", [])
    assert found.open["trainer.device=npu"] == "expected cuda, cpu, xpu; cluster.device is cuda"


def test_tokens_of_a_part_of_a_row_become_those_of_whole_rows():
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2816"
    assert from_verl(GRPO + tokens).keys["engine.max_tokens_per_micro_batch"] == 2816
    sp = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8"
    found = from_verl(f"{GRPO} {tokens} {sp}").keys
    assert (found["engine.max_tokens_per_micro_batch"], found["actor.mesh.sp"]) == (22_528, 8)
    lost = from_verl(f"{GRPO} {tokens} actor_rollout_ref.actor.ulysses_sequence_parallel_size=$SP_NOWHERE")
    assert lost.keys["engine.max_tokens_per_micro_batch"] == 2816, "the parts are named, and the tokens are not lost"


SFT = (
    "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=a.parquet data.messages_key=talk "
    "data.train_batch_size=96 data.max_length=2048 data.truncation=right data.micro_batch_size_per_gpu=4 "
    "data.max_token_len_per_gpu=8192 engine.ulysses_sequence_parallel_size=2 optim.lr=2e-5 optim.lr_warmup_steps=10 "
    "optim.lr_scheduler_type=cosine model.path=m trainer.total_training_steps=100 trainer.test_freq=after_each_epoch"
)


def test_a_script_of_their_trainer_for_fine_tuning_is_sft():
    found = from_verl(SFT)
    assert (found.unknown, found.keys["recipe"]) == ([], "sft")
    assert not [key for key in found.keys if key.startswith(("rollout.", "critic.", "loss.", "kl"))]
    assert {key: found.keys[key] for key in ("data.num_examples", "data.max_row_tokens", "data.on_too_long")} == {
        "data.num_examples": 96,
        "data.max_row_tokens": 2048,
        "data.on_too_long": "truncate",
    }
    assert (found.keys["data.columns.messages"], found.keys["engine.max_tokens_per_micro_batch"]) == ("talk", 16_384)
    optimizer = {
        key: found.keys[f"actor.optimizer.{key}"] for key in ("lr", "warmup_ratio", "schedule", "weight_decay")
    }
    assert optimizer == {"lr": 2e-5, "warmup_ratio": 0.1, "schedule": "cosine", "weight_decay": 0.01}
    assert found.keys["trainer.num_steps"] == 100
    assert "trainer.test_freq=after_each_epoch" in found.open


def test_what_their_fine_tuning_has_where_nothing_is_given_is_said():
    found = from_verl("python -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m data.train_files=a.parquet")
    assert found.keys["model.path"] == "m"
    assert (found.keys["data.num_examples"], found.keys["trainer.num_epochs"]) == (256, 4)
    assert {"data.train_batch_size=256", "data.max_length=1024", "optim.lr=0.001"} <= set(found.usual)


def test_a_script_that_starts_two_programs_says_whose_keys_are_taken():
    one = "python -m verl.trainer.main_ppo algorithm.adv_estimator={}"
    found = from_verl(f"{one.format('grpo')}\n{one.format('gae')}")
    assert found.keys["recipe"] == "ppo"
    assert "the last are taken" in found.differs["2 programs of theirs"]
    assert "programs" not in str(from_verl(one.format("gae")).differs)
