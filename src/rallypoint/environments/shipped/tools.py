"""The tools that ship: a calculator, Python in the sandbox, a search in passages, those of MCP servers; and the user's.

Owns: what a name in a config stands for, and what is wrong with it. Must not know: episodes, how a call was spelled.

    Tools(calculator, python(time_s=2), search("passages.jsonl"))          # in an episode of one's own
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.environments.reward import find_stranger
from rallypoint.environments.sandbox import Limits, open_sandbox
from rallypoint.environments.shipped.answers import block
from rallypoint.environments.shipped.mcp_servers import mcp, shortened
from rallypoint.environments.shipped.passages import Passages
from rallypoint.environments.tools import DescribedTool, Tool, ToolError
from rallypoint.errors import EnvironmentFailedError, SandboxError, UserCodeError
from rallypoint.user_code import UserFunction, own_signature, split, written_signature

_MAX_EXPRESSION = 200
"""Characters of an expression."""
_MAX_BITS = 4096
"""Size of a power, which nothing else could bound."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Calculate an expression of numbers.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as (2 + 3) * 4
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ToolError(f"the expression has {len(expression)} characters, expected {_MAX_EXPRESSION} at most")
    try:
        found = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression!r}: expected numbers with + - * / // % ** and parentheses") from None
    except (ArithmeticError, TypeError) as error:
        raise ToolError(str(error)) from None
    if isinstance(found, float) and not math.isfinite(found):
        raise ToolError("the result is too large")
    return f"{found:.12g}" if isinstance(found, float) else str(found)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=kind, operand=inner) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(inner))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(left), _value(right))
        case _:
            raise ValueError(node)


def _power(base: float, exponent: float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * base.bit_length() > _MAX_BITS:
        raise OverflowError(f"a power of more than {_MAX_BITS} bits is too large")
    found: Any = base**exponent
    if isinstance(found, complex):
        raise TypeError("the result is not a real number")
    return found


_NOTEBOOK = """
import ast, linecache, sys
linecache.cache["program.py"] = (len(CODE), None, CODE.splitlines(True), "program.py")
names = {"__name__": "__main__"}
try:
    tree = ast.parse(CODE, "program.py")
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, "program.py", "exec"), names)
    exec(compile(ast.Interactive(last), "program.py", "single"), names)
except Exception as error:
    import traceback
    frames = None if isinstance(error, SyntaxError) else error.__traceback__.tb_next
    traceback.print_exception(error.with_traceback(frames))
    sys.exit(1)
"""
"""What runs a program as a cell of a notebook: the value of a last line that is an expression is shown."""


def python(
    *,
    time_s: float = 5.0,
    memory_mib: int = 512,
    output_chars: int = 2000,
    url: str | None = None,
    key: str | None = None,
) -> Tool:
    """Return a tool that runs programs in the sandbox. Each begins anew: nothing is kept between calls.

    Args:
        time_s: CPU time of a program; one that waits is ended after 10 s and four times as long.
        memory_mib: its address space.
        output_chars: of what it prints; the middle of more is left out.
        url: of a service that speaks SandboxFusion's protocol, instead of a sandbox of this machine.
        key: environment variable that holds the service's API key.

    Raises:
        SandboxError: there is no sandbox, with what to install.
    """
    sandbox = open_sandbox(url, key)
    limits = Limits(time_s=time_s, memory_mib=memory_mib)

    def python(code: str) -> str:
        """Run a Python program, and return what it prints and the value of its last line.

        It has the standard library, and no network. Nothing is kept between calls: each begins anew.

        Args:
            code: the program
        """
        try:
            ran = sandbox.run(f"CODE = {block(code)!r}\n{_NOTEBOOK}", limits=limits)
        except SandboxError as error:
            raise EnvironmentFailedError(str(error)) from error
        said = shortened("\n".join(filter(None, (ran.stdout.strip(), ran.stderr.strip()))), output_chars)
        if ran.status == "timeout":
            raise ToolError(f"the program was ended after {time_s:g} s of CPU time\n{said}".strip())
        if ran.status == "failed":
            raise ToolError(said or f"the program ended with status {ran.exit_status}")
        return said or "the program printed nothing"

    return python


def search(corpus: str | Path, *, top_k: int = 3, output_chars: int = 4000) -> Tool:
    """Return a tool that searches a file of passages by their words (BM25).

    Args:
        corpus: .jsonl, .parquet or .csv with columns `text` and `title`; see `Passages.of`. Its index is made now, if
            there is none yet.
        top_k: passages that a search returns.
        output_chars: most characters of all passages together.

    Raises:
        DataError: the file cannot be read.
    """
    passages = Passages.of(corpus)

    def search(query: str) -> str:
        """Search passages of text, and return those that match best.

        Args:
            query: words to look for
        """
        found = passages.search(query, top_k)
        texts = (f"[{number}] {title}\n{text}" for number, (title, text) in enumerate(found, 1))
        return shortened("\n\n".join(texts), output_chars) or "nothing was found"

    return search


SHIPPED_TOOLS: dict[str, Callable[..., Tool | list[DescribedTool]]] = {
    "calculator": lambda: calculator,
    "mcp": mcp,
    "python": python,
    "search": search,
}
"""What makes each tool that ships, or several, by its name."""


def check_tool(spec: str, parameters: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the name of a tool or its parameters; nothing of the user's is run.

    >>> check_tool("pyton", {})
    "expected 'calculator' or 'mcp' or 'python' or 'search' or a function in a file ('path/to/file.py:tool'), found 'pyton'; did you mean 'python'?"
    >>> check_tool("search", {"corpus": "a.jsonl", "topk": 3})
    "search has no parameter 'topk'; did you mean 'top_k'?"
    """  # noqa: E501
    if spec not in SHIPPED_TOOLS:
        try:
            written_signature(*split(spec, shipped=SHIPPED_TOOLS, usual_name="tool"))
        except UserCodeError as error:
            return str(error)
        return f"{spec} is a function of yours, which takes no parameters of a config" if parameters else None
    declared = own_signature(SHIPPED_TOOLS[spec]).parameters
    if problem := find_stranger(spec, parameters, declared):
        return problem
    if spec == "mcp" and ("command" in parameters) == ("url" in parameters):
        return "mcp needs command, which starts a server, or url, at which one listens; expected one of them"
    lacking = [name for name, one in declared.items() if one.default is one.empty and name not in parameters]
    return f"{spec} needs the parameter {lacking[0]!r}" if lacking else None


def open_tools(spec: str, parameters: Mapping[str, Any]) -> list[Tool | DescribedTool]:
    """Return the tool that a config names; for an MCP server all of its.

    Raises:
        UserCodeError: the user's file raises, or has no such function; a server cannot be reached.
        SandboxError, DataError: one that ships lacks what it needs.
    """
    found = SHIPPED_TOOLS[spec](**parameters) if spec in SHIPPED_TOOLS else UserFunction.read(spec, {}).load()
    return [*found] if isinstance(found, list) else [found]
