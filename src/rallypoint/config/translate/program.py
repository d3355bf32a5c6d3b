"""A training script in Python, read as text: what it gives TRL's trainer, as far as that needs no program to say.

Owns: constants, f-strings and arithmetic of them, `argparse` with its defaults, branches that can be decided, and what
is made of models, data sets, adapters and arguments. Must not know: what any argument means here. Nothing is run or
imported. A value that only a program can say is an `Unknown`, which keeps how it is written; every one that reaches the
trainer is named.

>>> text = '''
... n = 4
... args = GRPOConfig(f"runs/{n}", num_generations=n * 2, learning_rate=chosen())
... GRPOTrainer("m", [f], args=args).train()
... '''
>>> found = read_program(text, {})
>>> found.trainers[0].name, found.trainers[0].given["args"].given
('GRPOTrainer', {'output_dir': 'runs/4', 'num_generations': 8, 'learning_rate': Unknown('chosen()')})
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from rallypoint.config.other_projects import other_projects

_MOST = 64
"""Largest exponent of a power that is computed."""
_PARSERS = ("TrlParser", "HfArgumentParser")
_DTYPE = re.compile(r"torch\.(b?float\d+|half)")
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_SIGNS: dict[type[ast.AST], Callable[[Any], object]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_BUILTINS: dict[str, Callable[..., object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "min": min,
    "max": max,
    "round": round,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "os.path.join": os.path.join,
    "Path": str,
}
_SAME_DATA = ("shuffle", "with_format", "to_iterable_dataset")
"""Methods of a data set whose result has the same rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only a program can say."""

    text: str
    """As it is written, on one line."""

    def __repr__(self) -> str:
        return f"Unknown({self.text!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """What a call makes: arguments, an adapter, a model, a data set, a trainer."""

    name: str
    """Name of the class or the function; `from_pretrained` of any class."""
    given: dict[str, object]
    """Its arguments by name, those that are set later included."""
    line: int
    changed: list[str] = dataclasses.field(default_factory=list[str])
    """What was done to a data set afterwards, as it is written."""


@dataclasses.dataclass(slots=True)
class Program:
    """What a script makes."""

    trainers: list[Made] = dataclasses.field(default_factory=list[Made])
    configs: list[Made] = dataclasses.field(default_factory=list[Made])
    """Arguments of trainers, for a script without one."""
    functions: set[str] = dataclasses.field(default_factory=set[str])
    """Functions that it has."""


def read_program(text: str, flags: Mapping[str, object]) -> Program:
    """Read a script: its own lines first, then the bodies of its functions, each in its order.

    Args:
        text: of the script.
        flags: of its command line, for `argparse` and TRL's parser.

    Raises:
        SyntaxError: it is not Python.
    """
    tree, program = ast.parse(text), Program()
    scope = _Scope(program, flags, {})
    scope.read(tree.body)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    program.functions |= {node.name for node in functions}
    for node in functions:
        inner = _Scope(program, flags, dict(scope.names))
        places = node.args.posonlyargs + node.args.args
        usual = dict(zip(places[::-1], node.args.defaults[::-1], strict=False))
        usual |= {one: value for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value}
        for one in (*places, *node.args.kwonlyargs):
            inner.names[one.arg] = inner.value(usual[one]) if one in usual else Unknown(one.arg)
        inner.read(node.body)
    return program


class _Scope:
    """The variables of a script, or of one of its functions."""

    def __init__(self, program: Program, flags: Mapping[str, object], names: dict[str, object]) -> None:
        self._program, self._flags, self.names = program, flags, names

    def read(self, body: Sequence[ast.stmt]) -> None:
        """Go through statements in their order; functions and classes are left out."""
        for node in body:
            match node:
                case ast.Assign(targets=targets, value=value):
                    found = self.value(value)
                    for target in targets:
                        self._assign(target, found)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, self.value(value))
                case ast.AugAssign(target=target):
                    self._assign(target, Unknown(ast.unparse(node)))
                case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                    self.value(value)
                case ast.If():
                    self._branch(node)
                case ast.With(body=inner) | ast.Try(body=inner):
                    self.read(inner)
                case ast.For() | ast.While():
                    self._blur(node.body)
                    self.read(node.body)
                    self._blur(node.body)
                case _:
                    pass

    def _branch(self, node: ast.If) -> None:
        """Take the branch that is decided; of one that is not, what it assigns is not known."""
        test = self.value(node.test)
        if ast.unparse(node.test).startswith("__name__"):
            test = True
        if not isinstance(test, Unknown | Made):
            self.read(node.body if test else node.orelse)
            return
        self.read(node.body)
        self.read(node.orelse)
        self._blur([*node.body, *node.orelse], f" if {ast.unparse(node.test)}")

    def _blur(self, body: Sequence[ast.stmt], why: str = " in a loop") -> None:
        """Forget what statements assign."""
        for inner in body:
            for node in ast.walk(inner):
                targets = node.targets if isinstance(node, ast.Assign) else []
                for target in targets:
                    self._assign(target, Unknown(f"{ast.unparse(target)}{why}"))

    def _assign(self, target: ast.expr, value: object) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if isinstance(made := self.names.get(name), Made):
                    made.given[attribute] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                several = cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
                known = len(several) == len(targets)
                for place, one in enumerate(targets):
                    self._assign(one, several[place] if known else Unknown(ast.unparse(one)))
            case _:
                pass

    def value(self, node: ast.expr) -> object:
        """Return what an expression is."""
        try:
            return self._value(node)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
            return Unknown(" ".join(ast.unparse(node).split()))

    def _value(self, node: ast.expr) -> object:
        """Return what is written as it is, or made of parts, of which some may be unknown; or else what is computed."""
        found: object
        match node:
            case ast.Constant(value=value):
                found = value
            case ast.Name(id=name):
                found = self.names.get(name, Unknown(name))
            case ast.List(elts=several) | ast.Set(elts=several):
                found = [self.value(one) for one in several]
            case ast.Tuple(elts=several):
                found = tuple(self.value(one) for one in several)
            case ast.Dict(keys=keys, values=values):
                named = zip(keys, values, strict=True)
                found = {str(self._known(key)): self.value(value) for key, value in named if key is not None}
            case _:
                found = self._computed(node)
        return found

    def _computed(self, node: ast.expr) -> object:
        """Return what follows from other values, all of which must be known."""
        found: object = Unknown(ast.unparse(node))
        match node:
            case ast.JoinedStr(values=values):
                found = "".join(str(self._known(one)) for one in values)
            case ast.FormattedValue(value=inner, format_spec=None, conversion=-1):
                found = self._known(inner)
            case ast.UnaryOp(op=op, operand=operand):
                found = _SIGNS[type(op)](self._known(operand))
            case ast.BinOp(left=left, op=op, right=right):
                found = _combined(op, self._known(left), self._known(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                found = _OPERATORS[type(op)](self._known(left), self._known(right))
            case ast.IfExp(test=test, body=body, orelse=other):
                found = self.value(body if self._known(test) else other)
            case ast.Subscript(value=inner, slice=place):
                found = self._item(self._known(inner), self._known(place))
            case ast.Attribute():
                found = self._attribute(node)
            case ast.Call():
                found = self._call(node)
            case _:
                pass
        return found

    def _known(self, node: ast.expr) -> Any:
        found = self._value(node)
        if any(unknown_in(found)) and not isinstance(found, Made):
            raise LookupError(ast.unparse(node))
        return found

    def _item(self, inner: Any, place: Any) -> object:
        if isinstance(inner, Made):
            if inner.name != "load_dataset" or not isinstance(place, str):
                raise LookupError(place)
            return dataclasses.replace(inner, given={**inner.given, "split": place})
        return inner[place]

    def _attribute(self, node: ast.Attribute) -> object:
        written = ast.unparse(node)
        if _DTYPE.fullmatch(written):
            return node.attr
        inner = self.value(node.value)
        return inner.given.get(node.attr, Unknown(written)) if isinstance(inner, Made) else Unknown(written)

    def _call(self, node: ast.Call) -> object:
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Made):
            return self._method(owner, name, node)
        if called in {"os.environ.get", "os.getenv"}:
            wanted, usual = str(self._known(node.args[0])), [*map(self.value, node.args[1:])]
            return os.environ.get(wanted, usual[0] if usual else None)
        if called in _BUILTINS:
            keywords = {str(one.arg): self._known(one.value) for one in node.keywords}
            return _BUILTINS[called](*map(self._known, node.args), **keywords)
        return self._made(name, node)

    def _method(self, owner: Made, name: str, node: ast.Call) -> object:
        """Return what a method of something that was made returns."""
        if owner.name == "ArgumentParser":
            return self._parsed(owner, name, node)
        if owner.name in _PARSERS:
            kinds = cast("Sequence[str]", owner.given["kinds"])
            return tuple(Made(one, dict(self._flags), node.lineno) for one in kinds)
        if owner.name == "load_dataset":
            return dataclasses.replace(owner, changed=[*owner.changed, *([] if name in _SAME_DATA else [name])])
        return Unknown(ast.unparse(node.func))

    def _made(self, name: str, node: ast.Call) -> object:
        if name in _PARSERS:
            kinds = node.args[0] if node.args else ast.Tuple([])
            several = kinds.elts if isinstance(kinds, ast.Tuple | ast.List) else [kinds]
            return Made(name, {"kinds": tuple(ast.unparse(one) for one in several)}, node.lineno)
        if name == "get_peft_config":
            return None  # its arguments are flags
        is_kept = name.endswith(("Config", "Trainer")) or name in {"from_pretrained", "load_dataset", "ArgumentParser"}
        if not is_kept:
            raise LookupError(name)
        places = other_projects().trl.positional.get(name, ("output_dir",) if name.endswith("Config") else ())
        given: dict[str, object] = {}
        for place, one in enumerate(node.args):
            given[places[place] if place < len(places) else f"argument {place + 1}"] = self.value(one)
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                given[keyword.arg] = value
            elif isinstance(value, dict):
                given |= cast("dict[str, object]", value)
            else:
                given["**"] = Unknown(ast.unparse(keyword.value))
        made = Made(name, given, node.lineno)
        if name.endswith("Trainer"):
            self._program.trainers.append(made)
        elif name.endswith("Config") and name != "LoraConfig":
            self._program.configs.append(made)
        return made

    def _parsed(self, parser: Made, name: str, node: ast.Call) -> object:
        """Declare an argument of the command line, or return the values of all."""
        if name == "parse_args":
            return Made("Namespace", {key: self._flags.get(key, usual) for key, usual in parser.given.items()}, 0)
        if name == "add_argument":
            keywords = {one.arg: self.value(one.value) for one in node.keywords}
            flags = [str(self._known(one)) for one in node.args]
            key = next((one for one in flags if one.startswith("--")), flags[0]).lstrip("-").replace("-", "_")
            switch = {"store_true": False, "store_false": True}.get(str(keywords.get("action")))
            must = keywords.get("required") or not flags[0].startswith("-")
            usual = Unknown(f"--{key}, which must be given on the command line") if must else switch
            parser.given[str(keywords.get("dest", key))] = keywords.get("default", usual)
        return Unknown(ast.unparse(node))


def _combined(op: ast.operator, left: Any, right: Any) -> object:
    """Return what two values make, unless that is large."""
    if isinstance(op, ast.Pow):
        if not isinstance(left, int | float) or abs(right) > _MOST:
            raise ValueError("a large power")
        return left**right
    if isinstance(op, ast.Div) and isinstance(left, str):
        return os.path.join(left, right)  # of paths
    if isinstance(op, ast.Mult) and not all(isinstance(one, int | float) for one in (left, right)):
        raise ValueError("a text or a list many times")
    return _OPERATORS[type(op)](left, right)


def unknown_in(value: object) -> Iterator[str]:
    """Yield how each value is written that a value consists of and that only a program can say."""
    if isinstance(value, Unknown):
        yield value.text
    elif isinstance(value, Made):
        yield f"{value.name}(...)"
    elif isinstance(value, list | tuple):
        for one in cast("Sequence[object]", value):
            yield from unknown_in(one)
    elif isinstance(value, dict):
        for one in cast("Mapping[str, object]", value).values():
            yield from unknown_in(one)
