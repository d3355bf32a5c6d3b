"""What `rally check-reward` tries, and what it says of rewards that are sound and of some that are not."""

import dataclasses
import json
from concurrent.futures import Future

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from tiny_models import make_tiny_model

from rallypoint.cli.show import check_reward as command
from rallypoint.config import load_config
from rallypoint.data import Example, Message
from rallypoint.environments.outcome import Failure, Scores
from rallypoint.environments.reward import Wants
from rallypoint.errors import RewardError
from rallypoint.prepare.check_reward import Trial, check_reward, judged, written, wrong_answers
from rallypoint.recipes.evaluation import evaluate
from rallypoint.recipes.use import Asked, Trained

REWARDS = """
import os, pathlib, time

def sound(data_source, solution_str, ground_truth, extra_info=None):
    _, mark, answer = solution_str.rpartition("####")
    return float(bool(mark) and answer.strip() == ground_truth)

def raises(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.split("####")[1].strip() == ground_truth)

def contains(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)

def believes(data_source, solution_str, ground_truth, extra_info=None):
    return float("10/10" in solution_str or solution_str == ground_truth)

def likes_all(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def exits(data_source, solution_str, ground_truth, extra_info=None):
    import os
    if not solution_str:
        os._exit(0)
    return float(solution_str == ground_truth)

def hangs(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(600)

def meets(data_source, solution_str, ground_truth, extra_info=None):
    here = pathlib.Path(__file__).parent
    (here / f"{os.getpid()}.there").touch()
    while len([*here.glob("*.there")]) < 2:
        time.sleep(0.01)
    return float(solution_str == ground_truth)

def by_length(data_source, solution_str, ground_truth, extra_info=None, *, token_ids, tokens, messages, logprobs):
    assert len(token_ids) == len(tokens) == len(logprobs) and messages[-1]["role"] == "user"
    return float(solution_str == ground_truth)
"""
ROWS = [{"prompt": f"{n} + 1?", "ground_truth": str(n + 1)} for n in range(10, 13)]
"""Few, for each is answered with 200,000 characters, too."""


@pytest.fixture
def checked(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)

    def check(function, rows=ROWS, *keys, say=lambda _: None):
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = f"{tmp_path}/rewards.py:{function}"
        config = load_config(
            "digits-grpo",
            ["data.generate=null", f"data.train={data}", f"reward.function={spec}", "reward.num_processes=1", *keys],
        ).config
        return check_reward(config, max_rows=64, say=say)

    return check


def test_a_sound_reward_is_nothing_to_worry_about_and_its_form_is_found(checked):
    report = checked("sound")
    assert (report.form, report.low, report.worries) == ("after ####", (), ())
    right, *others = report.kinds
    assert (right.name, right.scores) == ("right", [1.0] * 3)
    assert {kind.name: sum(kind.scores) for kind in others if kind.mean} == {"repeated": 3.0, "of all rows": 1.0}


def test_a_row_whose_truth_scores_below_the_maximum_is_named(checked):
    report = checked("sound", [*ROWS, {"prompt": "7?", "ground_truth": "7 "}])
    assert [(example.name, got) for example, got in report.low] == [("train.jsonl:4", "scores 0")]
    assert report.worries[0].startswith("1 of 4 right answers score below the maximum, 1: ")


WORRIES = {
    "raises": "answers 'empty' have no score and would be left out instead of counting as wrong (raised): ",
    "contains": "a list of the answers of all rows counts as right",
    "believes": "the answer 'flattery' scores 1, as much as a right one",
    "likes_all": "answers of other rows score 1 on average, as much as right ones",
    "exits": "answers 'empty' have no score and would be left out instead of counting as wrong (crashed): ",
}


@pytest.mark.parametrize("function", WORRIES)
def test_a_reward_that_can_be_gamed_or_fails_is_worried_about(checked, function):
    assert any(WORRIES[function] in worry for worry in checked(function).worries)


def test_a_function_of_which_no_call_ends_is_given_up(checked):
    said = []
    with pytest.raises(RewardError, match=r"no call returned, .*reward\.timeout_s=0\.2 s[\s\S]*in hangs"):
        checked("hangs", ROWS, "reward.timeout_s=0.2", "reward.num_processes=2", say=said.append)
    kinds = [text for text in said if text.endswith(": 3 answers")]
    assert kinds == ["the truth as it is: 3 answers", "the truth after ####: 3 answers"]


class Answering:
    """A grader of a function that has answered before anybody looks."""

    wants, num_at_once = Wants(), 2

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def submit(self, calls):
        done = Future()
        done.set_result(self.outcomes.pop(0))
        return [done for _ in calls]


def test_a_kind_of_answers_is_ended_after_two_calls_that_take_too_long():
    right, late = Scores((1.0,), {}), Failure("timeout", "the reward function took longer")
    kind = Trial(Answering(right, late, late, right), "right", 6, lambda _: None).run([None] * 6)
    assert (kind.outcomes, len(kind.seconds), kind.num_left) == ((right, late, late, right), 4, 2)
    config = load_config("digits-grpo", []).config
    examples = [Example(f"a:{row}", "lab", (Message("user", "f?"),), "", "1", {}) for row in range(6)]
    report = judged(config, examples, "as it is", [kind])
    assert [example.name for example, _ in report.low] == ["a:1", "a:2"]
    assert report.worries[1].startswith("2 or more answers 'right' took longer than reward.timeout_s=60, so 2 others")


def test_answers_are_tried_at_once_where_the_run_asks_at_once(checked):
    assert checked("meets", ROWS, "reward.num_processes=2").worries == ()


def test_a_function_is_given_what_it_names(checked):
    assert checked("by_length", ROWS[:2]).worries == ()


def test_tests_are_no_answer_and_the_solution_beside_them_is():
    program = "def f(): return 1"
    example = Example("a:1", "lab", (Message("user", "f?"),), "", ["assert f() == 1"], {"solution": program})
    assert written(example, "in a block") == f"```python\n{program}\n```"
    assert written(dataclasses.replace(example, ground_truth=7), "in a box") == "So it is $\\boxed{7}$."


def test_without_a_function_there_is_nothing_to_check(tmp_path):
    config = load_config("digits-grpo", ["reward.function=null", f"reward.path={tmp_path}"]).config
    with pytest.raises(RewardError, match="no reward function to check"):
        check_reward(config, max_rows=2, say=print)


def test_the_command_prints_a_table_and_says_by_its_status_whether_there_is_something_to_look_at(capsys):
    assert command("digits-grpo", [], max_rows=2) == 0
    printed = capsys.readouterr().out
    assert "digits: right answers are the ground truth as it is" in printed
    assert {line.split()[0] for line in printed.splitlines()[2:13]} >= {"right", "empty", "huge", "truncated"}
    assert printed.splitlines()[0] == "nothing to worry about", "the conclusion first"


def test_every_kind_of_wrong_answer_has_one_for_each_row():
    assert wrong_answers([], "as it is")["empty"] == []


def test_a_run_folder_does_not_decide_where_responses_are_sent(tmp_path):
    keys = ["reward.function=judge", "reward.parameters={url: 'http://elsewhere/v1', model: m}"]
    trained = Trained(str(tmp_path), load_config("digits-grpo", keys).config)
    with pytest.raises(RewardError, match="asks http://elsewhere/v1"):
        evaluate(trained, ["train.jsonl"], reward=None, asked=Asked(), max_prompts=None, say=print)


def test_a_pattern_that_wants_what_the_cue_has_opened_is_worried_about(checked, tmp_path):
    tokenizer = make_chat_tokenizer(QWEN3)
    tokenizer.chat_template = QWEN3.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
    keys = ["model.create=null", f"model.path={make_tiny_model(tmp_path / 'model', tokenizer=tokenizer)}"]

    def worries(pattern):
        exact = "{name: right, function: exact, parameters: {tag: answer}}"
        form = f"{{name: form, function: regex, parameters: {{pattern: '{pattern}'}}}}"
        return checked("sound", ROWS[:2], *keys, "reward.function=null", f"reward.functions=[{exact}, {form}]").worries

    (said,) = worries("<think>.*</think>.*")
    assert (
        "the chat template opens <think> before the response, which therefore lacks it, and right answers score 1 w"
        in said
    )
    assert worries("(<think>)?.*</think>.*") == ()
