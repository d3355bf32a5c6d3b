"""The reward function: one that ships with the package, or any function in a file of the user's.

Owns: finding, loading and checking the function. Must not know: batches, tensors; what a score means. Every process
that scores imports this, so it needs the standard library only.

A file is run under a private module name that follows from its path, registered in `sys.modules` (so that
dataclasses and pickle work in it). Its folder is put first on `sys.path`, as `python file.py` would do, so
that it can import the files beside it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from rallypoint.errors import RewardError

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every function is called with, by name."""
TOKEN_PARAMETERS = ("token_ids", "tokens")
"""What a function is called with besides if it names them."""
_SIGNATURE = f"({', '.join(PARAMETERS[:-1])}, extra_info=None), and {' and '.join(TOKEN_PARAMETERS)} if it wants them"


class RewardFunction(Protocol):
    """Scores one response; it is called with all arguments by name, those of TOKEN_PARAMETERS included that it names.

    Returns a number, an object with a number under "score" (other numbers in it become metrics), or a list
    with one score for each token of the response; or, if it is async, one of these after it was awaited.
    """

    def __call__(
        self,
        *,
        data_source: str,
        solution_str: str,
        ground_truth: Any,  # whatever the user's data hold
        extra_info: Any,
    ) -> object:
        """Return the score, or the scores."""
        ...


def no_function(*, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:  # noqa: ARG001
    """Score every response 0: what is added to a reward model's score where there is no function."""
    return 0.0


def _digits() -> RewardFunction:
    from rallypoint.data.digits import score_digits  # its package brings numpy along

    return score_digits


SHIPPED: dict[str, Callable[[], RewardFunction]] = {"digits": _digits}


def check_reward_spec(spec: str) -> str | None:
    """Say what is wrong with a reward's name, from the file's text alone; None when nothing can be seen.

    Nothing is run or imported, so that it is quick, and safe at any time.
    """
    if spec in SHIPPED:
        return None
    parts = _split(spec)
    if isinstance(parts, str):
        return parts
    path, name = parts
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{path} cannot be read as Python: {error}"
    return _find_written_problem(path, name, tree, spec)


def _find_written_problem(path: Path, name: str, tree: ast.Module, spec: str) -> str | None:
    found = dict(_top_level_names(tree.body))
    if "*" in found or "__getattr__" in found:
        return None
    if name not in found:
        return _no_such_function(path, name, list(found))
    node = found[name]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return _find_signature_problem(spec, _written_signature(node.args))
    return None


def load_reward(spec: str) -> RewardFunction:
    """Return the reward function that `spec` names: "digits", or "path/to/file.py:function".

    A file is imported into this process, where it may do anything, or never end: `child.py` starts a process for it.

    Raises:
        RewardError: there is no such file or function, the file raises while it is imported, or the function
            cannot be called with (data_source, solution_str, ground_truth, extra_info).
    """
    if spec in SHIPPED:
        return SHIPPED[spec]()
    parts = _split(spec)
    if isinstance(parts, str):
        raise RewardError(parts)
    path, name = parts
    names = vars(_import_file(path))
    if name not in names:
        raise RewardError(_no_such_function(path, name, [key for key, value in names.items() if callable(value)]))
    function: object = names[name]
    if not callable(function):
        raise RewardError(f"{spec}: expected a function, found {type(function).__name__}")
    problem = _find_signature_problem(spec, _own_signature(function))
    if problem is not None:
        raise RewardError(problem)
    return cast("RewardFunction", function)


def wanted_tokens(function: Callable[..., object]) -> tuple[str, ...]:
    """Return which of the arguments about tokens a function names.

    >>> wanted_tokens(lambda solution_str, tokens, **others: 0.0)
    ('tokens',)
    """
    return _named_tokens(_own_signature(function))


def format_user_traceback(error: BaseException, *, skip: Callable[[str], bool]) -> str:
    """Format an error without the leading frames whose file name is to be skipped."""
    frames = error.__traceback__
    while frames is not None and skip(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _split(spec: str) -> tuple[Path, str] | str:
    """Return file and function name, or what is wrong with them."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name.isidentifier():
        near = difflib.get_close_matches(spec, SHIPPED, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        example = f"{spec}:compute_score" if spec.endswith(".py") else "path/to/rewards.py:compute_score"
        shipped = ", ".join(map(repr, SHIPPED))
        return f"expected {shipped} or a function in a file ({example!r}), found {spec!r}{hint}"
    path = Path(file).expanduser()
    if path.is_dir():
        return f"{file} is a folder, expected a Python file"
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""
        return f"{file} does not exist (looked for {path.absolute()}){hint}"
    if path.suffix != ".py":
        return f"expected a file that ends in .py, found {file}"
    return path.absolute(), name


def _no_such_function(path: Path, name: str, names: list[str]) -> str:
    public = [known for known in names if not known.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(public)[:8]) or 'no function at all'}"
    return f"{path} has no function {name!r}; {hint}"


def _top_level_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield every name that a module may define, with its statement; `*` stands for a star import."""
    for statement in body:
        is_simple = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in [statement] if is_simple else ast.walk(statement):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name, statement
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    for alias in aliases:
                        yield alias.asname or alias.name, statement
                case ast.Name(id=name, ctx=ast.Store()):
                    yield name, statement
                case _:
                    pass


def _written_signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature that `inspect.signature` would give, were the function defined."""
    kinds = inspect.Parameter
    positional = [(name, kinds.POSITIONAL_ONLY) for name in arguments.posonlyargs]
    positional += [(name, kinds.POSITIONAL_OR_KEYWORD) for name in arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(argument.arg, kind, default=kinds.empty if index < num_required else None)
        for index, (argument, kind) in enumerate(positional)
    ]
    if arguments.vararg is not None:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _own_signature(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # written in C, it does not say what it takes
        return inspect.signature(lambda **_anything: None)


def _named_tokens(signature: inspect.Signature) -> tuple[str, ...]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature.parameters
    return tuple(name for name in TOKEN_PARAMETERS if name in parameters and parameters[name].kind in by_name)


def _find_signature_problem(spec: str, signature: inspect.Signature) -> str | None:
    try:
        signature.bind(**dict.fromkeys([*PARAMETERS, *_named_tokens(signature)]))
    except TypeError as error:
        return f"{spec} takes ({', '.join(signature.parameters)}), expected {_SIGNATURE}: {error}"
    return None


def _import_file(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"rallypoint_reward_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # it is the user's code: it may raise anything
        del sys.modules[name]
        shown = format_user_traceback(error, skip=lambda file: file != str(path))
        raise RewardError(f"{path} raised while it was imported:\n{shown}") from error
    return module
