"""Whatever a start fails on is the last thing that is printed, once, in words, with what to do."""

import contextlib
import io
import json
import re
import shlex

import pytest
from tiny_models import make_tiny_model

from rallypoint.cli.main import _run

ROWS = [{"prompt": f"{number:03d}", "ground_truth": str(number)} for number in range(20)]
REWARD = """\
def good(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5
def words(data_source, solution_str, ground_truth, extra_info=None):
    return "good"
def other(answer):
    return 1.0
def some(answer: str, score=0.0, **others):
    return score
"""
SET = (
    *("model.path=HERE/model", "data.train=HERE/good.jsonl", "reward.function=HERE/rewards.py:good"),
    *("data.max_prompt_tokens=8", "rollout={num_prompts: 2, group_size: 2, max_response_tokens: 4}"),
    *("trainer.runs_dir=HERE/runs", "cluster.runtime=inline", "cluster.pools={main: [1]}"),
)
STARTS = {
    "a recipe that is none": ("gpro", "did you mean `grpo`"),
    "no such file": ("HERE/mine.yaml", "mine.yaml: no such file"),
    "no such folder": ("HERE/runs/none --resume", "expected a run, a recipe or a .yaml file"),
    "nothing to resume": ("digits --resume trainer.runs_dir=HERE", "start one with `rally train digits`"),
    "broken YAML": ("HERE/broken.yaml", "broken.yaml:3: not valid YAML"),
    "a key that is none": ("grpo rollout.temprature=1", "did you mean rollout.temperature?"),
    "a word for a number": ("grpo actor.optimizer.lr=fast", "expected a number above 0"),
    "keys that contradict": ("grpo rollout.group_size=1", "expected at least 2, usually 8"),
    "no model": ("grpo model.path=HERE/nowhere", "a Hugging Face folder has config.json"),
    "no data": ("grpo data.train=HERE/nowhere.jsonl", "no such file"),
    "empty data": ("grpo data.train=HERE/empty.jsonl", "is empty"),
    "a row that is broken": ("grpo data.train=HERE/broken.jsonl", "broken.jsonl, line 21: not valid JSON"),
    "prompts that are too long": ("grpo data.train=HERE/long.jsonl", "raise it, or drop or truncate such prompts"),
    "columns of other names": ("grpo data.train=HERE/other.jsonl", "'question' may be it: set data.columns"),
    "no file of the reward": ("grpo reward.function=HERE/none.py:f", "none.py does not exist"),
    "no function in it": ("grpo reward.function=HERE/rewards.py:god", "did you mean 'good'?"),
    "no Python in it": ("grpo reward.function=HERE/broken.py:f", "cannot be read as Python"),
    "a reward that takes others": ("grpo reward.function=HERE/rewards.py:other", "takes (answer), expected"),
    "a reward that takes the rest": ("grpo reward.function=HERE/rewards.py:some", "takes (answer, score, **others)"),
    "a reward without a number": ("grpo reward.function=HERE/rewards.py:words", "expected a number"),
    "no such device": ("grpo cluster.device=cuda", "set cluster.device=cpu"),
    "adapters of nothing": ("grpo 'model.lora={rank: 2, target_modules: [nothing]}'", "did you mean down_proj"),
    "a tracker that is none": ("grpo tracking=[wandbb]", "wandbb"),
    "a folder below a file": ("grpo trainer.runs_dir=HERE/good.jsonl/runs", "which is a file; expected a folder"),
    "an episode that is none": ("grpo rollout.episode=HERE/rewards.py:good", "which is not async"),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    here = tmp_path_factory.mktemp("here")
    make_tiny_model(here / "model")
    texts = {
        "good.jsonl": ROWS,
        "long.jsonl": [{"prompt": "1" * 99, "ground_truth": "1"}] * 20,
        "other.jsonl": [{"question": "1", "answer": "1"}] * 20,
        "broken.jsonl": [*ROWS, "{oops"],
        "empty.jsonl": [],
    }
    for name, rows in texts.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (here / name).write_text("".join(f"{line}\n" for line in lines))
    (here / "rewards.py").write_text(REWARD)
    (here / "broken.py").write_text("def f(:\n")
    (here / "broken.yaml").write_text("base: grpo\nmodel: {path: model\n")
    return here


def rally(here, command, *arguments):
    """Return the exit status, and all that was printed in its order."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as end,
    ):
        _run([command, *(argument.replace("HERE", str(here)) for argument in arguments)])
    return end.value.code, printed.getvalue()


@pytest.mark.parametrize("start", STARTS)
def test_the_error_of_a_start_is_the_last_thing_once_with_what_to_do(here, start):
    arguments, remedy = STARTS[start]
    recipe, *keys = shlex.split(arguments)
    status, printed = rally(here, "train", recipe, *(SET if recipe == "grpo" else ()), *keys)
    before, error, said = printed.partition("error: ")
    assert (status, error) == (2, "error: "), printed
    assert remedy in said
    assert re.fullmatch(r"(reading [a-z ]+ \.\.\.\n)*", before), "nothing that looks like an end"
    assert "Traceback" not in printed
    lines = [line for line in said.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)) <= 4, "20 rows are one line"


@pytest.mark.parametrize(
    ("command", "data"), [("train", "long"), ("eval", "long"), ("eval", "other"), ("check-reward", "other")]
)
def test_one_problem_of_twenty_rows_is_a_line_or_two_for_every_command(here, command, data):
    file = f"HERE/{data}.jsonl"
    of_eval = ("HERE/model", file, "--reward", "HERE/rewards.py:good")
    arguments = of_eval if command == "eval" else ("grpo", *SET, f"data.train={file}")
    status, printed = rally(here, command, *arguments)
    assert status == 2, printed
    assert len(printed.partition("error: ")[2].splitlines()) <= 3, printed
