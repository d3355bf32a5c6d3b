"""How configs of verl and TRL may be written: what is read, what is named, and what is refused."""

import re
from pathlib import Path

import pytest

from rallypoint.config.translate import from_trl, from_verl
from rallypoint.errors import ConfigError

GRPO = "algorithm.adv_estimator=grpo data.train_batch_size=64 "


def written(folder: Path, text: str, name: str = "theirs.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_references_of_a_yaml_file_are_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("TOP_P", "0.9")
    found = from_verl(
        written(
            tmp_path,
            """
algorithm: {adv_estimator: grpo}
data: {train_batch_size: 64, max_prompt_length: 300, train_files: ["${oc.env:NO_SUCH_FOLDER,/data}/a.parquet"]}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: "${data.train_batch_size}", ppo_epochs: "${oc.select:algorithm.x,3}"}
  rollout:
    prompt_length: ${data.max_prompt_length}
    response_length: ${data.max_response_length}
    n: ${..actor.ppo_epochs}
    top_p: ${oc.env:TOP_P}
""",
        )
    )
    assert found.unknown == []
    expected = {
        "actor.num_mini_batches": 1,
        "actor.num_epochs": 3,
        "rollout.group_size": 3,
        "rollout.max_response_tokens": 512,  # verl's own, since it is not given
        "data.max_prompt_tokens": 300,
        "data.train": ["/data/a.parquet"],
        "rollout.top_p": 0.9,
    }
    assert {key: found.keys[key] for key in expected} == expected


def test_a_reference_to_nothing_and_one_to_itself_are_named(tmp_path):
    data = "{train_batch_size: '${a.b}', max_prompt_length: '${.max_prompt_length}'}"
    found = from_verl(written(tmp_path, f"algorithm: {{adv_estimator: grpo}}\ndata: {data}"))
    assert found.unknown == [
        "data.train_batch_size=${a.b} (it refers to what their config does not have)",
        "data.max_prompt_length=${.max_prompt_length} (it refers to what their config does not have)",
    ]
    assert "rollout.num_prompts" not in found.keys
    assert "None" not in found.as_yaml()


def test_files_that_a_yaml_file_starts_from_are_named_as_not_read(tmp_path):
    text = "hydra: {searchpath: [pkg://x]}\ndefaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}"
    found = from_verl(written(tmp_path, text))
    assert (found.unknown, found.num_given) == ([], 3)
    assert "files that it names are not read" in found.differs["defaults=['ppo_trainer', '_self_']"]


def test_small_numbers_of_a_yaml_file_are_numbers(tmp_path):
    """For YAML, 1e-6 is text."""
    assert from_trl(written(tmp_path, "learning_rate: 1e-6\nbeta: 4e-2")).keys["actor.optimizer.lr"] == 1e-6
    theirs = written(tmp_path, "actor_rollout_ref: {actor: {optim: {lr: 5e-7}}}")
    assert from_verl(theirs).keys["actor.optimizer.lr"] == 5e-7


def test_keys_are_added_as_hydra_adds_them_and_one_that_it_drops_is_named():
    found = from_verl(GRPO + "+data.seed=3 ++trainer.total_epochs=2 ~actor_rollout_ref.actor.clip_ratio_c")
    assert (found.keys["trainer.num_epochs"], found.num_given) == (2, 5)
    assert found.unknown == ["~actor_rollout_ref.actor.clip_ratio_c (nothing is taken away here)"]


def test_quotes_inside_a_value_are_those_of_hydra():
    found = from_verl(
        GRPO + """trainer.logger='["console","wandb"]' "data.train_files=['a b.parquet', 'c.parquet']" """
        """trainer.experiment_name='it'"'"'s mine' custom_reward_function.path="r.py" """
        """'+custom_reward_function.reward_kwargs={weight:1,unit: m}'"""
    )
    assert found.unknown == []
    assert found.keys["tracking.to"] == ["wandb"]
    assert found.keys["data.train"] == ["a b.parquet", "c.parquet"]
    assert found.keys["trainer.name"] == "it's mine"
    assert found.keys["reward.parameters"] == {"weight": 1, "unit": "m"}


def test_a_variable_without_a_value_is_named(tmp_path):
    script = (
        "run algorithm.adv_estimator=grpo \\\n data.train_batch_size=${NO_SUCH} actor_rollout_ref.rollout.n=$NONE $@"
    )
    found = from_verl(written(tmp_path, script, "run.sh"))
    assert found.unknown == [
        "data.train_batch_size=${NO_SUCH} (a value that only a shell knows)",
        "actor_rollout_ref.rollout.n=$NONE (a value that only a shell knows)",
    ]


@pytest.mark.parametrize("text", ["trainer: KTOConfig\nbeta: 0.1", "KTOConfig: {beta: 0.1}", "desirable_weight: 1.0"])
def test_a_file_for_a_class_that_no_recipe_stands_for_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"no recipe stands for TRL's KTOConfig; expected one of SFTConfig, DPO"):
        from_trl(written(tmp_path, text))


@pytest.mark.parametrize("text", ["trainer: trl.DPOTrainer\nbeta: 0.2", "DPOConfig: {beta: 0.2}"])
def test_a_file_may_say_its_class(tmp_path, text):
    found = from_trl(written(tmp_path, text))
    assert (found.keys["recipe"], found.keys["preference.beta"], found.unknown) == ("dpo", 0.2, [])


def test_a_command_with_a_file_is_read_with_both(tmp_path):
    file = written(tmp_path, "beta: 0.2\nlearning_rate: 2e-6\nmax_length: 99")
    found = from_trl(f"trl dpo --config {file} --beta 0.3")
    expected = {"recipe": "dpo", "preference.beta": 0.3, "actor.optimizer.lr": 2e-6, "data.max_row_tokens": 99}
    assert {key: found.keys[key] for key in expected} == expected
    assert found.unknown == []
    assert from_trl(f"trl dpo --beta 0.3 --config {file}").keys == found.keys, "a command that ends as a file does"


def test_a_command_line_that_ends_with_a_file_is_no_file():
    assert from_verl(GRPO + "actor_rollout_ref.rollout.n=3 tools.config=a.yaml").keys["rollout.group_size"] == 3


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("GRPOConfig(per_device_train_batch_size=0)", ["per_device_train_batch_size=0"]),
        ("PPOConfig(total_episodes=10, gradient_accumulation_steps='x')", ["gradient_accumulation_steps=x"]),
        ("GRPOConfig(num_generations=0)", []),  # which the check of our config refuses
        ("GRPOConfig(**more)", ["**=more"]),
        ("GRPOConfig(loss_type='cispo', epsilon_high='x')", []),
    ],
)
def test_values_that_make_no_batch_are_named(text, unknown):
    found = from_trl(text)
    assert found.unknown == unknown
    assert found.keys["rollout.group_size"] in {0, 1, 8}


def test_python_that_is_no_call_is_refused():
    with pytest.raises(ConfigError, match="expected one call, found 'SFTConfig"):
        from_trl("SFTConfig() and 3")


def test_a_class_that_nothing_says_is_a_guess_that_is_named(tmp_path):
    found = from_trl(written(tmp_path, "learning_rate: 1.0e-6"))
    assert "nothing says which class it is" in found.differs["GRPOConfig"]
    assert "nothing says" not in from_trl("trl grpo --learning_rate 1e-6").as_yaml()


@pytest.mark.parametrize("read", [from_verl, from_trl])
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("empty.yaml", "", "no key=value: expected a command line, or the name of a .yaml, .yml, .sh or .bash file"),
        ("notes.yaml", "only text", "no key=value"),
        ("list.yaml", "- a\n- b", "no key=value"),
        ("empty.sh", "set -x", "no key=value"),
        ("torn.yaml", "a: [1", "torn.yaml cannot be read: while parsing a flow sequence"),
        ("deep.yaml", "a: " + "[" * 3000, "deep.yaml cannot be read"),
        ("itself.yaml", "a: &a {b: *a}", "itself.yaml cannot be read"),
        ("run.txt", "a.b=1", "expected a .yaml, .yml, .sh or .bash file, found another one"),
        ("folder/x", "", "folder: expected a .yaml, .yml, .sh or .bash file, found a folder"),
        ("folder.yaml/x", "", "folder.yaml: expected a .yaml, .yml, .sh or .bash file, found a folder"),
        ("folder.sh/x", "", "folder.sh: expected a .yaml, .yml, .sh or .bash file, found a folder"),
    ],
)
def test_a_file_that_is_no_config_is_an_error_with_its_name(tmp_path, monkeypatch, read, name, text, said):
    monkeypatch.chdir(tmp_path)
    folder, _, inside = name.partition("/")
    if inside:
        (tmp_path / folder).mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        read(folder)
    assert folder in str(error.value)


@pytest.mark.parametrize("read", [from_verl, from_trl])
def test_a_name_without_a_file_is_an_error_with_that_name(read):
    with pytest.raises(ConfigError, match="found 'missing'"):
        read("missing")
    with pytest.raises(ConfigError, match=r"missing\.sh cannot be read: .*No such file"):
        read("missing.sh")


def test_an_adapter_of_trl_has_a_switch():
    off = from_trl("trl sft --lora_r 8")
    assert [key for key in off.keys if "lora" in key] == []
    assert off.open["lora_r=8"] == "it says nothing without use_peft"
    on = from_trl("trl sft --lora_r 8 --use_peft")
    assert (on.keys["model.lora.rank"], on.keys["model.lora.alpha"], on.unknown) == (8, 32, [])
    assert "lora_alpha=32" in on.usual
    experts = from_trl("trl grpo --use_peft --lora_target_parameters mlp.experts.down_proj")
    assert (experts.keys["model.lora.target_parameters"], experts.unknown) == ("mlp.experts.down_proj", [])
