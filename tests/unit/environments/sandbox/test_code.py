"""The forms in which data sets have the tests of programs: what is read of each, and that right programs are right."""

import json
import math
from pathlib import Path

import pytest

from rallypoint.environments.sandbox import Limits, SandboxError, open_sandbox
from rallypoint.environments.shipped.code import run_tests

ADD = "def add(a, b): return a + b"
READS = "a, b = map(int, input().split())\nprint(a + b)"
LINES = "print(int(input()) + int(input()))"
METHOD = "class Solution:\n    def add(self, a: int, b: Optional[int]) -> List[int]: return a + b"
MAIN = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A: x: int\n"
MAIN += f"{ADD}\nif __name__ == '__main__':\n    print(add(*input()))"
BY_NAME = {"inputs": [[1, 2], [2, 2]], "outputs": [3, 4], "fn_name": "add"}


def gives(value, *imports):
    return "\n".join([*imports, f"def f(*_): return {value}"])


RIGHT = {
    "texts": (READS, {"inputs": ["1 2\n"], "outputs": ["3\n"]}),
    "lists of lines": (LINES, {"inputs": [["1", "2"]], "outputs": [["3"]]}),
    "lists of lines with ends": (LINES, {"inputs": [["1\n", "2\n"]], "outputs": [["3\n"]]}),
    "lists of numbers": (READS, {"inputs": [[[1, 2]]], "outputs": [[3]]}),
    "a number on standard output": (READS, {"inputs": ["1 2"], "outputs": [3]}),
    "no function's name": (READS, {"inputs": ["1 2"], "outputs": ["3"], "fn_name": None}),
    "JSON": (LINES, json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]})),
    "JSON of JSON": (READS, json.dumps(json.dumps({"inputs": ["1 2"], "outputs": ["3"]}))),
    "a test at a time": (READS, [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]),
    "a test at a time, with types": (READS, [{"input": "1 2", "output": "3", "testtype": "stdin", "metadata": {}}]),
    "one test": (READS, {"input": "1 2", "output": "3"}),
    "a function's name": (ADD, BY_NAME),
    "a function's name with each test": (ADD, [{"input": [1, 2], "output": [3], "fn_name": "add"}]),
    "arguments as JSON": (ADD, [{"input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}]),
    "results in lists": (ADD, BY_NAME | {"outputs": [[3], [4]]}),
    "results that are lists of one": (ADD, {"inputs": [[[1], []]], "outputs": [[1]], "fn_name": "add"}),
    "class Solution": (METHOD, BY_NAME),
    "class Solution, in lists": (METHOD, BY_NAME | {"outputs": [[3], [4]]}),
    "class Solution by assert": (METHOD, ["assert Solution().add(1, 2) == 3"]),
    "a main block that reads": (MAIN, BY_NAME),
    "a main block that reads, by assert": (MAIN, ["assert add(1, 2) == 3"]),
    "a text stays one": (gives("'3'"), {"inputs": [[0]], "outputs": ["3"], "fn_name": "f"}),
    "a Counter": (gives("Counter('aab')", "from collections import Counter"), ["assert f() == {'a': 2, 'b': 1}"]),
    "a Counter on the right": (gives("{'a': 2}"), ["from collections import Counter", "assert f() == Counter('aa')"]),
    "a defaultdict": (
        gives("defaultdict(int, a=1)", "from collections import defaultdict"),
        ["assert f() == {'a': 1}"],
    ),
    "a deque": (gives("deque([1])", "from collections import deque"), ["assert f() == [1]"]),
    "a range": (gives("range(3)"), ["assert f() == [0, 1, 2]"]),
    "a tuple": (gives("(1, (2,))"), ["assert f() == [1, [2]]"]),
    "keys": (gives("{'a': 1}.keys()"), ["assert f() == ['a']"]),
    "infinity": (gives("[float('inf')]"), ["assert f() == [float('inf')]", "assert f() == [math.inf]", "import math"]),
    "a Decimal": (gives("Decimal('1.5')", "from decimal import Decimal"), ["assert f() == Decimal('1.5')"]),
    "an empty set": (gives("[set()]"), ["assert f() == [set()]"]),
    "sets": (gives("[1, 1]"), ["assert set(f(2)) == set([1])", "assert f() == [1] * 2"]),
    "an assert over two lines": (ADD, "assert add(1,\n    2) == 3\nassert add('a',\n  'b') == 'ab', 'no'"),
    "imports beside asserts": (gives("math.pi", "import math"), ["import math", "assert f() == math.pi"]),
    "two in one": (ADD, ["assert add(1, 2) == 3 and add(2, 2) == 4"]),
    "the value first": (ADD, ["assert 3 == add(1, 2)", "assert None is not add(1, 2)"]),
    "one of several": (ADD, ["assert add(1, 2) in (2, 3)", "assert add(1, 2) != 4"]),
    "calculated values": (gives("1_000_000_007"), ["assert f() == 10**9 + 7", "assert f() != 10**9"]),
    "closeness": (gives("5.01"), ["assert math.isclose(f(), 5, rel_tol=0.01)"]),
}
WRONG = {
    "other lines": (LINES, {"inputs": [["1", "2"]], "outputs": [["4"]]}),
    "another result": (ADD, BY_NAME | {"outputs": [4, 5]}),
    "the first of a list": (gives("1"), {"inputs": [[0]], "outputs": [[1, 2]], "fn_name": "f"}),
    "a number for a text": (gives("3"), {"inputs": [[0]], "outputs": ["3"], "fn_name": "f"}),
    "a text for a number": (gives("'3'"), {"inputs": [[0]], "outputs": [3], "fn_name": "f"}),
    "a large integer that is off by one": (gives("10_000_001"), ["assert f() == 10_000_000"]),
    "an integer that no float can hold": (gives("10 ** 400"), ["assert f() == 0.5"]),
    "not as close": (gives("5.01"), ["assert math.isclose(f(), 5)"]),
    "none of several": (ADD, ["assert add(1, 2) in (2, 4)"]),
    "no such function": ("class Solution: pass", BY_NAME),
    "1 where True itself is expected": (gives("1"), ["assert f() is True"]),
    "a number for NaN": (gives("0"), ["assert f() == float('nan')"]),
    "NaN for a number": (gives("float('nan')"), ["assert f() == 0", "assert f() == float('inf')"]),
    "a name that is not a number": (gives("type('X', (), {'__repr__': lambda _: 'f'})()"), ["assert f() == 'f'"]),
    "what is not true": (gives("[]"), ["assert f()"]),
    "an object for another value": (gives("object()"), ["assert f() != 3"]),
}
UNREADABLE = {
    "expected each test to have an input and an output": [{"input": "1"}],
    "expected tests of one function": [
        {"input": [1], "output": 1, "fn_name": "f"},
        {"input": [1], "output": 1, "fn_name": "g"},
    ],
    "expected the name of a function": BY_NAME | {"fn_name": "__import__('os')"},
    "expected as many outputs as inputs": {"inputs": ["1"]},
    "expected inputs and outputs, or asserts": [1],
    "the ground truth has no tests": ["import math"],
    "invalid syntax": ["assert f(1) ="],
}


@pytest.fixture(scope="module")
def sandbox():
    try:
        return open_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_program_passes_the_tests_of_a_data_set(sandbox, what):
    passed = run_tests(sandbox, *RIGHT[what], Limits(time_s=60.0))
    assert passed
    assert all(passed)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_program_does_not(sandbox, what):
    assert not any(run_tests(sandbox, *WRONG[what], Limits(time_s=60.0)))


@pytest.mark.parametrize("problem", UNREADABLE)
def test_what_cannot_be_read_is_an_error_that_says_what_was_expected(problem):
    with pytest.raises(ValueError, match=problem):
        run_tests(None, "x", UNREADABLE[problem], Limits())


def honest_programs():
    """Yield each program of honest_programs.txt by its name, with its tests in a form of their own."""
    for block in Path(__file__).with_name("honest_programs.txt").read_text(encoding="utf-8").split("### ")[1:]:
        name, _, rest = block.partition("\n")
        program, *tests = (part.strip() for part in rest.split("\n>>> "))
        if tests[0].startswith("assert"):
            yield name, program, tests
        elif "->" in tests[0]:
            both = [[eval(side) for side in test.split(" -> ")] for test in tests]
            yield name, program, {"inputs": [given for given, _ in both], "outputs": [output for _, output in both]}
        else:
            yield name, program, eval(tests[0], {"nan": math.nan})


def test_a_hundred_honest_programs_pass_their_tests(sandbox):
    programs = list(honest_programs())
    assert len(programs) >= 100
    passed = {name: run_tests(sandbox, program, tests, Limits(time_s=60.0)) for name, program, tests in programs}
    assert {name: each for name, each in passed.items() if not each or not all(each)} == {}
