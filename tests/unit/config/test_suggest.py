"""Whoever comes from another project is led to the right key, and a slip of the hand to the key beside it."""

from pathlib import Path

import pytest

from rallypoint.config import RunConfig, leaves, load_config
from rallypoint.config.other_projects import VALUE, other_projects
from rallypoint.errors import ConfigError


def problems_of(*overrides: str, name: str = "base.yaml") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        load_config(name, overrides)
    return raised.value.problems


THEIRS = other_projects()
ALIASES, VALUES = THEIRS.anywhere, THEIRS.values
BY_RECIPE = (*THEIRS.examples, *THEIRS.preferences, *THEIRS.teachers, *THEIRS.policies, *THEIRS.whole_configs)
ASSIGNMENTS = {a for alias in (*ALIASES, *BY_RECIPE) for a in (*alias.to, *alias.values.values())}
ASSIGNMENTS |= {meant for values in VALUES.values() for meant in values.values()}


@pytest.mark.parametrize("assignment", sorted(ASSIGNMENTS))
def test_every_key_that_an_alias_leads_to_exists_and_takes_the_value_that_is_named(here: Path, assignment: str):
    parts = assignment.split() if VALUE not in assignment else [assignment]
    known = leaves(RunConfig)
    sections = {dotted.rpartition(".")[0] for dotted in known}
    for part in parts:
        key, _, value = part.partition("=")
        assert key in known or key in sections, part
        if value and VALUE not in value:
            unknown = [p for p in _problems(key, value) if "unknown key" in p or "expected one of" in p]
            assert not unknown, part


def _problems(key: str, value: str) -> tuple[str, ...]:
    try:
        load_config("base.yaml", [f"{key}={value}"])
    except ConfigError as error:
        return tuple(problem for problem in error.problems if problem.startswith(f"{key}="))
    return ()


@pytest.mark.parametrize(
    ("recipe", "override", "expected"),
    [
        ("dpo", "beta=0.2", "did you mean preference.beta=0.2?"),
        ("dpo", "loss_type=ipo", "did you mean preference.name=ipo?"),
        ("sft", "max_length=4096", "did you mean data.max_row_tokens=4096?"),
        ("sft", "per_device_train_batch_size=4", "did you mean data.num_examples? (examples of a step"),
        ("reward_model", "train_batch_size=4", "did you mean data.num_examples=4?"),
        ("sft", "assistant_only_loss=true", "the turns of the assistant are trained, and nothing else"),
        ("opd", "teacher_model_name_or_path=big", "did you mean teacher.path=big?"),
        ("grpo", "beta=0.2", "did you mean kl.coef=0.2?"),
    ],
)
def test_a_name_is_led_to_the_key_that_the_recipe_reads(recipe: str, override: str, expected: str):
    said = problems_of(override, name=recipe)
    assert any(expected in problem for problem in said), said


def test_no_alias_stands_twice_or_hides_a_key_of_our_own():
    names = [name for alias in ALIASES for name in alias.names.split()]
    assert len(ALIASES) >= 40
    assert len(names) == len(set(names)) > 150
    assert not set(names) & set(leaves(RunConfig))
    assert all(alias.to or alias.note for alias in ALIASES)
    assert set(VALUES) <= set(leaves(RunConfig))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        # What an audit tried, with the keys of verl, TRL, OpenRLHF and NeMo-RL.
        ("beta=0.04", "kl.coef=0.04"),
        ("beta=0.0", "kl=null"),
        ("kl.coef=0", "kl=null"),
        ("kl.beta=0.1", "kl.coef=0.1"),
        ("algorithm.adv_estimator=grpo", "recipe=grpo"),
        ("algorithm.adv_estimator=gae", "recipe=ppo"),
        ("trainer.n_gpus_per_node=8", "'cluster.pools={main: [8]}'"),
        ("trainer.total_epochs=3", "trainer.num_epochs=3"),
        ("trainer.total_training_steps=300", "trainer.num_steps=300"),
        ("trainer.save_freq=-1", "checkpoint.every_steps=null"),
        ("learning_rate=1e-6", "actor.optimizer.lr=1e-06"),
        ("learning_rate=fast", "actor.optimizer.lr"),
        ("num_generations=8", "rollout.group_size=8"),
        ("rollout.n=8", "rollout.group_size=8"),
        ("actor_rollout_ref.rollout.n=8", "rollout.group_size=8"),
        ("actor.optimizer.learning_rate=1e-6", "actor.optimizer.lr=1e-06"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor.optimizer.lr=1e-06"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "kl.estimator=k3"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "kl.placement=loss"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=true", "engine.activations=checkpoint"),
        ("data.max_response_length=512", "rollout.max_response_tokens=512"),
        ("max_completion_length=512", "rollout.max_response_tokens=512"),
        ("grpo.num_prompts_per_step=32", "rollout.num_prompts=32"),
        ("policy.model_name=a/b", "model.path=a/b"),
        ("loss_fn.reference_policy_kl_penalty=0.01", "kl.coef=0.01"),
        ("n_samples_per_prompt=4", "rollout.group_size=4"),
        ("actor.clip_ratio=0.2", "loss.clip_low=0.2 loss.clip_high=0.2"),
        ("bf16=true", "model.dtype=bfloat16"),
        ("model.dtype=bf16", "model.dtype=bfloat16"),
        ("recipe=GRPO", "recipe=grpo"),
        # What belongs to the critic stays the critic's.
        ("critic.optim.lr=1e-5", "critic.optimizer.lr=1e-05"),
        ("critic.optimizer.learning_rate=1e-5", "critic.optimizer.lr=1e-05"),
        ("critic.ppo_epochs=2", "critic.num_epochs=2"),
        ("critic.grad_clip=2.0", "critic.optimizer.max_grad_norm=2.0"),
        ("actor.lr=1e-5", "actor.optimizer.lr"),
        # A slip of the hand is no other project's word.
        ("actor.optimizer.beta=[0.9, 0.99]", "actor.optimizer.betas"),
        # Nothing, as people write it.
        ("checkpoint.every_steps=-1", "null, which is off"),
        ("loss.dual_clip=0", "null, which is off"),
        ("rollout.top_k=-1", "null, which is off"),
    ],
)
def test_a_name_or_value_from_elsewhere_is_answered_with_what_is_written_here(here: Path, written: str, meant: str):
    [problem] = problems_of(written)
    assert f"did you mean {meant}?" in problem


def test_a_section_of_another_project_is_answered_key_by_key_with_the_lines_of_each(here: Path):
    (here / "verl.yaml").write_text(
        "base: base.yaml\n"
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    optim: {lr: 1e-6}\n"
        "    ppo_micro_batch_size_per_gpu: 4\n"
        "    fused_kernel_options: {impl_backend: torch}\n"
        "  rollout:\n"
        "    n: 5\n"
    )
    assert problems_of(name="verl.yaml") == (
        "actor_rollout_ref.actor.optim.lr=1e-06 (verl.yaml:4): unknown key; did you mean actor.optimizer.lr=1e-06?",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 (verl.yaml:5): unknown key; did you mean "
        "engine.max_tokens_per_micro_batch? (micro-batches are cut by tokens, never by rows)",
        "actor_rollout_ref.rollout.n=5 (verl.yaml:8): unknown key; did you mean rollout.group_size=5?",
        "actor_rollout_ref: unknown section, also with actor_rollout_ref.actor.fused_kernel_options.impl_backend",
    )


def test_what_is_no_key_here_is_said_to_be_none(here: Path):
    assert problems_of("trainer.resume_mode=auto")[0].endswith(
        "unknown key; it is an option of the command: rally train RUN_FOLDER --resume"
    )
    assert "metrics.jsonl" in problems_of("report_to=wandb")[0]
