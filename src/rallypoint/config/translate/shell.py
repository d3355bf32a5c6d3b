"""Command lines and scripts as a shell would read them, as far as that needs no shell.

Owns: variables of the script with `$X`, `${X}`, `${X:-usual}` and `$((X + 1))`. What a program prints, `$(...)`, is not
known. Nothing is run.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping

UNKNOWN = "$(...)"
"""Stands in a value for what only a program can say."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(?!\()(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?[-=]([^${}]*))?\}|([A-Za-z_]\w*))")
_ARRAY = re.compile(r"\s*[A-Za-z_]\w*\+?=\((.*\S)?\s*$")
_PRINTED = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
_OPENS, _CLOSES = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: int.__floordiv__,
    ast.Mod: int.__mod__,
}


@dataclasses.dataclass(slots=True)
class ShellScript:
    """What a command line or a script says."""

    environment: Mapping[str, str]
    """Variables around it."""
    words: list[str] = dataclasses.field(default_factory=list[str])
    """All words in their order, without quotes, with values in place of variables."""
    variables: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Those that it sets."""
    used: set[str] = dataclasses.field(default_factory=set[str])
    """Names of the variables that it reads."""
    doubtful: set[str] = dataclasses.field(default_factory=set[str])
    """Names of those that have several values in the branches of an `if`; the first is taken."""
    depth: int = 0
    """Number of branches that the line stands in."""

    def expanded(self, text: str) -> str:
        """Put in values of variables; a variable without one stays as it is written.

        >>> script = ShellScript({}, variables={"n": "2"})
        >>> script.expanded("${m:-$n} $n $m ${m:-}")
        '2 2 $m '
        """

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[3]
            self.used.add(name)
            known = self.variables.get(name, self.environment.get(name))
            known = known or (known if found[2] is None else found[2])
            return found[0] if known is None else known

        for _ in range(20):  # from the inside: the usual value may be that of another variable
            before, text = text, _REFERENCE.sub(value, text)
            if text == before:
                break
        return text

    def computed(self, text: str) -> str:
        """Put in the results of `$((...))`.

        >>> ShellScript({}, variables={"n": "2"}).computed("$(( (n + 1) * 1024 )) $((m))")
        '3072 $(...)'
        """
        while (start := text.find("$((")) >= 0:
            depth, end = 0, start + 1
            for end in range(start + 1, len(text)):
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                if depth == 0:
                    break
            text = text[:start] + self._result(text[start + 3 : end - 1]) + text[end + 1 :]
        return text

    def assign(self, name: str, value: str) -> None:
        """Set a variable; which branch is taken cannot be known, so that the first value stays."""
        if self.depth and name in self.variables:
            self.doubtful.add(name)
        else:
            self.variables[name] = value

    def _result(self, formula: str) -> str:
        try:
            return str(self._number(ast.parse(self.expanded(formula).strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return UNKNOWN

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return int(self.expanded(f"${name}"))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._number(left), self._number(right))
            case _:
                raise ValueError(ast.dump(node))


def read_script(text: str, environment: Mapping[str, str]) -> ShellScript:
    """Read a command line or a script.

    >>> read_script("LR=${LR:-1e-6}; run optim.lr=${LR} --n $((2 * 4))  # so it is", {}).words
    ['LR=1e-6;', 'run', 'optim.lr=1e-6', '--n', '8']
    """
    script = ShellScript(environment)
    for line in text.replace("\\\n", " ").splitlines():
        words = _split(_PRINTED.sub(UNKNOWN, script.computed(line)))
        for word in words:
            script.depth += (word in _OPENS) - (word.rstrip(";") in _CLOSES)
            word = script.expanded(word)  # noqa: PLW2901
            script.words.append(word)
            if found := _ASSIGNMENT.fullmatch(word):
                script.assign(found[1], found[2].rstrip(";"))
    return script


def _split(line: str) -> list[str]:
    if array := _ARRAY.match(line):
        line = (array[1] or "").removesuffix(")")
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that ends on another line
        return line.split()
