"""Tests that are written as `assert`: a call that a program makes, and what its result must be, judged outside.

Owns: which asserts can be judged outside. Must not know: programs, sandboxes. Invariants: what is expected is never
part of the call. What a program has to return is not only true or false, unless it is a function of its own that
returns it: a program can replace `isinstance` and `math.isclose`, or return an object that is equal to everything.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import math
import operator
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal, cast

Relation = Literal["==", "!=", "is", "in", "close"]


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the result of a call must be."""

    value: object
    relation: Relation = "=="
    """To the value: equal, another, equal and of its type, one of its elements, or as close as `math.isclose` says."""
    rel_tol: float = 0.0
    abs_tol: float = 0.0

    def allows(self, found: object) -> bool:
        """Whether a result is right."""
        if self.relation == "in":
            return any(same_value(found, one) for one in cast("Sequence[object]", self.value))
        if self.relation == "close":
            return _close(found, self.value, self.rel_tol, self.abs_tol)
        if self.relation == "is" and type(found) is not type(self.value):
            return False
        return same_value(found, self.value) == (self.relation != "!=")


@dataclasses.dataclass(frozen=True, slots=True)
class Test:
    """A call, as Python writes it, and what it must give."""

    call: str
    wanted: Wanted


def same_value(found: object, expected: object) -> bool:
    """Whether two plain values are equal: tuples are lists, floats may differ by rounding, and NaN is NaN.

    >>> same_value((1, [2.0000000001]), [1, [2]]), same_value(True, 1), same_value({"a": 1}, {"a": 2})
    (True, True, False)
    >>> same_value(10_000_001, 10_000_000), same_value("3", 3), same_value(10**400, 0.5)
    (False, False, False)
    """
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        first, second = cast("Sequence[object]", found), cast("Sequence[object]", expected)
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(expected, dict) and isinstance(found, dict):
        one, other = cast("dict[object, object]", found), cast("dict[object, object]", expected)
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in other)
    if isinstance(expected, int | float) and isinstance(found, int | float):
        are_nan = found != found and expected != expected
        return found == expected or are_nan or _is_rounded(found, expected)
    return type(found) is type(expected) and found == expected


def _is_rounded(found: float, expected: float) -> bool:
    if isinstance(expected, int):
        return isinstance(found, float) and _close(found, expected, 0.0, 1e-6)
    return _close(found, expected, 1e-6, 1e-9)


def _close(found: object, expected: object, rel_tol: float, abs_tol: float) -> bool:
    if isinstance(found, bool) or not isinstance(found, int | float) or not isinstance(expected, int | float):
        return False
    try:
        return math.isclose(found, expected, rel_tol=rel_tol, abs_tol=abs_tol)
    except OverflowError:  # an int that no float can hold
        return False


def read_asserts(*texts: str) -> tuple[str, list[Test]]:
    """Return the imports of asserts, which may be given in several texts, and the tests.

    >>> _, tests = read_asserts("assert add(1, -2) == -1, 'text'; assert is_odd(3)")
    >>> [(test.call, test.wanted.value) for test in tests]
    [('add(1, -2)', -1), ('not not is_odd(3)', True)]

    Raises:
        ValueError: something of it cannot be judged outside.
    """
    text = "\n".join(textwrap.dedent(one).strip() for one in texts)
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"code: {text[:200]!r}: {error}") from None
    imports = [ast.unparse(node) for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [node for node in module.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(imports), [test for node in others for test in _tests(node)]


def _tests(node: ast.stmt) -> list[Test]:
    problem = "expected imports and `assert CALL == VALUE` only"
    if isinstance(node, ast.Assert):
        try:
            return [_test(one) for one in _parts(node.test)]
        except ValueError as error:
            problem = str(error)
    raise ValueError(f"code: {ast.unparse(node)[:200]!r}: {problem}; what a program compares itself cannot be trusted")


def _parts(test: ast.expr) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _test(test: ast.expr) -> Test:
    match test:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _comparison(left, op, right)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call):
            return Test(f"not {_call(call, False)}", Wanted(True))
        case ast.Call(func=ast.Name(id="isclose") | ast.Attribute(value=ast.Name(id="math"), attr="isclose")):
            return _isclose(test)
        case ast.Call():
            return Test(f"not not {_call(test, True)}", Wanted(True))  # true is whatever an assert takes for it
        case _:
            raise ValueError("expected `assert CALL == VALUE` with a plain value")


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Test:
    match op:
        case ast.In():
            values = _elements(plain(right))
            truth = next((one for one in values if isinstance(one, bool)), None)
            return Test(_call(left, truth), Wanted(values, "in"))
        case ast.Eq() | ast.Is() | ast.NotEq() | ast.IsNot():
            relation: Relation = "==" if isinstance(op, ast.Eq) else "is" if isinstance(op, ast.Is) else "!="
        case _:
            raise ValueError("expected `assert CALL == VALUE` with a plain value")
    call, other = (right, left) if _is_plain(left) else (left, right)
    value = plain(other)
    if isinstance(op, ast.IsNot) and value is None:
        return Test(f"{_call(call, value)} is not None", Wanted(True))  # whatever it is
    return Test(_call(call, value), Wanted(value, relation))


def _isclose(test: ast.Call) -> Test:
    """Read `math.isclose(CALL, NUMBER)`, which is compared outside, with its tolerances."""
    tolerances = {keyword.arg: _number(plain(keyword.value)) for keyword in test.keywords}
    if len(test.args) != 2 or not tolerances.keys() <= {"rel_tol", "abs_tol"}:
        raise ValueError("expected `math.isclose(CALL, NUMBER)` with rel_tol and abs_tol at most")
    call, other = test.args[::-1] if _is_plain(test.args[0]) else test.args
    value, rel_tol, abs_tol = _number(plain(other)), tolerances.get("rel_tol", 1e-9), tolerances.get("abs_tol", 0.0)
    return Test(_call(call, value), Wanted(value, "close", rel_tol, abs_tol))


_METHODS = {name for kind in (str, list, dict, set, bytes, float) for name in dir(kind)}


def _call(node: ast.expr, value: object) -> str:
    """Return a left side as Python writes it, if its value cannot be one of a comparison that the program makes.

    Raises:
        ValueError: the program would compare, or calculate with what is expected.
    """
    problem = None if any(map(_is_program_call, ast.walk(node))) else "expected a call of the program's"
    for one in ast.walk(node):
        if isinstance(one, ast.Compare | ast.BoolOp | ast.IfExp | ast.NamedExpr | ast.Not):
            problem = "expected `assert CALL == VALUE` without a comparison in CALL"
        elif isinstance(one, ast.BinOp | ast.comprehension) and any(map(_is_program_call, ast.walk(one))):
            problem = "expected `assert CALL == VALUE` without arithmetic or a loop on the result"
    if problem is not None:
        raise ValueError(problem)
    _check_own(node, value)
    return ast.unparse(node)


def _check_own(node: ast.expr, value: object) -> None:
    """Refuse what is true or false by a function that the program can replace, or by a method of its result."""
    if isinstance(node, ast.List | ast.Tuple) and isinstance(value, list | tuple):
        for element, one in zip(node.elts, cast("Sequence[object]", value), strict=False):
            _check_own(element, one)
    if not isinstance(value, bool):
        return
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)] if isinstance(node, ast.Call) else []
    if any(_is_program_call(part) for argument in arguments for part in ast.walk(argument)):
        raise ValueError("expected `assert CALL` without a call among its arguments")
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in vars(builtins):
            raise ValueError(f"expected `assert CALL` of a function of the program's, not of {name}")
        case ast.Call(func=ast.Attribute(value=ast.expr() as value, attr=name)) if name in _METHODS:
            if any(_is_program_call(part) for part in ast.walk(value)):
                raise ValueError(f"expected `assert CALL` of a function of the program's, not of its result's {name}")
        case _:
            pass


def _is_program_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and not _is_plain(node)


def _is_plain(node: ast.expr) -> bool:
    try:
        plain(node)
    except ValueError:
        return False
    return True


def _number(value: object) -> float:
    match value:
        case int() | float():
            return value
        case _:
            raise ValueError("expected a number")


def _elements(value: object = ()) -> list[object]:
    match value:
        case str() | list() | tuple() | set() | dict():
            return list(cast("Sequence[object]", value))
        case _:
            raise ValueError("expected a list of plain values")


def _counted(value: object = ()) -> dict[object, object]:
    if isinstance(value, dict):
        return cast("dict[object, object]", value)
    return dict(Counter(_elements(value)))


def _mapping(value: object = ()) -> dict[object, object]:
    if isinstance(value, dict):
        return cast("dict[object, object]", value)
    return dict(cast("list[tuple[object, object]]", _elements(value)))


def _exact(value: object) -> float:
    number = Decimal(value) if isinstance(value, str) else Fraction(_number(value))
    return int(number) if number == int(number) else float(number)


_CALLS: dict[str, Callable[..., object]] = {
    "set": lambda *values: set(_elements(*values)),
    "frozenset": lambda *values: set(_elements(*values)),
    "list": _elements,
    "tuple": lambda *values: tuple(_elements(*values)),
    "deque": _elements,
    "sorted": lambda values: sorted(cast("list[str]", _elements(values))),
    "dict": _mapping,
    "OrderedDict": _mapping,
    "Counter": _counted,
    "range": lambda *bounds: list(range(*cast("list[int]", bounds))),
    "float": lambda value: float(value) if isinstance(value, str) else float(_number(value)),
    "int": lambda value: int(value) if isinstance(value, str) else int(_number(value)),
    "complex": lambda *parts: complex(*map(_number, parts)),
    "Decimal": _exact,
    "Fraction": lambda above, below=1: _exact(Fraction(int(_number(above)), int(_number(below)))),
    "sqrt": lambda value: math.sqrt(_number(value)),
}
"""What a plain value may be written with. A frozenset is a set, as a tuple is a list; a Decimal is a number."""
_NUMBERS = {"inf": math.inf, "pi": math.pi, "e": math.e, "tau": math.tau}
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def plain(node: ast.expr) -> object:
    """Return a value that is written without a program.

    >>> [plain(ast.parse(text, mode="eval").body) for text in ("set([1])", "10**9 + 7", "-float('inf')", "[0] * 3")]
    [{1}, 1000000007, -inf, [0, 0, 0]]

    Raises:
        ValueError: a program would have to be asked.
    """
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return _plain(node)
    except (TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{ast.unparse(node)[:100]} is not a plain value ({error})") from None


def _plain(node: ast.expr) -> object:
    found: object
    match node:
        case ast.Constant(value=found):
            pass
        case ast.List(elts=elements):
            found = [_plain(one) for one in elements]
        case ast.Tuple(elts=elements):
            found = tuple(_plain(one) for one in elements)
        case ast.Set(elts=elements):
            found = {_plain(one) for one in elements}
        case ast.Dict(keys=keys, values=values):
            found = {_plain(key): _plain(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_number(_plain(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            found = _calculated(_plain(left), type(op), _plain(right))
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _NUMBERS:
            found = _NUMBERS[name]
        case ast.Call(
            func=ast.Name(id=name)
            | ast.Attribute(value=ast.Name(id="math" | "collections" | "decimal" | "fractions"), attr=name),
            args=args,
            keywords=[],
        ) if name in _CALLS:
            found = _CALLS[name](*map(_plain, args))
        case _:
            raise ValueError(f"{ast.unparse(node)[:100]} is not a plain value")
    return found


def _calculated(left: object, op: type[ast.operator], right: object) -> object:
    """Return what two numbers, or a text or list and a number of times, come to; nothing of more than a megabyte."""
    if isinstance(left, str | list) and op is ast.Mult and isinstance(right, int) and len(left) * right <= 10**6:
        return cast("list[object]", left) * right
    if isinstance(left, str) and isinstance(right, str) and op is ast.Add:
        return left + right
    if isinstance(left, list) and isinstance(right, list) and op is ast.Add:
        return [*cast("list[object]", left), *cast("list[object]", right)]
    if op is ast.Pow and abs(_number(right)) > 10_000:
        raise ValueError("a number is too large")
    return _OPERATORS[op](_number(left), _number(right))
