"""What scripts of verl and TRL compute, written down by hand, and what their translations compute."""

from pathlib import Path

import pytest

from rallypoint.config import RunConfig, load_config
from rallypoint.config.translate import Translation, from_trl, from_verl
from rallypoint.errors import ConfigError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MAIN = "python3 -m verl.trainer.main_ppo data.train_files=t.parquet data.val_files=v.parquet"
NODE = "trainer.nnodes=1 trainer.n_gpus_per_node=8"
Meaning = dict[str, object]


def meaning(config: RunConfig) -> Meaning:
    """Return what a config computes, in the words of the papers."""
    actor, rollout, kl, loss = config.actor, config.rollout, config.kl, config.loss.model_dump()
    said: Meaning = {
        "recipe": config.recipe,
        "rows": config.num_rows,
        "updates": actor.num_epochs * actor.num_mini_batches,
        "lr": (actor.optimizer.lr, actor.optimizer.schedule, actor.optimizer.warmup_ratio),
        "length": (config.trainer.num_epochs, "epochs")
        if config.trainer.num_epochs
        else (config.trainer.num_steps, "steps"),
        "validation": config.data.validation and (config.validation.every_steps, config.validation.temperature),
        "shards": config.mesh("actor")["dp_shard"],
    }
    if "rollout" in config.roles:
        said |= {
            "group": config.group_size,
            "tokens": (config.data.max_prompt_tokens, rollout.max_response_tokens),
            "kl": kl and (kl.placement, kl.coef, kl.estimator_used, kl.importance_corrected),
            "advantage": config.advantage.name,
            "loss": (loss["name"], *(loss[name] for name in ("clip_low", "clip_high", "dual_clip") if name in loss)),
            "aggregation": config.aggregation,
            "filter": rollout.dynamic_sampling,
            "correction": [list(one.model_dump().values()) for one in config.correction],
        }
    if "critic" in config.roles:
        critic = config.critic
        said["critic"] = (critic.num_epochs * critic.num_mini_batches, critic.clip, critic.optimizer.lr)
    if config.model.lora is not None:
        lora = config.model.lora
        said["lora"] = (lora.rank, lora.alpha, lora.target_modules)
    return said


def computed(found: Translation, tmp_path: Path) -> Meaning:
    (tmp_path / "translated.yaml").write_text(found.as_yaml())
    needed = ["model.path=m", "cluster.device=cpu"]
    needed += [] if "data.train" in found.keys else ["data.train=t.jsonl"]
    needed += ["reward.function=r.py:f"] if found.keys["recipe"] in {"ppo", "grpo"} else []
    return meaning(load_config(str(tmp_path / "translated.yaml"), needed).config)


def check(found: Translation, defaults: Meaning, expected: Meaning, tmp_path: Path) -> None:
    """Compare everything that a translation computes with what a script says, and with its project's defaults."""
    computes = computed(found, tmp_path)
    assert expected.keys() <= computes.keys()
    assert computes == {name: (defaults | expected)[name] for name in computes}


DEFAULTS_OF_VERL: Meaning = {
    "recipe": "grpo",
    "rows": 4 * 1024,
    "updates": 4,
    "lr": (1e-6, "constant", 0.0),
    "length": (30, "epochs"),
    "validation": (2, 0.0),
    "shards": 8,
    "group": 4,
    "tokens": (512, 512),
    "kl": None,
    "advantage": "grpo",
    "loss": ("clip", 0.2, 0.2, 3.0),
    "aggregation": "token",
    "filter": None,
    "correction": [],
}
"""What its configs say where a command says nothing; and what the shortest commands below say: groups of 4, on eight
devices, validated every 2 steps."""
OF_VERL: dict[str, tuple[str, Meaning, list[str]]] = {
    "grpo": (
        f"{MAIN} algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_response_length=1024 {NODE} "
        f"{ACTOR}.ppo_mini_batch_size=256 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 {ACTOR}.optim.lr=1e-6 "
        f"{ROLLOUT}.n=5 trainer.test_freq=5 trainer.total_epochs=15",
        {
            "recipe": "grpo",
            "rows": 5120,
            "updates": 4,
            "lr": (1e-6, "constant", 0.0),
            "length": (15, "epochs"),
            "validation": (5, 0.0),
            "shards": 8,
            "group": 5,
            "tokens": (512, 1024),
            "kl": ("loss", 0.001, "k3", False),
            "advantage": "grpo",
            "loss": ("clip", 0.2, 0.2, 3.0),
            "aggregation": "token",
            "filter": None,
            "correction": [],
        },
        [],
    ),
    "ppo with a critic": (
        f"{MAIN} data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=128 {ACTOR}.ppo_epochs=2 {NODE} "
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02 critic.optim.lr=2e-5 algorithm.lam=0.95 "
        "critic.ppo_mini_batch_size=256 trainer.test_freq=-1 trainer.val_before_train=False trainer.total_epochs=3",
        {
            "recipe": "ppo",
            "rows": 512,
            "updates": 8,
            "lr": (1e-6, "constant", 0.0),
            "length": (3, "epochs"),
            "validation": (),
            "shards": 8,
            "group": 1,
            "tokens": (512, 512),
            "kl": ("reward", 0.02, "k1", False),
            "advantage": "gae",
            "loss": ("clip", 0.2, 0.2, 3.0),
            "aggregation": "token",
            "filter": None,
            "correction": [],
            "critic": (4, 0.5, 2e-5),
        },
        [],
    ),
    "dapo": (
        "python3 -m recipe.dapo.main_dapo data.train_files=t.parquet algorithm.adv_estimator=grpo "
        f"data.train_batch_size=512 data.gen_batch_size=1536 {ACTOR}.ppo_mini_batch_size=32 {ROLLOUT}.n=16 "
        f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio_c=10.0 {ACTOR}.optim.lr=1e-6 "
        f"algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 "
        f"algorithm.filter_groups.metric=seq_reward {ACTOR}.optim.lr_warmup_steps=10 trainer.nnodes=16 "
        f"trainer.n_gpus_per_node=8 {ACTOR}.ulysses_sequence_parallel_size=8 {ACTOR}.fsdp_config.fsdp_size=64 "
        "trainer.total_training_steps=200",
        {
            "recipe": "grpo",
            "rows": 8192,
            "updates": 16,
            "lr": (1e-6, "constant", 0.05),
            "length": (200, "steps"),
            "validation": (),
            "shards": 8,
            "group": 16,
            "tokens": (512, 512),
            "kl": None,
            "advantage": "grpo",
            "loss": ("clip", 0.2, 0.28, 10.0),
            "aggregation": "token",
            "filter": 10,
            "correction": [],
        },
        [],
    ),
    "gspo": (
        f"{MAIN} algorithm.adv_estimator=grpo {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=3e-4 "
        f"{ACTOR}.clip_ratio_high=4e-4 {ACTOR}.loss_agg_mode=seq-mean-token-mean {ROLLOUT}.n=16 {NODE} "
        f"data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=128 {ACTOR}.clip_ratio_c=10.0",
        {
            "recipe": "grpo",
            "rows": 8192,
            "group": 16,
            "validation": (),
            "loss": ("gspo", 3e-4, 4e-4, None),
            "aggregation": "sequence",
        },
        ["data.val_files=v.parquet"],
    ),
    "reinforce++": (
        f"{MAIN} algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.99 data.train_batch_size=1024 "
        f"{ACTOR}.ppo_mini_batch_size=1024 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=mse {ROLLOUT}.n=8 {NODE} "
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm trainer.test_freq=10",
        {
            "rows": 8192,
            "group": 8,
            "updates": 1,
            "advantage": "reinforce_plus_plus",
            "kl": ("loss", 0.001, "k2", False),
            "aggregation": "fixed_length",
            "validation": (10, 0.0),
        },
        [],
    ),
    "rloo": (
        f"{MAIN} algorithm.adv_estimator=rloo {ROLLOUT}.n=5 algorithm.use_kl_in_reward=True "
        f"algorithm.kl_penalty=kl {NODE} data.train_batch_size=1024 {ACTOR}.ppo_mini_batch_size=1024",
        {
            "rows": 5120,
            "group": 5,
            "updates": 1,
            "validation": (),
            "advantage": "rloo",
            "kl": ("reward", 0.001, "k1", False),
        },
        ["data.val_files=v.parquet"],
    ),
    "no bounds": (
        f"{MAIN} algorithm.adv_estimator=grpo {ACTOR}.clip_ratio_low=10 {ACTOR}.clip_ratio_high=10 {NODE} "
        f"{ROLLOUT}.n=4 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=low_var_kl+ trainer.test_freq=2 "
        f"{ACTOR}.clip_ratio_c=1e4",
        {"loss": ("clip", 1.0, 10.0, 1e4), "kl": ("loss", 0.001, "k2", False)},
        [],
    ),
    "one bound that verl does not read": (
        f"{MAIN} algorithm.adv_estimator=grpo {ACTOR}.clip_ratio=0.3 {ROLLOUT}.n=4 {NODE} trainer.test_freq=2",
        {"loss": ("clip", 0.2, 0.2, 3.0)},
        ["actor.clip_ratio=0.3"],
    ),
    "lora": (
        f"{MAIN} algorithm.adv_estimator=grpo {MODEL}.lora_rank=64 {ROLLOUT}.n=4 {NODE} trainer.test_freq=2 "
        f"{ROLLOUT}.name=vllm algorithm.rollout_correction.rollout_is=token",
        {"lora": (64, 16.0, ("all-linear",)), "correction": [["tis", "token", 2.0]]},
        [],
    ),
    "megatron": (
        f"{MAIN} --config-name=ppo_megatron_trainer.yaml algorithm.adv_estimator=grpo {ROLLOUT}.n=4 {NODE} "
        f"{ACTOR}.megatron.tensor_model_parallel_size=2 trainer.test_freq=2",
        {"shards": 1},
        [],
    ),
    "what has no like": (
        f"python3 -m recipe.prime.main_prime data.val_files=v.parquet algorithm.adv_estimator=grpo {NODE} "
        f"{ROLLOUT}.n=4 {ACTOR}.loss_scale_factor=7 "
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum {ACTOR}.use_kl_loss=True algorithm.use_kl_in_reward=True "
        f"{ACTOR}.clip_ratio_high=1000 {ACTOR}.clip_ratio_c=2000 algorithm.filter_groups.enable=True",
        {"filter": 1000, "kl": ("loss", 0.001, "k3", False), "validation": (), "loss": ("clip", 0.2, 10.0, 2000.0)},
        [
            "recipe.prime.main_prime",
            "actor.clip_ratio_high=1000",
            "algorithm.use_kl_in_reward=True",
            "filter_groups.metric=acc",
            "data.val_files=v.parquet",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        ],
    ),
    "sft": (
        "torchrun -m verl.trainer.sft_trainer data.train_files=t.parquet data.val_files=v.parquet optim.lr=1e-5 "
        f"data.train_batch_size=64 optim.lr_scheduler_type=cosine {NODE} trainer.total_epochs=2",
        {
            "recipe": "sft",
            "rows": 64,
            "updates": 1,
            "lr": (1e-5, "cosine", 0.0),
            "length": (2, "epochs"),
            "validation": (10**6, 1.0),
            "shards": 8,
        },
        [],
    ),
}
"""Keys -> what they compute, and what is said first."""


@pytest.mark.parametrize("name", OF_VERL)
def test_a_script_of_verl_computes_the_same_or_says_first_what_it_does_not(name, tmp_path):
    theirs, expected, differs = OF_VERL[name]
    found = from_verl(theirs)
    check(found, DEFAULTS_OF_VERL, expected, tmp_path)
    assert list(found.differs) == differs
    assert found.unknown == ([f"{ACTOR}.loss_scale_factor=7"] if name == "what has no like" else [])


PEFT = "--use_peft --lora_r 32"
QV = ("q_proj", "v_proj")
DEFAULTS_OF_TRL: Meaning = {
    "recipe": "grpo",
    "rows": 8,
    "updates": 1,
    "lr": (1e-6, "linear", 0.0),
    "length": (3, "epochs"),
    "validation": (),
    "shards": 1,
    "group": 8,
    "tokens": (512, 512),
    "kl": None,
    "advantage": "grpo",
    "loss": ("clip", 0.2, 0.2, None),
    "aggregation": "token",
    "filter": None,
    "correction": [],
}
"""What its dataclasses say where a command says nothing."""
OF_TRL: dict[str, tuple[str, Meaning, list[str]]] = {
    "grpo": (
        "trl grpo --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --num_generations 8 --beta 0.04 "
        "--use_vllm --max_steps 100 --warmup_steps 10",
        {
            "recipe": "grpo",
            "rows": 32,
            "group": 8,
            "updates": 1,
            "lr": (1e-6, "linear", 0.1),
            "length": (100, "steps"),
            "kl": ("loss", 0.04, "k3", True),
            "advantage": "grpo",
            "loss": ("clip", 0.2, 0.2, None),
            "aggregation": "token",
            "correction": [["tis", "sequence", 3.0], ["mask", "product", 0.0, 3.0]],
            "validation": (),
        },
        [],
    ),
    "grpo without vllm": (
        "trl grpo --loss_type dr_grpo --scale_rewards none --steps_per_generation 4 --num_iterations 2 --delta 4.0 "
        "--vllm_importance_sampling_mode token_mask --epsilon_high 0.28",
        {
            "rows": 32,
            "updates": 8,
            "kl": None,
            "advantage": "dr_grpo",
            "loss": ("clip", 0.2, 0.28, 4.0),
            "aggregation": "fixed_length",
            "correction": [],
        },
        [],
    ),
    "rloo": (
        "python trl/scripts/rloo.py --num_generations 4",
        {"advantage": "rloo", "kl": ("reward", 0.05, "k1", False), "aggregation": "fixed_length", "group": 4},
        ["RLOOConfig"],
    ),
    "dpo with an adapter": (
        f"python trl/scripts/dpo.py --dataset_name x --learning_rate 5e-7 {PEFT}",
        {
            "recipe": "dpo",
            "rows": 16,  # 8 pairs
            "lr": (5e-7, "linear", 0.0),
            "length": (3, "epochs"),
            "lora": (32, 32.0, QV),
        },
        ["lora_dropout=0.05", "lora_target_modules=None"],
    ),
    "gkd": (
        "accelerate launch examples/scripts/gkd.py --teacher_model_name_or_path big --learning_rate 2e-5",
        {"recipe": "opd", "lr": (2e-5, "linear", 0.0), "group": 1, "tokens": (512, 128)},
        ["lmbda=0.5", "beta=0.5"],
    ),
    "distillation": (
        "trl distillation --teacher_model_name_or_path big --max_completion_length 64",
        {"recipe": "opd", "group": 1, "tokens": (512, 64)},
        [],
    ),
    "sft": (
        "trl sft --dataset_name x --packing --per_device_train_batch_size 4",
        {"recipe": "sft", "rows": 4, "lr": (2e-5, "linear", 0.0), "validation": ()},
        ["SFTConfig"],
    ),
    "ppo": (
        "python examples/scripts/ppo/ppo_tldr.py --num_ppo_epochs 2 --num_mini_batches 2 --total_episodes 800",
        {
            "recipe": "ppo",
            "updates": 4,
            "lr": (5e-5, "linear", 0.0),
            "length": (100, "steps"),
            "group": 1,
            "tokens": (512, 53),
            "kl": ("reward", 0.05, "k1", False),
            "advantage": "gae",
            "critic": (4, 0.2, 5e-5),
        },
        [],
    ),
}


@pytest.mark.parametrize("name", OF_TRL)
def test_a_command_of_trl_computes_the_same_or_says_first_what_it_does_not(name, tmp_path):
    theirs, expected, differs = OF_TRL[name]
    found = from_trl(theirs)
    check(found, DEFAULTS_OF_TRL, expected, tmp_path)
    assert (list(found.differs), found.unknown) == (differs, [])


def test_rows_that_are_too_long_are_cut_or_left_out_as_theirs():
    assert from_trl("trl sft --packing").keys["data.on_too_long"] == "truncate"
    assert from_trl("trl reward --max_length 99").keys["data.on_too_long"] == "drop"


@pytest.mark.parametrize("script", ["kto.py", "examples/online_dpo.py", "orpo.py"])
def test_a_script_of_a_class_that_no_recipe_stands_for_is_refused(script):
    with pytest.raises(ConfigError, match="no recipe stands for TRL's"):
        from_trl(f"python {script} --learning_rate 1e-6")


def test_a_run_of_verl_with_a_teacher_is_refused_and_led_to_its_recipe():
    with pytest.raises(ConfigError, match="rally config opd"):
        from_verl("algorithm.adv_estimator=grpo distillation.enabled=True")
