"""`rally eval` and `rally chat` with a tiny model."""

import json
import re
import shutil

import pytest
from forks import run_forked
from tiny_models import make_tiny_model

from rallypoint.data import make_digits_tokenizer
from rallypoint.errors import CheckpointError, DataError, ModelError, RallyError, RewardError
from rallypoint.recipes.use import Conversation, find_trained


def refused(result, kind: type[RallyError]) -> str:
    assert isinstance(result.exception, kind), result.output
    return str(result.exception)


@pytest.mark.parametrize("what", ["checkpoint", "run"])
def test_a_checkpoint_or_its_run_is_scored_with_the_reward_it_was_trained_with(command, trained, what):
    result = command("eval", str(getattr(trained, what)), trained.data, "--num-samples", "2")
    assert result.exit_code == 0, result.output
    assert re.search(r"score -?\d\.\d{4}  6 responses to 3 prompts", result.stdout)
    assert "best " in result.stdout
    assert "worst" in result.stdout
    again = command("eval", str(getattr(trained, what)), trained.data, "--num-samples", "2")
    assert again.stdout.splitlines()[0] == result.stdout.splitlines()[0]


def test_greedy_first_prompts_and_own_reward(command, trained, tmp_path):
    (tmp_path / "rewards.py").write_text("def half(data_source, solution_str, ground_truth, extra_info): return 0.5")
    options = ("--temperature", "0", "--max-prompts", "1", "--max-response-tokens", "3")
    result = command("eval", str(trained.checkpoint), trained.data, "--reward", f"{tmp_path}/rewards.py:half", *options)
    assert "score 0.5000  1 responses to 1 prompts" in result.stdout
    assert re.search(r"temperature 0  [1-3] tokens", result.stdout)


@pytest.fixture
def model(trained, tmp_path):
    """A checkpoint that was taken out of its run."""
    return shutil.copytree(trained.checkpoint, tmp_path / "taken" / "model")


def test_a_model_outside_a_run_needs_a_reward_and_is_told_how_to_name_it(command, trained, model):
    message = refused(command("eval", str(model), trained.data), RewardError)
    assert "--reward file.py:function" in message
    result = command("eval", str(model), trained.data, "--reward", "digits")
    assert result.exit_code == 0, result.output


def test_a_config_that_happens_to_lie_two_folders_up_is_not_taken_for_that_of_a_run(trained, model, tmp_path):
    (tmp_path / "config.yaml").write_text("what: ever")
    assert find_trained(str(model)).config is None


def test_a_run_that_ran_its_model_s_code_does_not_decide_that_for_who_uses_it(trained, tmp_path):
    run = shutil.copytree(trained.run, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("trust_remote_code: false", "trust_remote_code: true"))
    found = find_trained(str(run))
    assert found.config is not None
    assert found.config.model.trust_remote_code
    assert not found.trusts_remote_code
    assert find_trained(str(run), trust_remote_code=True).trusts_remote_code


def test_a_checkpoint_is_found_from_where_its_user_stands(trained, monkeypatch):
    for folder, name in ((trained.checkpoint, "."), (trained.checkpoint.parent, "step_000004"), (trained.run, ".")):
        monkeypatch.chdir(folder)
        found = find_trained(name)
        assert (found.path, found.config is not None) == (str(trained.checkpoint), True)


def test_responses_that_the_model_has_no_positions_for_are_refused(command, trained):
    message = refused(command("eval", str(trained.run), trained.data, "--max-response-tokens", "17"), ModelError)
    assert "supports rows of 24 tokens, but the longest prompt has 8 and a response may have 17" in message
    result = command("eval", str(trained.run), trained.data, "--max-response-tokens", "16")
    assert result.exit_code == 0, result.output


def test_a_damaged_checkpoint_is_refused(command, trained, tmp_path):
    run = shutil.copytree(trained.run, tmp_path / "run")
    weights = run / "checkpoints" / "step_000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "expected" in refused(command("chat", str(run)), CheckpointError)
    (weights.parent / "manifest.json").unlink()
    assert "has no manifest.json, so it is not whole" in refused(command("chat", str(run)), CheckpointError)
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint yet" in refused(command("chat", str(run)), ModelError)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where/at/all"])
@pytest.mark.parametrize("verb", ["eval", "chat"])
def test_a_checkpoint_that_is_not_there_is_refused_by_name(command, trained, name, verb):
    result = command(verb, name, *([trained.data] if verb == "eval" else []))
    assert f"{name}: no such folder" in refused(result, ModelError)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.jsonl", None, "does not exist"),
        ("zero.jsonl", "", "empty"),
        ("blank.jsonl", "\n", "blank.jsonl"),
        ("bad.jsonl", '{"prompt": 5, "ground_truth": "1"}\n', "bad.jsonl, line 1, column prompt"),
        ("long.jsonl", '{"prompt": "123456789123456789", "ground_truth": "1"}\n', "long.jsonl:1"),
    ],
)
def test_bad_data_are_refused_by_name(command, trained, tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert said in refused(command("eval", str(trained.checkpoint), str(tmp_path / name)), DataError)


def test_a_reward_that_fails_on_everything_is_an_error_and_on_some_is_counted(command, trained, tmp_path):
    signature = "(data_source, solution_str, ground_truth, extra_info=None)"
    (tmp_path / "rewards.py").write_text(
        f"def never{signature}: raise KeyError('offline')\n"
        f"def some{signature}: return 1.0 if extra_info['index'] else float('nan')\n"
    )
    result = command("eval", str(trained.checkpoint), trained.data, "--reward", f"{tmp_path}/rewards.py:never")
    assert "offline" in refused(result, RewardError)
    result = command("eval", str(trained.checkpoint), trained.data, "--reward", f"{tmp_path}/rewards.py:some")
    assert "score 1.0000  2 responses to 3 prompts, 1 more without a score" in result.stdout
    assert "validation.parquet:0" in result.stdout


def test_a_chat_answers_each_line_and_forgets_at_an_empty_one(command, trained):
    result = command("chat", str(trained.checkpoint), "--max-response-tokens", "5", typed="493105\n\n493105\n12\n")
    assert result.exit_code == 0, result.output
    hint, first, forgotten, second, *_ = result.stdout.split("you> ")
    assert "new conversation" in hint
    assert (first.strip(), forgotten.strip()) == (second.strip(), "")
    assert len(first.strip()) > 0
    assert result.stdout.count("you> ") == 5


def test_a_message_that_is_too_long_is_refused_and_the_chat_goes_on(command, trained):
    result = command("chat", str(trained.checkpoint), typed="1" * 40 + "\n12\n")
    assert result.exit_code == 0, result.output
    assert "this message has 42 tokens; the model supports 24 in all" in result.stdout
    assert result.stdout.count("you> ") == 3


def test_an_answer_that_is_broken_off_is_forgotten_with_its_question(trained):
    first, other = (
        Conversation(find_trained(str(trained.checkpoint)), temperature=0.0, max_response_tokens=4, seed=0)
        for _ in range(2)
    )
    broken_off = first.ask("493105")
    next(broken_off)
    broken_off.close()
    assert list(first.ask("12")) == list(other.ask("12"))


@pytest.mark.parametrize("where", ["{run}/rewards.py", "rewards.py", "{run.parent}/elsewhere/rewards.py"])
def test_a_reward_that_came_with_the_run_is_not_run_unless_it_is_named(command, trained, tmp_path, where):
    run = shutil.copytree(trained.run, tmp_path / "run")
    (run / "rewards.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 0.5")
    config = run / "config.yaml"
    named = where.format(run=run)
    config.write_text(config.read_text().replace("function: digits", f"function: {named}:f"))
    refusal = refused(command("eval", str(run), trained.data), RewardError)
    assert f"if you know and trust it, name it: --reward {named}:f" in refusal
    result = command("eval", str(run), trained.data, "--reward", f"{run}/rewards.py:f")
    assert "score 0.5000" in result.stdout


CONTROL = ("\x1b[31m", "\x1b]0;owned\x07", "\x07", "\r", "\x9b2J", "\u202e")


@pytest.fixture
def rude(sizes, tmp_path):
    """A model that writes control characters whatever it is asked."""
    tokenizer = make_digits_tokenizer()
    tokenizer.add_tokens(list(CONTROL))
    make_tiny_model(tmp_path / "rude", tokenizer=tokenizer, **{**sizes, "max_positions": 4000})
    return tmp_path / "rude"


def test_control_characters_of_a_model_do_not_reach_the_terminal(command, rude, tmp_path):
    conversation = Conversation(find_trained(str(rude)), temperature=10.0, max_response_tokens=200, seed=0)
    raw = "".join(piece for _ in range(4) for piece in conversation.ask("12"))
    assert sum(mark in raw for mark in CONTROL) >= 3
    options = ("--temperature", "10", "--max-response-tokens", "200")
    said = command("chat", str(rude), *options, typed="12\n" * 4).stdout
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": f"12{CONTROL[0]}", "ground_truth": "12"}))
    (tmp_path / "rewards.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 0.0")
    spec = f"{tmp_path}/rewards.py:f"
    scored = command("eval", str(rude), str(tmp_path / "train.jsonl"), "--reward", spec, *options)
    assert scored.exit_code == 0, scored.output
    for text in (said, scored.stdout):
        assert len(text) > 100
        assert not [character for character in text if not character.isprintable() and character != "\n"]


def test_errors_of_the_real_command_are_one_message_and_a_status(trained, model):
    outside = run_forked("-c", "from rallypoint.cli.main import run; run()", "eval", str(model), trained.data)
    assert (outside.returncode, outside.stdout) == (2, "")
    assert outside.stderr.startswith("error: ")
    assert "--reward file.py:function" in outside.stderr
    assert "Traceback" not in outside.stderr


def test_bytes_that_are_no_text_do_not_end_a_chat(command, trained):
    result = command("chat", str(trained.checkpoint), "--max-response-tokens", "2", typed=b"12\n\xff\xfe\n34\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("you> ") == 4
