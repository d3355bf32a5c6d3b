"""A reward for programs: what a response's code does in a sandbox, compared with what it should have done.

Owns: what a row's tests are. Invariant: expected results never enter the sandbox, and are compared out here with what
the program wrote, as plain values. So nothing that a program does to itself, such as an `__eq__` that is always
true, a patched `unittest` or an early exit, can make it right.

| ground truth | a test |
|---|---|
| {"inputs": ["1 2"], "outputs": ["3"]} | the program reads the input and writes the output |
| {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"} | add(1, 2) gives 3 |
| ["assert add(1, 2) == 3"], or the same as one text | the left side gives what is written on the right |
"""

from __future__ import annotations

import ast
import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, cast

from rallypoint.environments.sandbox import Limits, Sandbox, open_sandbox
from rallypoint.environments.shipped.form import block

_RUN = """

import json as _json, sys as _sys
def _results(calls):
    results = []
    for call in calls:
        try:
            results.append(repr(call()))
        except BaseException as error:
            results.append(None)
    return results
_sys.stdout.flush()
_answer = _json.dumps(_results([{calls}]))
_sys.stdout.write("\\n{mark}" + _answer)
_sys.stdout.flush()
"""
"""What is added to a program of functions: each test's left side, called, as Python writes its value."""


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
        time_s: for each input, or for all calls of a program of functions. A program that takes longer has failed the
            tests that are left, too.
        total_s: for all inputs; tests that have not begun by then have failed. Less than reward.timeout_s, or a slow
            program would be a failure of the reward instead of a wrong answer.
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
    if isinstance(tests, list):
        return _calls(sandbox, program, tests, limits)
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    if name := tests.get("fn_name"):
        calls = [(f"{name}(*{_arguments(given)!r})", _expected(output)) for given, output in pairs]
        return _calls(sandbox, program, calls, limits)
    passed, latest = [False] * len(pairs), time.monotonic() + total_s
    for place, (given, output) in enumerate(pairs):
        ran = sandbox.run(program, stdin=given, limits=limits)
        passed[place] = ran.status == "ok" and same_output(ran.stdout, output)
        if ran.status == "timeout" or time.monotonic() > latest:
            break
    return passed


def _calls(sandbox: Sandbox, program: str, tests: Sequence[tuple[str, object]], limits: Limits) -> list[bool]:
    """Return which calls gave what was expected; all of them are made by one program."""
    mark = secrets.token_hex(8)
    calls = ", ".join(f"lambda: {call}" for call, _ in tests)
    name = "" if "from __future__" in program else '__name__ = "program"\n'  # so that its main() is not run
    ran = sandbox.run(name + program + _RUN.format(calls=calls, mark=mark), limits=limits)
    try:
        results: object = json.loads(ran.stdout.rpartition(mark)[2])
    except ValueError:
        results = None
    if not isinstance(results, list) or len(cast("list[object]", results)) != len(tests):
        return [False] * len(tests)
    return [_is(written, expected) for written, (_, expected) in zip(cast("list[object]", results), tests, strict=True)]


def _is(written: object, expected: object) -> bool:
    """Whether what a program wrote of a value is what was expected."""
    if not isinstance(written, str):
        return False
    try:
        return same_value(ast.literal_eval(written), expected)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


def same_value(found: object, expected: object) -> bool:
    """Whether two plain values are the same: tuples are lists, and numbers may differ by rounding.

    >>> same_value((1, [2.0000000001]), [1, [2]]), same_value(True, 1), same_value({"a": 1}, {"a": 2})
    (True, False, False)
    """
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        first, second = cast("Sequence[object]", found), cast("Sequence[object]", expected)
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(expected, dict) and isinstance(found, dict):
        one, other = cast("dict[object, object]", found), cast("dict[object, object]", expected)
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in other)
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, float | int) and isinstance(found, float | int):
        return found == expected or math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
    return type(found) is type(expected) and found == expected


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


def _read(tests: Any) -> list[tuple[str, object]] | dict[str, Any]:
    """Return a row's tests: calls with what they should give, or inputs and outputs.

    Raises:
        ValueError: they are none.
    """
    if isinstance(tests, str):
        tests = json.loads(tests) if tests.lstrip().startswith(("{", "[")) else tests.strip().splitlines()
    if isinstance(tests, dict):
        if not tests.get("inputs") or len(tests["inputs"]) != len(tests.get("outputs", ())):
            raise ValueError("code: expected as many outputs as inputs, and at least one")
        return cast("dict[str, Any]", tests)
    asserts = [line for line in cast("Sequence[str]", tests) if line.strip()]
    if not asserts:
        raise ValueError("code: the ground truth has no tests")
    return [_assertion(line) for line in asserts]


def _assertion(line: str) -> tuple[str, object]:
    """Return the two sides of `assert CALL == VALUE`.

    >>> _assertion("assert add(1, -2) == -1, 'text'"), _assertion("assert is_odd(3)")
    (('add(1, -2)', -1), ('is_odd(3)', True))
    """
    try:
        match ast.parse(line.strip()).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]))]:
                return ast.unparse(left), ast.literal_eval(right)
            case [ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=call))]:
                return ast.unparse(call), False
            case [ast.Assert(test=ast.Call() as call)]:
                return ast.unparse(call), True
            case _:
                problem = "expected `assert CALL == VALUE` with a plain value"
    except (SyntaxError, ValueError) as error:
        problem = str(error)
    raise ValueError(f"code: {line.strip()[:200]!r}: {problem}; what a program compares itself cannot be trusted")


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a call: a list, or a JSON value a line."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)


def _expected(output: Any) -> object:
    """Return what a call should give: the value, or the JSON text of one."""
    if not isinstance(output, str):
        return output
    try:
        return json.loads(output)
    except ValueError:
        return output
