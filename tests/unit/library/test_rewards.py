"""Rewards that Python gives to a run or to an evaluation: one or several, and what is said where there is none."""

import contextlib

import pytest

import rallypoint as rally
from rallypoint.config import load_config
from rallypoint.environments.given import GIVEN
from rallypoint.errors import ConfigError, RewardError
from rallypoint.library.rewards import specs_of, wanted_columns
from rallypoint.library.settings import in_python
from rallypoint.prepare.own_functions import rewards_for
from rallypoint.run.folder import create_run


def right(completion, answer, level):
    return float(completion == answer)


def short(completion):
    return -len(completion)


def test_one_and_several_rewards_have_names_as_long_as_they_are_used():
    with contextlib.ExitStack() as stack:
        assert specs_of(right, stack) == "@right"
        assert specs_of([short, "math"], stack) == {"short": "@short", "math": "math"}
        assert specs_of({"one": short, "two": "a.py:f"}, stack) == {"one": "@short-2", "two": "a.py:f"}
        assert wanted_columns("@right") == ["level"]
        assert wanted_columns({"one": "@short", "two": "math"}) == []
    assert not GIVEN


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (3, "reward: expected a function or the name of one, found int"),
        ([short, None], "found NoneType"),
        ([short, short], "two functions have the same name"),
    ],
)
def test_what_is_no_reward_is_refused(reward, problem):
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError, match=problem):
        specs_of(reward, stack)


def test_an_evaluation_has_the_rewards_that_are_named_and_no_settings_of_the_runs():
    config = load_config("digits-grpo", ["reward.parameters={a: 1}", "reward.timeout_s=7"]).config
    one, several = rewards_for("m", config, "math"), rewards_for("m", config, {"right": "math", "short": "@short"})
    assert (one.function, one.functions, one.parameters, one.timeout_s) == ("math", (), {}, 7)
    assert [(each.name, each.function, each.weight) for each in several.all_functions] == [
        ("right", "math", 1.0),
        ("short", "@short", 1.0),
    ]
    assert rewards_for("m", config, None) is config.reward
    with pytest.raises(RewardError, match="letters, digits and _"):
        rewards_for("m", config, {"a b": "math"})


def test_a_function_that_python_gave_to_the_run_is_to_be_given_again():
    config = load_config("digits-grpo", ["reward.function='@rew-2'"]).config
    with pytest.raises(RewardError, match=r"give it again: rally.evaluate\(run, rows, reward=rew\), or put it into"):
        rewards_for("m", config, None)
    with pytest.raises(RewardError, match=r"name the reward: --reward file\.py:function") as raised:
        rewards_for("m", None, None)
    assert in_python(str(raised.value)).endswith("name the reward: reward='file.py:function'")


def test_arguments_of_trl_are_answered_in_the_words_of_python():
    with pytest.raises(ConfigError) as error:
        rally.train("grpo", reward_funcs=[short], train_dataset=[], learning_rate=1e-6, args=None)  # pyright: ignore[reportCallIssue]
    assert [problem.partition(" ")[0] for problem in error.value.problems] == [
        "reward_funcs:",
        "train_dataset:",
        "learning_rate:",
        "args:",
    ]
    assert "reward=" in str(error.value)
    assert "lr=" in str(error.value)


def test_the_reward_of_a_run_that_this_user_started_is_run_and_that_of_another_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "own.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    keys = [f"reward.function={tmp_path}/own.py:f", f"trainer.runs_dir={tmp_path}", "trainer.name=mine"]
    run = create_run(load_config("digits-grpo", keys))
    config, path = load_config(str(run.path)).config, str(run.checkpoints / "step_000004")
    assert rewards_for(path, config, None) is config.reward
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of somebody else"))
    with pytest.raises(RewardError, match=r"you did not start that run on this machine.*name it: --reward .*own\.py:f"):
        rewards_for(path, config, None)
