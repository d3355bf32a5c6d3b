"""Scripts in Python that train with TRL: what is read of them without running them, and what is named as lost."""

import re

import pytest

from rallypoint.config import load_config
from rallypoint.config.translate import from_trl
from rallypoint.config.translate.program import Made, Unknown, read_program
from rallypoint.errors import ConfigError

GRPO = """
import argparse, os
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--name", required=True)
parser.add_argument("--lora", action="store_true")
SIZE = {"group": 4, "rows": [8, 16]}

def reward_len(completions, **kwargs):
    num_generations = 99
    return [float(len(text)) for text in completions]

def main():
    args = parser.parse_args()
    group = SIZE["group"]
    dataset = load_dataset("json", data_files="train.jsonl", split="train").shuffle(seed=1)
    config = GRPOConfig(
        f"runs/{args.name}",
        learning_rate=args.lr if args.lr < 1 else 1e-3,
        num_generations=group * 2,
        per_device_train_batch_size=SIZE["rows"][-1],
        max_completion_length=int(os.environ.get("NO_SUCH_VARIABLE", "64")),
        max_steps=30,
        beta=4 * 10**-2,
        model_init_kwargs={"dtype": torch.bfloat16},
    )
    config.temperature = 0.9
    experts = ["mlp.experts.down_proj"]
    peft = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts) if args.lora else None
    tokenizer = AutoTokenizer.from_pretrained("own/model")
    model = AutoModelForCausalLM.from_pretrained("own/model", device_map="auto")
    trainer = GRPOTrainer(
        model, reward_len, args=config, train_dataset=dataset, peft_config=peft, processing_class=tokenizer
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Returns a function that writes a script and translates a command that starts it."""
    monkeypatch.chdir(tmp_path)

    def translated(text, command="{}"):
        (tmp_path / "train.py").write_text(text)
        return from_trl(command.format("train.py"))

    return translated


def lost(found):
    """Return what is named as not translated, in the order of the text."""
    return [key for key, why in found.differs.items() if why.startswith("cannot be translated")]


def test_a_script_is_read_with_its_values_its_command_line_and_what_it_gives_the_trainer(script):
    found = script(GRPO, "python {} --name mine --lora --lr 3e-6")
    expected = {
        "recipe": "grpo",
        "model.path": "own/model",
        "model.lora.rank": 4,
        "model.lora.alpha": 8,  # PEFT's own
        "model.lora.target_modules": ["q_proj"],
        "model.lora.target_parameters": ["mlp.experts.down_proj"],
        "data.train": ["train.jsonl"],
        "actor.optimizer.lr": 3e-6,
        "rollout.group_size": 8,
        "rollout.num_prompts": 2,
        "rollout.max_response_tokens": 64,
        "rollout.temperature": 0.9,
        "kl.coef": 0.04,
        "trainer.num_steps": 30,
        "trainer.runs_dir": "runs/mine",
    }
    assert {key: found.keys.get(key) for key in expected} == expected
    assert (found.unknown, lost(found)) == ([], ["reward_funcs=[reward_len] (of the script: reward_len)"])


def test_what_the_command_line_must_say_and_the_rewards_are_named_first(script):
    found = script(GRPO)
    assert found.keys["actor.optimizer.lr"] == 1e-5
    assert "model.lora.rank" not in found.keys
    assert lost(found)[0] == "output_dir=f'runs/{args.name}'"
    assert tuple(found.as_yaml().splitlines()[1:3]) == (
        "# Not computed as theirs:",
        "#   cannot be translated: it is known only when the script runs:",
    )


OTHERS = [
    (
        'DPOTrainer("m", args=DPOConfig(beta=0.2), train_dataset=load_dataset("own/pairs", "en", split="train_prefs"))',
        "dpo",
    ),
    ('SFTTrainer(model="m", args=SFTConfig(max_length=64), train_dataset=load_dataset("a/b")["train"])', "sft"),
    ('SFTTrainer("m", train_dataset=load_dataset("a/b", split="train"))', "sft"),
    ('RewardTrainer(model="m", args=RewardConfig(max_length=64), train_dataset=load_dataset("a/b"))', "reward_model"),
    ('RLOOTrainer("m", "own/reward", args=RLOOConfig(num_generations=4), train_dataset=load_dataset("a/b"))', "grpo"),
    (
        'PPOTrainer(args=PPOConfig(), model=A.from_pretrained("m"), ref_model=A.from_pretrained("m"), '
        'reward_model=B.from_pretrained("own/reward"), train_dataset=load_dataset("a/b"))',
        "ppo",
    ),
]


@pytest.mark.parametrize(("call", "recipe"), OTHERS)
def test_every_trainer_is_a_config_of_its_recipe_that_loads(script, tmp_path, call, recipe):
    found = script(f"trainer = {call}\ntrainer.train()\n")
    assert (found.keys["recipe"], found.keys["model.path"], lost(found), found.unknown) == (recipe, "m", [], [])
    assert ("reward.path" in found.keys) == ("own/reward" in call)
    pairs = {"path": "own/pairs", "subset": "en", "split": "train_prefs"}
    assert found.keys["data.train"] == ([pairs] if recipe == "dpo" else ["a/b"])
    (tmp_path / "ours.yaml").write_text(found.as_yaml())
    assert load_config(str(tmp_path / "ours.yaml")).config.recipe == recipe


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("args = SFTConfig(max_length=chosen())", "max_length=chosen()"),
        ("args = SFTConfig(**more)", "**=more"),
        ("args = chosen()", "args=chosen()"),
        ("n = 1\nfor i in range(3): n = i\nargs = SFTConfig(max_length=n)", "max_length=n in a loop"),
        ("n = 1\nif chosen(): n = 2\nargs = SFTConfig(max_length=n)", "max_length=n if chosen()"),
        ("n = 1\nn += chosen()\nargs = SFTConfig(max_length=n)", "max_length=n += chosen()"),
        ("args = SFTConfig(max_length=9**9**9)", "max_length=9 ** 9 ** 9"),
        ("args = SFTConfig(run_name='x' * 10**9)", "run_name='x' * 10 ** 9"),
        ("args = SFTConfig()\nargs.max_length = chosen()", "max_length=chosen()"),
        ("args = SFTConfig()\nmodel = chosen()", "model=chosen()"),
        ("args = SFTConfig()\ndata = data.map(f)", "train_dataset: map(...)"),
        ("args = SFTConfig()\ndata = load_dataset(chosen())", "train_dataset=load_dataset(path=chosen())"),
        ("args = SFTConfig()\ndata = load_dataset('a', split='train[:9]')", "split='train[:9]'"),
        ("args = SFTConfig()\ndata = load_dataset('a', revision='x')", "load_dataset(revision='x')"),
        ("args = SFTConfig()\npeft = chosen()", "peft_config=chosen()"),
        ("args = SFTConfig()\npeft = LoraConfig(bias='all')", "LoraConfig(bias='all')"),
        ("args = SFTConfig()\nother = [chosen]", "SFTTrainer(callbacks=chosen)"),
        ("args = SFTConfig()\nDPOTrainer('m')", "DPOTrainer (line"),
    ],
)
def test_what_only_the_program_says_is_named_and_never_left_out(script, line, named):
    lines = ["model, peft, other, data = 'm', None, None, load_dataset('a/b')", line]
    trainer = "SFTTrainer(model, args, train_dataset=data, peft_config=peft, callbacks=other)"
    order = [*lines, trainer] if "DPO" not in line else [lines[0], "args = SFTConfig()", trainer, "DPOTrainer('m')"]
    found = script("\n".join(order))
    assert any(named in one for one in lost(found)), lost(found)
    assert re.search(r"^# .*cannot be translated", "\n".join(found.as_yaml().splitlines()[:4]), re.MULTILINE)


def test_nothing_of_a_script_is_run(script, tmp_path):
    gone = tmp_path / "run"
    script(f"open({str(gone)!r}, 'w')\nn = int(open({str(gone)!r}, 'w').write('3'))\nSFTTrainer('m', args=SFTConfig())")
    assert not gone.exists()


def test_the_arguments_of_its_parser_are_those_of_the_command_line(script):
    text = (
        "parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))\n"
        "script_args, training_args, model_args = parser.parse_args_and_config()\n"
        "data = load_dataset(script_args.dataset_name)\n"
        "DPOTrainer(model_args.model_name_or_path, args=training_args, train_dataset=data['train'],\n"
        "           peft_config=get_peft_config(model_args))\n"
    )
    found = script(text, "accelerate launch --num_processes 2 {} --model_name_or_path m --dataset_name a/b --beta 0.3")
    assert (found.keys["model.path"], found.keys["data.train"], found.keys["preference.beta"]) == ("m", ["a/b"], 0.3)
    assert (lost(found), found.unknown) == ([], [])
    assert "model=model_args.model_name_or_path" in lost(script(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = (", "train.py cannot be read"),
        ("print(1)", "expected a trainer of TRL's, such as GRPOTrainer"),
        ("KTOTrainer('m', args=KTOConfig())", "no recipe stands for TRL's KTOConfig"),
    ],
)
def test_a_script_that_trains_nothing_that_is_known_is_refused(script, text, problem):
    with pytest.raises(ConfigError, match=problem):
        script(text)


def test_a_script_that_is_not_there_is_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        from_trl(str(tmp_path / "train.py"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3 - 4 // 2", 5),
        ("f'{2}-{\"a\"}'", "2-a"),
        ("(1, 'a', [None, True])", (1, "a", [None, True])),
        ("{'a': 1}['a']", 1),
        ("'x' if 3 > 2 else y", "x"),
        ("not 0 and 1", Unknown("not 0 and 1")),
        ("os.path.join('a', 'b')", "a/b"),
        ("Path('a') / 'b'", "a/b"),
        ("min(3, 2)", 2),
        ("x.y.z", Unknown("x.y.z")),
        ("[1, f()]", [1, Unknown("f()")]),
        ("[1, f()] + [2]", Unknown("[1, f()] + [2]")),
        ("1 / 0", Unknown("1 / 0")),
        ("lambda: 3", Unknown("lambda: 3")),
    ],
)
def test_values_are_computed_as_far_as_they_are_written(text, value):
    (config,) = read_program(f"SFTConfig(x={text})", {}).configs
    assert config == Made("SFTConfig", {"x": value}, 1)
