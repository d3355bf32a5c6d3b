"""Functions in Python files of the user's: named as `path/to/file.py:function`, read without being run, and imported.

Owns: what such a name stands for, what the text alone tells of the function, and the import. Must not know: what the
function is for, torch, configs. Reward functions, policy losses and advantages of one's own come from here.

A file is run under a private module name that follows from its path and its text, registered in `sys.modules` (so that
dataclasses and pickle work in it). Its folder is put last on `sys.path`, so that it can import the files beside it,
and a `json.py` there is nobody's else; where it imports one whose name means another module, it is refused.
"""

from __future__ import annotations
import __future__

import ast
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from rallypoint.errors import UserCodeError

Value = bool | int | float | str | None
"""What a config passes to a function of the user's by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class UserFunction:
    """A function as the text that it was read from: a process that it is sent to runs that text, and needs no file."""

    path: str
    """Absolute; for messages, and for the files in its folder."""
    name: str
    text: bytes = dataclasses.field(repr=False)
    """The whole file."""
    parameters: Mapping[str, Value] = dataclasses.field(default_factory=dict[str, Value])
    """Passed by name with every call."""

    @classmethod
    def read(cls, spec: str, parameters: Mapping[str, Value]) -> UserFunction:
        """Read the file of `path/to/file.py:function`; nothing of it is run.

        Raises:
            UserCodeError: there is no such file, or it cannot be read.
        """
        path, name = split(spec)
        try:
            return cls(str(path), name, path.read_bytes(), dict(parameters))
        except OSError as error:
            raise UserCodeError(f"{path} cannot be read as Python: {error}") from None

    def load(self) -> Callable[..., object]:
        """Return the function; the file is run when that is asked for the first time in a process.

        Raises:
            UserCodeError: the file raises, or has no such function.
        """
        path = Path(self.path)
        names = vars(_run(path, self.text))
        if self.name not in names:
            raise UserCodeError(_no_such_function(path, self.name, [key for key, x in names.items() if callable(x)]))
        function: object = names[self.name]
        if not callable(function):
            raise UserCodeError(f"{path}:{self.name}: expected a function, found {type(function).__name__}")
        return function

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def __call__(self, *arguments: object) -> object:
        """Call the function, with its parameters added to the arguments.

        Raises:
            UserCodeError: it raises, whatever it may be; the part of the traceback that is the user's is shown.
        """
        function = self.load()
        try:
            return function(*arguments, **self.parameters)
        except (Exception, SystemExit) as error:
            shown = format_user_traceback(error, skip=lambda file: file != self.path)
            raise UserCodeError(f"{self} raised:\n{shown}") from error


def split(spec: str, *, shipped: Collection[str] = (), usual_name: str = "function") -> tuple[Path, str]:
    """Return the absolute path of the file and the name of the function.

    Args:
        spec: `path/to/file.py:function`.
        shipped: other names that could have been meant.
        usual_name: of a function, for an example.

    Raises:
        UserCodeError: it is no such name, or there is no such file.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name.isidentifier():
        near = difflib.get_close_matches(spec, shipped, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        example = f"{spec}:{usual_name}" if spec.endswith(".py") else f"path/to/file.py:{usual_name}"
        others = "".join(f"{one!r} or " for one in shipped)
        raise UserCodeError(f"expected {others}a function in a file ({example!r}), found {spec!r}{hint}")
    path = Path(file).expanduser()
    if path.is_dir():
        raise UserCodeError(f"{file} is a folder, expected a Python file")
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""
        raise UserCodeError(f"{file} does not exist (looked for {path.absolute()}){hint}")
    if path.suffix != ".py":
        raise UserCodeError(f"expected a file that ends in .py, found {file}")
    return path.absolute(), name


def written_signature(path: Path, name: str) -> inspect.Signature | None:
    """Return the signature of a function from the text of its file; None where the text alone does not tell.

    Nothing is run or imported, so that it is quick, and safe at any time. Annotations are texts, defaults are None.

    Raises:
        UserCodeError: the file cannot be read, or cannot have a function of that name.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserCodeError(f"{path} cannot be read as Python: {error}") from None
    found = dict(_top_level_names(tree.body))
    if "*" in found or "__getattr__" in found:
        return None
    if name not in found:
        raise UserCodeError(_no_such_function(path, name, list(found)))
    node = found[name]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return _signature(node.args)
    return None


def is_written_async(path: Path, name: str) -> bool:
    """Whether a file that has a function of a name says `async def`; nothing is run."""
    return isinstance(dict(_top_level_names(ast.parse(path.read_bytes()).body)).get(name), ast.AsyncFunctionDef)


def is_written_plain(path: Path, name: str, *, first: str) -> bool:
    """Whether a file says `def` of a name, not `async def`, with that first argument; nothing is run.

    Raises:
        UserCodeError: see `written_signature`.
    """
    signature = written_signature(path, name)
    return signature is not None and next(iter(signature.parameters), "") == first and not is_written_async(path, name)


def find_misfits(spec: str, argument: str, parameters: Mapping[str, Value]) -> Iterator[str]:
    """Yield what is wrong with a function that is called with one argument, and parameters by name.

    The text alone is read. Types are compared where an annotation is simple: `float`, `int | None`.

    Args:
        spec: `path/to/file.py:function`.
        argument: the argument's name, for messages.
        parameters: that a config has.
    """
    try:
        path, function = split(spec)
        signature = written_signature(path, function)
    except UserCodeError as error:
        yield str(error)
        return
    node = dict(_top_level_names(ast.parse(path.read_bytes()).body)).get(function)
    if isinstance(node, ast.ClassDef | ast.AsyncFunctionDef):
        found = "a class" if isinstance(node, ast.ClassDef) else "an async function"
        yield f"expected a plain function, found {found}"
        return
    if signature is None:
        return
    try:
        signature.bind(None, **parameters)
    except TypeError as error:
        taken, given = ", ".join(signature.parameters), ", ".join((argument, *parameters))
        yield f"it takes ({taken}), but is called with ({given}): {error}"
        return
    for name, value in parameters.items():
        parameter = signature.parameters.get(name)
        if parameter is not None and not _fits(value, str(parameter.annotation)):
            yield f"it has {name}: {parameter.annotation}, found {value!r}"


_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def _fits(value: Value, annotation: str) -> bool:
    """Whether a value is what an annotation says, as far as that is simple.

    >>> _fits(1, "float | None"), _fits("1", "float"), _fits(True, "int"), _fits("x", "Literal['x']")
    (True, False, False, True)
    """
    kinds = [kind.strip() for kind in annotation.strip("'\"").split("|")]
    if not all(kind in {*_TYPES, "None"} for kind in kinds):
        return True
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    return any(isinstance(value, _TYPES.get(kind, ())) for kind in kinds)


def own_signature(function: Callable[..., object]) -> inspect.Signature:
    """Return what a function takes; anything by name if it does not say."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # written in C, it does not say what it takes
        return inspect.signature(lambda **_anything: None)


def misfit(signature: inspect.Signature, num_arguments: int, expected: str) -> str | None:
    """Say why a function cannot be called with so many arguments; None if it can."""
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError as error:
        return f"{expected}; this one takes {signature}: {error}"
    return None


def format_user_traceback(error: BaseException, *, skip: Callable[[str], bool]) -> str:
    """Format an error without the leading frames whose file name is to be skipped."""
    frames = error.__traceback__
    while frames is not None and skip(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


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


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of an empty function with these arguments: annotations are their texts, defaults None."""
    empty = ast.parse("def function(): pass")
    (function,) = empty.body
    assert isinstance(function, ast.FunctionDef), "it was just written"
    function.args = arguments
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    names: dict[str, Callable[..., object]] = {}
    # With postponed annotations, which are not evaluated.
    code = compile(ast.fix_missing_locations(empty), "<signature>", "exec", __future__.annotations.compiler_flag)
    exec(code, names)
    return inspect.signature(names["function"])


def _run(path: Path, text: bytes) -> ModuleType:
    """Return the module of a file's text, run if this process has not run it yet."""
    digest = hashlib.sha256(str(path).encode() + b"\0" + text).hexdigest()[:12]
    name = f"rallypoint_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        code = compile(text, str(path), "exec")
        _check_siblings(path, text)
        exec(code, vars(module))
    except UserCodeError:
        del sys.modules[name]
        raise
    except BaseException as error:  # it is the user's code: it may raise anything
        del sys.modules[name]
        shown = format_user_traceback(error, skip=lambda file: file != str(path))
        raise UserCodeError(f"{path} raised while it was imported:\n{shown}") from error
    return module


def _check_siblings(path: Path, text: bytes) -> None:
    """Refuse a file that imports another one of its folder whose name is also that of a module elsewhere."""
    for node in ast.walk(ast.parse(text)):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            imported = [node.module or ""]
        for name in {one.partition(".")[0] for one in imported} - sys.stdlib_module_names:
            modules = (path.with_name(f"{name}.py"), path.parent / name / "__init__.py")
            beside = [one.resolve() for one in modules if one.is_file()]
            known = sys.modules.get(name)
            spec = importlib.util.find_spec(name) if known is None else known.__spec__
            taken = spec.origin if spec else None
            if beside and taken is not None and Path(taken).resolve() not in beside:
                raise UserCodeError(
                    f"{path} imports {name}, of which there are two: {beside[0]}, and {taken}, which Python takes; "
                    "rename the first"
                )
