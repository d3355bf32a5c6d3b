"""Each reward that ships, by a table of twenty cases or a hundred: a response, its ground truth, its score."""

import json
from pathlib import Path

import pytest

from rallypoint.environments.outcome import Scores, read_result
from rallypoint.environments.reward import SHIPPED, check_reward_spec, load_reward
from rallypoint.environments.sandbox import SandboxError, open_sandbox

TABLES = {}


def table(name, /, *cases, **parameters):
    TABLES.setdefault(name, []).extend((parameters, *case) for case in cases)


def lines(file):
    """Return the cases of a file beside this one, `score | ground truth | response` on each line; ⏎ breaks lines."""
    rows = Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()
    return [
        (response.replace("⏎", "\n"), truth, int(score))
        for score, truth, response in (row.split(" | ") for row in rows)
    ]


table(
    "exact",
    ("42", "42", 1),
    (" 42\n", "42", 1),
    ("42", 42, 1),
    ("42.0", 42, 0),
    ("", "42", 0),
    ("42 and more", "42", 0),
    ("Yes", "yes", 0),
    ("b", ["a", "b"], 1),
    ("c", ["a", "b"], 0),
    ("é", "é", 1),
    ("42" * 10_000, "42", 0),
)
table("exact", ("YES", "yes", 1), ("Straße", "STRASSE", 1), ("no", "yes", 0), ignore_case=True)
table("exact", ("The U.S.!", "us", 1), ("a half-life", ["no", "Halflife"], 1), ("an us", "as", 0), normalize=True)
table(
    "exact",
    ("so <answer> 42 </answer>.", "42", 1),
    ("<answer>1</answer> or <answer>42</answer>", "42", 1),
    ("<answer>42</answer> or <answer>1</answer>", "42", 0),
    ("42", "42", 0),
    ("<answer>42", "42", 0),
    ("</answer>42<answer>", "42", 0),
    tag="answer",
)
SPELLED = ("42", "42.0", "+42", "-42", "042", "4 2", "42%", "42.", "forty-two")
table(
    "exact",
    *((one, other, int(at == place)) for at, one in enumerate(SPELLED) for place, other in enumerate(SPELLED)),
)
WORKED = "She has 3 + 4 = <<3+4=7>>7 eggs.\n#### 7"
table(
    "gsm8k",
    ("#### 7", "7", 1),
    ("#### 7", WORKED, 1),
    ("so 3 + 4 = 7\n#### 7.0", "7", 1),
    ("#### 8", WORKED, 0),
    ("7", "7", 0),
    ("", "7", 0),
    ("#### ", "7", 0),
    ("#### seven", "7", 0),
    ("#### 1 #### 7", "7", 1),
    ("#### 7 #### 1", "7", 0),
    ("#### $1,234", "1234", 1),
    ("#### 1234", "1,234", 1),
    ("#### -5", "-5", 1),
    ("#### 5", "-5", 0),
    ("#### .5", "0.5", 1),
    ("#### 7 eggs", "7", 1),
    ("#### " + "9" * 100_000, "7", 0),
    ("#### 7" * 10_000, "7", 1),
    ("#### 7/2", "3.5", 1),
    ("#### 7/2", "7", 0),
    ("#### 7/0", "7", 0),
    ("#### 1e3", "1000", 1),
    ("#### 1e" + "9" * 100, "7", 0),
    ("#### 7e is no power", "7", 1),
    ("#### \u22125", "-5", 1),
    ("#### -$7", "-7", 1),
    ("#### 12,5,7", "1257", 0),
    ("#### 12,5", "125", 0),
    ("#### 1234,567", "1234567", 0),
    ("#### $1,234,567.5", "1234567.5", 1),
    ("#### 7, or so", "7", 1),
)
table("gsm8k", *lines("answers_gsm8k.txt"), ("####\n7", "7", 1), ("#### 7\nFor 5 + 4 = 9.", "7", 1))
table("gsm8k", *lines("answers_gsm8k_flexible.txt"), ("so:\n- 2 pears\n- 3 apples", "3", 1), flexible=True)
table("gsm8k", ("from 1,234 to 1/2", "0.5", 1), flexible=True)
table("gsm8k", ("it is 3, no, 7.", "7", 1), ("no number", "7", 0), ("#### 1, or 7", "7", 0), flexible=True)
table(
    "math",
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    (r"so $\boxed{\dfrac12}$", r"$\frac{1}{2}$", 1),
    (r"\boxed{0.6}", "0.5", 0),
    ("", "0.5", 0),
    (r"\boxed{}", "0.5", 0),
    (r"\boxed{1} then \boxed{2}", "2", 1),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{x+1}", "x+2", 0),
    (r"\boxed{(1, 2)}", "(1,2)", 1),
    (r"\boxed{(2, 1)}", "(1,2)", 0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
    (r"\boxed{[0,1)}", "[0,1)", 1),
    (r"\boxed{10\%}", r"10\%", 1),
    (r"\boxed{1,000}", "1000", 1),
    ("The final answer is $7$.", "7", 1),
    ("7 " * 20_000, "8", 0),
    (r"\boxed{" * 500, "8", 0),
    (r"\boxed{\frac{1}{0}", "8", 0),
    (r"\boxed{7}", r"we get $7$, so \boxed{7}", 1),
    (r"\boxed{72}", "48 + 24 = $<<48+24=72>>72.\n#### 72", 1),
    ("48 + 24 = 72.\n#### 72", "48 + 24 = $<<48+24=72>>72.\n#### 72", 1),
    (r"\boxed{24}", "48 + 24 = $<<48+24=72>>72.\n#### 72", 0),
)
table("math", *lines("answers_math.txt"))
table("multiple_choice", *lines("answers_multiple_choice.txt"))
table(
    "multiple_choice",
    ("B", "B", 1),
    ("(B)", "B", 1),
    ("b.", "B", 1),
    ("A", "B", 0),
    ("", "B", 0),
    ("The answer is B.", "B", 1),
    ("The answer is (B) because A is wrong", "B", 1),
    ("Answer: **B**", "B", 1),
    ("Answer: B\n", "(B)", 1),
    (r"so \boxed{B}", "B", 1),
    (r"\boxed{\text{B}}", "B", 1),
    ("<answer>b</answer>", "B", 1),
    ("<answer> (B) </answer>", 1, 1),
    ("The answer is A. No, the answer is B.", "B", 1),
    ("The answer is B. No, the answer is A.", "B", 0),
    ("B) Paris", "B", 1),
    ("Because of that I think", "B", 0),
    ("The answer is Boston", "B", 0),
    ("A\nB\nC\nD", "D", 1),
    ("The answer is Z", "B", 0),
    ("The answer is " * 5_000, "B", 0),
    ("answer is **(B)** because A is wrong", "B", 1),
    (r"\boxed{\textbf{(B)}}", "B", 1),
    (r"\boxed{\textbf{(B)}\ 12}", "B", 1),
    (r"Final Answer: \boxed{\text{(B)}}", "B", 1),
    (r"\boxed{B: Paris}", "B", 1),
    (r"\boxed{A, B}", "A", 0),
    (r"\boxed{Boston}", "B", 0),
    ("<answer>B. Paris</answer>", "B", 1),
    ("The answer is $B$", "B", 1),
    (r"The answer is \(B\).", "B", 1),
    ('The answer is "B".', "B", 1),
    ("The answer is a whale.", "A", 0),
    ("Answer: A whale.", "A", 0),
    ("The answer is I think hard to find", "I", 0),
    ("The answer is a.", "A", 1),
    ("The answer is A because whales are mammals", "A", 1),
    ("The answer I would choose is (B)", "B", 1),
    ("The answer to question 3 is B", "B", 1),
    ("The answer is therefore option B, not A", "B", 1),
    ("The answer is not A but B", "B", 1),
    ("The answer is not A", "A", 0),
    ("The answer cannot be determined", "A", 0),
    ("The answer is a bit hard to find, but B", "B", 1),
    ("The correct answer is: B) Paris", "B", 1),
    ("My answer: B. I hope this helps", "B", 1),
    ("Option A is wrong, so the answer is option B", "B", 1),
    ("Choice B is wrong. I choose A.", "A", 1),
    ("I'd go with (B)", "B", 1),
    ("I choose a whale", "A", 0),
    ("Option B is correct, option C is wrong", "B", 1),
    ("Option B is wrong", "B", 0),
    ("#### B", "B", 1),
    ("- **B**", "B", 1),
    ("I", "I", 1),
    ("answer " * 5_000, "B", 0),
)
SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
table(
    "json_schema",
    ('{"a": 1}', None, 1),
    (' {"a":\n1} ', None, 1),
    ('{"a": 1.5}', None, 0),
    ('{"a": "1"}', None, 0),
    ("{}", None, 0),
    ('{"a": 1, "b": 2}', None, 0),
    ("", None, 0),
    ("{'a': 1}", None, 0),
    ('{"a": 1', None, 0),
    ('{"a": 1} and more', None, 0),
    ('so:\n```json\n{"a": 1}\n```', None, 1),
    ('```\n{"a": 1}\n```\n```\n{}\n```', None, 0),
    ("[1]", None, 0),
    ("NaN", None, 0),
    ('{"a": NaN}', None, 0),
    ("[" * 100_000, None, 0),
    ('{"a": 1}' * 10_000, None, 0),
    schema=SCHEMA,
)
table("json_schema", ("1", {"type": "integer"}, 1), ("1", '{"type": "string"}', 0), ('"1"', '{"type": "string"}', 1))
OF_TYPES = {
    "integer": "1 0 -7 1e2 2.0 12345678901234567890",
    "number": "1 0 -7 1e2 2.0 12345678901234567890 0.5 1e-3",
    "string": '"" "a" "1" "null" "é"',
    "boolean": "true false",
    "null": "null",
    "array": "[] [1] [[]]",
    "object": '{} {"a":1} {"a":{}}',
}
"""What JSON Schema (draft 2020-12, 6.1.1) counts to each type: 2.0 is an integer, true is not a number."""
VALUES = sorted({value for values in OF_TYPES.values() for value in values.split()})
for kind, values in OF_TYPES.items():
    table("json_schema", *((value, {"type": kind}, int(value in values.split())) for value in VALUES))
FORM = r"<think>.*</think>\s*<answer>[^<]*</answer>"
table(
    "regex",
    ("<think>a</think><answer>1</answer>", "", 1),
    ("<think>a\nb</think>\n\n<answer>1</answer>", "", 1),
    (" <think></think> <answer></answer>\n", "", 1),
    ("<think>a</think>", "", 0),
    ("<answer>1</answer>", "", 0),
    ("<answer>1</answer><think>a</think>", "", 0),
    ("so <think>a</think><answer>1</answer>", "", 0),
    ("<think>a</think><answer>1</answer>.", "", 0),
    ("<think>a</think><answer>1<", "", 0),
    ("<think>a</think><answer><b></answer>", "", 0),
    ("", "", 0),
    ("<think>" * 1_000, "", 0),
    ("<think>" + "a" * 100_000 + "</think><answer>1</answer>", "", 1),
    pattern=FORM,
)
table(
    "regex",
    ("so <think>a</think><answer>1</answer>.", "", 1),
    ("<think>a</think> 1", "", 0),
    ("", "", 0),
    pattern=FORM,
    whole=False,
)
table("regex", ("12", "", 1), ("1", "", 1), ("1a", "", 0), ("", "", 0), pattern=r"\d+")
TIMES = [(f"{hour:02}:{minute:02}", "", int(hour < 24)) for hour in range(20, 40) for minute in (0, 15, 30, 45)]
table("regex", *TIMES, pattern=r"([01]\d|2[0-3]):[0-5]\d")
table("length", *((" ".join("a" * n), "", s) for n, s in [(1, 1), (4, 1), (5, 0), (9, 0), (100_000, 0)]), most=4)
table("length", *((" ".join("a" * n), "", s) for n, s in [(1, 0), (2, 1), (3, 1), (4, 1), (5, 0)]), least=2, most=4)
table("length", *((" ".join("a" * n), "", int(n <= 40)) for n in range(1, 81)), most=40)
SLOPE = [(4, 1), (5, 0.75), (6, 0.5), (7, 0.25), (8, 0), (9, 0)]
table("length", *((" ".join("a" * n), "", score) for n, score in SLOPE), most=4, slack=4)
LOW = [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1)]
table("length", *((" ".join("a" * n), "", score) for n, score in LOW), most=9, least=4, slack=4)
ADD, WRONG = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"
IO = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}
READS = "a, b = map(int, input().split())\nprint(a + b)"
table(
    "code",
    (ADD, ["assert add(1, 2) == 3"], 1),
    (f"so:\n```python\n{ADD}\n```\ndone", "assert add(1, 2) == 3\nassert add(0, 0) == 0", 1),
    (f"```\n{WRONG}\n```\n```\n{ADD}\n```", ["assert add(1, 2) == 3"], 1),
    (WRONG, ["assert add(1, 2) == 3"], 0),
    (WRONG, ["assert add(1, 0) == 1", "assert add(1, 2) == 3"], 0),
    ("", ["assert add(1, 2) == 3"], 0),
    ("def add(a, b:", ["assert add(1, 2) == 3"], 0),
    ("def add(a, b): 1 / 0", ["assert add(1, 2) == 3"], 0),
    (ADD, ["assert add('a', 'b') == 'ab'", "assert add((1,), (2,)) == (1, 2)"], 1),
    (ADD, ["assert add(0.1, 0.2) == 0.3"], 1),
    (ADD, json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}), 1),
    (ADD, {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, 1),
    ("def odd(x): return x % 2 == 1", ["assert odd(3)", "assert not odd(2)", "assert odd(1) is True"], 1),
    ("def odd(x): return x % 2", ["assert odd(3)", "assert odd(3) == True", "assert not odd(2)"], 1),
    ("def odd(x): return x % 2", ["assert odd(3) is True"], 0),
    (f"{ADD}\nif __name__ == '__main__':\n    print(add(*input().split()))", ["assert add(1, 2) == 3"], 1),
    (f"from __future__ import annotations\n{ADD}", ["assert add(1, 2) == 3"], 1),
    (READS, IO, 1),
    (READS.replace("+", "-"), IO, 0),
    ("print(3)", IO, 0),
    (READS + "\nprint()", IO, 1),
    (READS + "\n1 / 0", IO, 0),
    ("print('3' * 100_000)", IO, 0),
)
table("code", (READS, IO, 1), ("print(3)", IO, 0.5), ("print()", IO, 0), partial=True)
SUM = {"source_dataset": "chain_sum"}
ANSWERS = [
    ("<answer>7</answer>", "7"),
    ("<answer> 7 </answer>", "7"),
    ("7", "7"),
    (" 7\n", "7"),
    ("so <answer>3</answer> no <answer>7</answer>", "7"),
    ("<answer>8</answer>", "8"),
    ("", ""),
    ("<answer></answer>", ""),
    ("<answer>7", "<answer>7"),
    ("seven", "seven"),
]
"""Responses for scorers of reasoning-gym, and the answer that each should be given, to be scored."""
EXTRAS = {"math": "math_verify", "json_schema": "jsonschema"}
LEAST = 100
"""Cases of each; sandbox/honest_programs.txt has a hundred more for `code`."""
DECIDED = {"digits", "judge", "reasoning_gym"}
"""Rewards with tests of their own: tests/unit/data, test_judge.py, and below."""


def test_every_reward_that_ships_has_a_table_of_a_hundred_cases():
    assert set(TABLES) == set(SHIPPED) - DECIDED
    assert {name: len(cases) for name, cases in TABLES.items() if len(cases) < (LEAST if name != "code" else 20)} == {}


def call(name, parameters, response, truth):
    reward = load_reward(name, parameters)
    tokens = {"token_ids": response.split()} if name == "length" else {}
    return reward(data_source="lab", solution_str=response, ground_truth=truth, extra_info={}, **tokens)


@pytest.mark.parametrize("name", ["chain_sum", "gcd"])
def test_reasoning_gyms_scorers_are_given_the_answer_of_a_response(name):
    scorer = pytest.importorskip("reasoning_gym").get_score_answer_fn(name)
    reward = load_reward("reasoning_gym", {})
    for response, answer in ANSWERS:
        expected = scorer(answer=answer, entry={"question": "", "answer": "7", "metadata": {}})
        asked = {"solution_str": response, "ground_truth": "7"}
        assert reward(data_source=f"reasoning_gym:{name}", extra_info=None, **asked) == expected
        assert reward(data_source="mixed", extra_info={"source_dataset": name}, **asked) == expected


@pytest.mark.parametrize("name", TABLES)
def test_a_reward_that_ships_scores_as_its_table_says(name):
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    if name == "code":
        try:
            open_sandbox()
        except SandboxError as error:
            pytest.skip(str(error))
    wrong = []
    for parameters, response, truth, expected in TABLES[name]:
        if name == "code":
            parameters = {"time_s": 60.0, **parameters}
        result = read_result(call(name, parameters, response, truth), 1, ended=False)
        found = sum(result.token_scores) if isinstance(result, Scores) else result
        if expected is not None and found != expected:
            wrong.append((parameters, response[:60], truth, expected, found))
    assert wrong == []


BAD_TRUTHS = [
    ("gsm8k", {}, "none", "the ground truth has no number: 'none'"),
    ("math", {}, "", "the ground truth cannot be read as mathematics"),
    ("multiple_choice", {}, "Paris", "expected a letter of ABCDEFGHIJ or its number, found 'Paris'"),
    ("code", {}, [], "the ground truth has no tests"),
    ("code", {}, {"inputs": ["1"], "outputs": []}, "expected as many outputs as inputs"),
    ("code", {}, ["assert abs(f(1) - 2) < 1e-6"], "what a program compares itself cannot be trusted"),
    ("code", {}, ["assert f(1) == g(2)"], "what a program compares itself cannot be trusted"),
]


@pytest.mark.parametrize(("name", "parameters", "truth", "problem"), BAD_TRUTHS)
def test_a_ground_truth_that_cannot_be_read_is_an_error_that_shows_it(name, parameters, truth, problem):
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    with pytest.raises((ValueError, SandboxError), match=problem):
        call(name, parameters, "x", truth)


def test_what_a_reward_that_ships_needs_is_said_before_anything_starts():
    assert check_reward_spec("regex") == "regex needs the parameter 'pattern': set reward.parameters={pattern: ...}"
    assert check_reward_spec("regex", {"pattern": "x"}) is None
    problem = (
        "the pattern '<think>(.*</think>' is not a regular expression: missing ), unterminated subpattern at position 7"
    )
    assert problem in str(check_reward_spec("regex", {"pattern": "<think>(.*</think>"}))
    assert "expected text for pattern, found 12; put it in quotes" in str(check_reward_spec("regex", {"pattern": 12}))
    assert "has no parameter 'patern'; did you mean 'pattern'?" in str(check_reward_spec("regex", {"patern": "x"}))
    assert "did you mean 'gsm8k'?" in str(check_reward_spec("gsm8"))
