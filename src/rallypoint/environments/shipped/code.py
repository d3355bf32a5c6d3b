"""A reward for programs: what a response's code does in a sandbox, compared with what it should have done.

Owns: the forms in which a row has its tests. Invariant: expected results never enter the sandbox, and are compared out
here with what the program wrote, as plain values. So nothing that a program does to itself, such as an `__eq__` that is
always true, a patched `unittest` or an early exit, can make it right.

| ground truth | a test |
|---|---|
| {"inputs": ["1 2"], "outputs": ["3"]} | the program reads the input and writes the output |
| {"inputs": [["1", "2"]], "outputs": [["3"]]} | the same, as lists of lines |
| {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"} | add(1, 2), or Solution().add(1, 2), gives 3 |
| [{"input": "1 2", "output": "3"}, ...] | the same, a test at a time |
| ["assert add(1, 2) == 3"], or the same as one text | the left side gives what is written on the right |
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rallypoint.environments.sandbox import Limits, Sandbox, open_sandbox
from rallypoint.environments.shipped.answers import block
from rallypoint.environments.shipped.asserts import Test, Wanted, read_asserts

_RUN = """
import collections, contextlib, json, sys, types

def written(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, range, collections.deque, type({}.keys()), type({}.values()), type({}.items()))):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{written(one)}, " for one in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(map(written, value)) + "}" if value else "set()"
    if type(value).__name__ in ("Decimal", "Fraction"):
        value = int(value) if value == int(value) else float(value)
    if isinstance(value, bytearray):
        value = bytes(value)
    for kind in (bool, int, float, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    return repr(value)

def named(name):
    return getattr(module, name) if hasattr(module, name) else getattr(module.Solution(), name)

def results(calls):
    found = []
    for call in calls:
        try:
            found.append(written(call()))
        except BaseException:
            found.append(None)
    return found

module = types.ModuleType("program")
sys.modules["program"] = module
exec(PRELUDE, vars(module))
with contextlib.suppress(SystemExit):  # it may end with exit(): its functions are there
    exec(compile(PROGRAM, "program.py", "exec", dont_inherit=True), vars(module))
vars(module)["_named"] = named
calls = eval(CALLS, vars(module))
sys.stdout.flush()
sys.stdout.write("\\n" + MARK + json.dumps(results(calls)))
sys.stdout.flush()
"""
"""What runs a program of functions, not as `__main__`, and each test's left side: its value, as Python writes it."""
_SOLUTION = """
from typing import *
import bisect, collections, functools, heapq, itertools, math
from collections import *
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import *
from itertools import *
"""
"""What problems that ask for a `class Solution` give to it."""


def code(
    data_source: str,  # noqa: ARG001 - every reward is given the same four
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    time_s: float = 5.0,
    total_s: float = 30.0,
    memory_mib: int = 512,
    partial: bool = False,
    url: str | None = None,
    key: str | None = None,
) -> dict[str, float]:
    """Run the last fenced block of a response (or all of it) against tests; 1 if it passes all of them.

    Args:
        data_source: ignored.
        solution_str: the response.
        ground_truth: the tests, see above; an object, a list, or the text of one.
        extra_info: ignored.
        time_s: CPU time for each input, or for all calls of a program of functions: scores do not depend on what else
            the machine does. A program that takes longer has failed the tests that are left, too, as has one that
            waits for 10 s and four times as long.
        total_s: CPU time for all inputs; tests that have not begun by then have failed. Less than reward.timeout_s, or
            a slow program would be a failure of the reward instead of a wrong answer.
        memory_mib: address space of the program.
        partial: makes the score the share of tests that passed.
        url: of a service that speaks SandboxFusion's protocol, instead of a sandbox of this machine.
        key: environment variable that holds the service's API key.
    """
    limits = Limits(time_s=time_s, memory_mib=memory_mib)
    passed = run_tests(open_sandbox(url, key), solution_str, ground_truth, limits, total_s)
    share = sum(passed) / len(passed)
    return {"score": share if partial else float(share == 1.0), "passed": share}


def run_tests(
    sandbox: Sandbox, response: str, ground_truth: Any, limits: Limits, total_s: float = math.inf
) -> list[bool]:
    """Return which tests the program of a response passes; see above.

    Raises:
        ValueError: the ground truth has no tests.
        SandboxError: the sandbox failed.
    """
    program, tests = block(response), _read(ground_truth)
    if isinstance(tests, FunctionTests):
        return _calls(sandbox, program, tests, limits)
    passed, began, cpu_s = [False] * len(tests), time.monotonic(), 0.0
    for place, (given, output) in enumerate(tests):
        ran = sandbox.run(program, stdin=given, limits=_with_room(limits, len(output.encode(errors="replace"))))
        passed[place] = ran.status == "ok" and same_output(ran.stdout, output)
        cpu_s += ran.cpu_s
        wall_s = time.monotonic() - began
        is_asleep = wall_s > total_s and cpu_s < wall_s / 10  # on a busy machine it would have had more
        if ran.status == "timeout" or cpu_s > total_s or is_asleep:
            break
    return passed


def _with_room(limits: Limits, num_bytes: int) -> Limits:
    """Return limits by which a program may write twice what is expected, besides what they allow."""
    return dataclasses.replace(limits, output_kib=limits.output_kib + (2 * num_bytes >> 10))


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionTests:
    """Tests of functions."""

    imports: str
    """What the calls are written with."""
    tests: Sequence[Test]


def _calls(sandbox: Sandbox, program: str, calls: FunctionTests, limits: Limits) -> list[bool]:
    """Return which calls gave what was expected; all of them are made by one program."""
    mark, num_tests = secrets.token_hex(8), len(calls.tests)
    prelude = (_SOLUTION if "class Solution" in program else "") + calls.imports
    written = "[" + ", ".join(f"lambda: {test.call}" for test in calls.tests) + "]"
    given = {"PROGRAM": program, "PRELUDE": prelude, "CALLS": written, "MARK": mark}
    head = "".join(f"{name} = {text!r}\n" for name, text in given.items())
    num_bytes = len(json.dumps([repr(test.wanted.value) for test in calls.tests]))
    ran = sandbox.run(head + _RUN, limits=_with_room(limits, num_bytes))
    try:
        results: object = json.loads(ran.stdout.rpartition(mark)[2])
    except (ValueError, RecursionError):
        results = None
    if not isinstance(results, list) or len(cast("list[object]", results)) != num_tests:
        return [False] * num_tests
    return [_is(text, test.wanted) for text, test in zip(cast("list[object]", results), calls.tests, strict=True)]


def _is(written: object, wanted: Wanted) -> bool:
    """Whether what a program wrote of a value is what was expected."""
    if not isinstance(written, str):
        return False
    try:
        return wanted.allows(ast.literal_eval(_Floats().visit(ast.parse(written, mode="eval"))))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


class _Floats(ast.NodeTransformer):
    """Reads the floats that have a name: Python writes them as `inf` and `nan`."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def same_output(found: str, expected: str) -> bool:
    r"""Whether two outputs are the same but for white space, and for rounding where a number with a point is expected.

    >>> same_output("1 \n 0.30000001\n\n", "1\n0.3"), same_output("12", "1 2"), same_output("3.0", "3")
    (True, False, False)
    """
    lines, wanted = found.split("\n"), expected.split("\n")
    rows = [[line.split() for line in text if line.strip()] for text in (lines, wanted)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    pairs = [
        (one, other) for first, second in zip(*rows, strict=True) for one, other in zip(first, second, strict=True)
    ]
    return all(one == other or ("." in other and _close(one, other)) for one, other in pairs)


def _close(found: str, expected: str) -> bool:
    try:
        return math.isclose(float(found), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _read(tests: Any) -> FunctionTests | list[tuple[str, str]]:
    """Return a row's tests: calls with what they should give, or standard inputs and outputs.

    Raises:
        ValueError: they are none, or cannot be read.
    """
    if isinstance(tests, str):
        tests = json.loads(tests) if tests.lstrip().startswith(("{", "[", '"')) else [tests]
    if isinstance(tests, str):  # the JSON text of a JSON text
        tests = json.loads(tests)
    if isinstance(tests, list) and any(isinstance(one, dict) for one in cast("list[object]", tests)):
        return _columns(_table(cast("list[object]", tests)))
    if isinstance(tests, dict):
        found = cast("dict[str, Any]", tests)
        return _columns(_table([found]) if "input" in found else found)
    lines = cast("Sequence[object]", tests)
    if not isinstance(tests, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"code: expected inputs and outputs, or asserts, found {str(tests)[:200]!r}")
    imports, asserts = read_asserts(*cast("Sequence[str]", lines))
    if not asserts:
        raise ValueError("code: the ground truth has no tests")
    return FunctionTests(imports, asserts)


def _table(tests: Sequence[object]) -> dict[str, Any]:
    """Return tests that are given one at a time as inputs and outputs."""
    rows = [cast("Mapping[str, Any]", one) for one in tests if isinstance(one, dict)]
    if len(rows) != len(tests) or not all("input" in row and "output" in row for row in rows):
        raise ValueError("code: expected each test to have an input and an output")
    names = {row.get("fn_name") or (row.get("metadata") or {}).get("func_name") for row in rows}
    if len(names) > 1:
        raise ValueError(f"code: expected tests of one function, found {sorted(map(str, names))}")
    return {
        "inputs": [row["input"] for row in rows],
        "outputs": [row["output"] for row in rows],
        "fn_name": names.pop(),
    }


def _columns(tests: Mapping[str, Any]) -> FunctionTests | list[tuple[str, str]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not inputs or not outputs or len(inputs) != len(outputs):
        raise ValueError("code: expected as many outputs as inputs, and at least one")
    if not (name := tests.get("fn_name")):
        return [(_text(given), _text(output)) for given, output in zip(inputs, outputs, strict=True)]
    if not str(name).isidentifier():
        raise ValueError(f"code: expected the name of a function, found {name!r}")
    are_wrapped = all(isinstance(output, list) and len(cast("list[object]", output)) == 1 for output in outputs)
    found: list[Test] = []
    for given, output in zip(inputs, outputs, strict=True):
        is_text = isinstance(given, str)
        arguments = [json.loads(line) for line in given.splitlines()] if is_text else list(given)
        wanted = Wanted([output, output[0]], "in") if are_wrapped else Wanted(_value(output) if is_text else output)
        found.append(Test(f"_named({name!r})(*{arguments!r})", wanted))
    return FunctionTests("", found)


def _text(given: Any) -> str:
    r"""Return a standard input or output, which may be given as a list of lines.

    >>> _text("1 2"), _text(["1", [2, 3]]), _text(4)
    ('1 2', '1\n2 3', '4')
    """
    if isinstance(given, list):
        lines = cast("list[object]", given)
        return "\n".join(
            " ".join(map(str, cast("list[object]", line))) if isinstance(line, list) else str(line).removesuffix("\n")
            for line in lines
        )
    return str(given)


def _value(output: Any) -> object:
    """Return what a call should give, where arguments are given as JSON: the value, or its text."""
    if not isinstance(output, str):
        return output
    try:
        return json.loads(output)
    except ValueError:
        return output
