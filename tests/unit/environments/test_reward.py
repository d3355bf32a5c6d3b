import dataclasses
import pickle
import subprocess
import sys

import pytest

from rallypoint.data.digits import score_digits
from rallypoint.environments.reward import Wants, check_reward_spec, load_reward, wants_of
from rallypoint.errors import RewardError

RIGHT = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n"


@pytest.fixture
def write(tmp_path):
    path_before = list(sys.path)

    def write_file(text, name="rewards.py"):
        (tmp_path / name).write_text(text)
        return f"{tmp_path / name}:compute_score"

    yield write_file
    sys.path[:] = path_before


def refusal(spec):
    """Return what loading says."""
    with pytest.raises(RewardError) as raised:
        load_reward(spec)
    return str(raised.value)


def test_the_shipped_reward_is_known_by_its_name():
    assert check_reward_spec("digits") is None
    assert load_reward("digits") is score_digits


ACCEPTED = [
    RIGHT,
    "def compute_score(ground_truth, solution_str, extra_info, data_source): return 0.5",
    "def compute_score(*, data_source, solution_str, ground_truth, extra_info): return 0.5",
    "def compute_score(**kwargs): return 0.5",
    "def compute_score(solution_str, **others): return 0.5",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=True): return 0.5",
    "compute_score = lambda data_source, solution_str, ground_truth, extra_info: 0.5",
    "def compute_score(solution_str, token_ids, tokens, **others): return 0.5",
    "def compute_score(solution_str, *, tokens=None, **others): return 0.5",
    "class Scorer:\n    def __call__(self, **row): return 0.5\ncompute_score = Scorer()",
    "import functools\ndef score(scale, **row): return scale\ncompute_score = functools.partial(score, 0.5)",
    "if True:\n    def compute_score(**row): return 0.5\nelse:\n    def compute_score(answer): return 0",
    "try:\n    from nowhere import compute_score\nexcept ImportError:\n    def compute_score(**row): return 0.5",
    "def wrap(function): return lambda **row: 0.5\n@wrap\ndef compute_score(answer): return 0",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_any_function_that_takes_the_four_arguments_is_accepted_before_and_after_it_is_loaded(write, text):
    spec = write(text)
    assert check_reward_spec(spec) is None
    reward = load_reward(spec)
    tokens = dict.fromkeys(wants_of(reward).more)
    assert reward(data_source="d", solution_str="s", ground_truth="g", extra_info={}, **tokens) == 0.5


REFUSED = [
    ("def compute_scores(**row): return 0.5", "has no function 'compute_score'; did you mean 'compute_scores'?"),
    ("def grade(**row): return 0.5", "has no function 'compute_score'; it has grade"),
    ("", "has no function 'compute_score'; it has no function at all"),
    (
        "def compute_score(solution, answer): return 0.5",
        "takes (solution, answer), expected (data_source, solution_str, ground_truth, extra_info=None)",
    ),
    (
        "def compute_score(data_source, solution_str, ground_truth): return 0.5",
        "unexpected keyword argument 'extra_info'",
    ),
    (RIGHT.replace("extra_info=None", "extra_info, tokenizer"), "missing a required argument: 'tokenizer'"),
    (RIGHT.replace("extra_info=None", "extra_info, *, strict"), "needs the parameter 'strict'"),
    (
        RIGHT.replace("ground_truth", "ground_truth, /"),
        "compute_score takes (data_source, solution_str, ground_truth",
    ),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_what_cannot_be_called_is_refused_in_the_same_words_before_and_after_it_is_loaded(write, text, problem):
    spec = write(text)
    assert problem in str(check_reward_spec(spec))
    assert problem in refusal(spec)


BAD_SPECS = [
    ("digit", "did you mean 'digits'?"),
    ("rewards.py", "a function in a file ('rewards.py:compute_score'), found 'rewards.py'"),
    ("rewards.py:", "found 'rewards.py:'"),
    (":compute_score", "found ':compute_score'"),
    ("rewards.py:a.b", "found 'rewards.py:a.b'"),
    ("", "found ''"),
]


@pytest.mark.parametrize(("spec", "problem"), BAD_SPECS)
def test_a_name_that_is_no_reward_is_refused(spec, problem):
    assert problem in str(check_reward_spec(spec))
    assert problem in refusal(spec)


def test_a_missing_file_a_folder_and_a_file_of_another_kind_are_refused(write, tmp_path):
    write(RIGHT)
    write(RIGHT, "rewards.txt")
    problems = {
        f"{tmp_path}/reward.py:f": f"does not exist (looked for {tmp_path}/reward.py); did you mean",
        f"{tmp_path}/no/such.py:f": "does not exist",
        f"{tmp_path}:f": "is a folder, expected a Python file",
        f"{tmp_path}/rewards.txt:compute_score": "expected a file that ends in .py",
    }
    for spec, problem in problems.items():
        assert problem in str(check_reward_spec(spec))
        assert problem in refusal(spec)


def test_something_that_is_no_function_is_refused(write):
    assert "expected a function, found int" in refusal(write("compute_score = 5"))


def test_a_file_that_raises_shows_its_own_traceback(write, tmp_path):
    shown = refusal(write("def fail():\n    return 1 / 0\nfail()\n" + RIGHT))
    assert f"{tmp_path}/rewards.py raised while it was imported:\nTraceback (most recent call last):" in shown
    assert "line 3, in <module>" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert "importlib" not in shown
    assert "user_code.py" not in shown


@pytest.mark.parametrize("text", ["import no_such_module_anywhere", "import sys; sys.exit(3)", "def f(:"])
def test_a_file_that_cannot_be_imported_is_an_error_and_leaves_no_module_behind(write, text):
    before = set(sys.modules)
    assert "raised while it was imported" in refusal(write(text))
    assert not [name for name in set(sys.modules) - before if name.startswith("rallypoint_user")]


NAMED = [
    ("def f(**row): return 0", ()),
    ("def f(*, tokens, **row): return 0", ("tokens",)),
    ("def f(data_source, solution_str, ground_truth, extra_info, token_ids=None): return 0", ("token_ids",)),
    ("async def f(tokens, token_ids, **row): return 0", ("token_ids", "tokens")),
    ("def f(solution_str, **tokens): return 0", ()),
]


@pytest.mark.parametrize(("text", "named"), NAMED)
def test_a_function_gets_of_the_tokens_what_it_names(write, text, named):
    spec = write(text).replace("compute_score", "f")
    assert check_reward_spec(spec) is None
    assert wants_of(load_reward(spec)).more == named


def test_the_check_runs_nothing_of_the_file(write, tmp_path):
    spec = write(f"open({str(tmp_path / 'was_run')!r}, 'w')\nimport no_such_module_anywhere\n" + RIGHT)
    assert check_reward_spec(spec) is None
    assert not (tmp_path / "was_run").exists()


def test_the_check_says_where_the_syntax_is_wrong(write):
    assert "cannot be read as Python" in str(check_reward_spec(write("x = 1\ndef f(:")))
    assert "line 2" in str(check_reward_spec(write("x = 1\ndef f(:")))


@pytest.mark.parametrize("text", ["from helpers import *", "def __getattr__(name): return lambda **row: 0.5"])
def test_the_check_lets_pass_what_only_loading_can_tell(write, text):
    assert check_reward_spec(write(text)) is None


@pytest.mark.parametrize("module", ["reward", "pool", "worker"])
def test_neither_the_check_nor_what_scores_imports_more_than_the_standard_library(module):
    program = (
        f"import sys; import rallypoint.environments.{module} as found; "
        "print(sorted({'torch', 'ray', 'numpy', 'pydantic', 'asyncio', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_dataclasses_pickle_and_the_files_beside_it_work_in_a_reward_file(write):
    write("SCALE = 0.25", "rallypoint_test_sibling.py")
    spec = write(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "from rallypoint_test_sibling import SCALE\n"
        "@dataclasses.dataclass\n"
        "class Verdict:\n"
        "    score: float\n"
        "def compute_score(**row):\n"
        "    return Verdict(SCALE)\n"
    )
    reward = load_reward(spec)
    verdict = reward(data_source="d", solution_str="s", ground_truth="g", extra_info={})
    assert dataclasses.asdict(pickle.loads(pickle.dumps(verdict))) == {"score": 0.25}
    assert pickle.loads(pickle.dumps(reward)) is reward


def test_two_files_of_the_same_name_do_not_meet(write, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = write(RIGHT), write(RIGHT.replace("0.5", "0.7"), "other/rewards.py")
    scores = [
        load_reward(spec)(data_source="", solution_str="", ground_truth="", extra_info={}) for spec in (first, second)
    ]
    assert scores == [0.5, 0.7]


OPTIONS = [
    ("pattern, **row", {}, "needs the parameter 'pattern': set reward.parameters={pattern: ...}"),
    ("data_source, solution_str, ground_truth, extra_info, *, tag=1", {"tg": 1}, "has no parameter 'tg'; did you mean"),
    ("data_source, solution_str, ground_truth, extra_info", {"tag": 1}, "has no parameter 'tag'; it has none"),
    ("**row", {"tokens": 1}, "the parameter 'tokens' of "),
]


@pytest.mark.parametrize(("arguments", "options", "problem"), OPTIONS)
def test_a_parameter_that_a_function_does_not_take_is_named_before_anything_is_run(write, arguments, options, problem):
    arguments = arguments.replace("pattern,", "*, pattern,")
    spec = write(f"def compute_score({arguments}): return 0")
    assert problem in check_reward_spec(spec, options)
    with pytest.raises(RewardError) as raised:
        load_reward(spec, options)
    assert problem in str(raised.value)


SCOPES = [
    ("data_sources, solution_strs, ground_truths, extra_infos", Wants("group")),
    ("solution_strs, **rows", Wants("group")),
    ("solution_strs, groups, tokens, **rows", Wants("batch", ("tokens", "groups"))),
    ("solution_str, groups=None, **row", Wants("response")),
    ("turns, metrics, sample_index=0, **row", Wants("response", ("turns", "metrics", "sample_index"))),
    (
        "solution_str, messages, finish_reason, logprobs, **row",
        Wants("response", ("logprobs", "messages", "finish_reason")),
    ),
]


@pytest.mark.parametrize(("arguments", "wants"), SCOPES)
def test_the_names_of_its_arguments_say_what_a_function_is_called_with(write, arguments, wants):
    spec = write(f"def compute_score({arguments}): return 0")
    assert check_reward_spec(spec) is None
    assert wants_of(load_reward(spec)) == wants
