"""Where the values of a config come from: YAML files that build on each other, then dotted overrides.

Owns: reading, merging, and the origin of every value. Must not know: what any key means.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml

from rallypoint.config.fields import nested
from rallypoint.config.tree import SHORT, named_own, of_other_names
from rallypoint.errors import ConfigError

COMMAND_LINE = "command line"
_MOST_VALUES, _MOST_SHOWN = 100_000, 40


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A merged tree of plain values, and for each dotted key where it was set."""

    name: str
    values: dict[str, Any]
    origins: dict[str, str]


class _Loader(yaml.SafeLoader):
    """YAML with numbers as people write them.

    Plain YAML 1.1 reads `3e-4` as text, `010` as 8 and `1:30` as 90, and makes dates of names. Here the first is a
    number and the others are text.
    """


class _NotYAMLError(ValueError):
    """A text is not YAML; says why in one line."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][\d_]*)",
    "tag:yaml.org,2002:float": r"[-+]?((\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+|\d[\d_]*\.\d*|\.\d+|\.(inf|Inf))|\.(nan|NaN)",
}
_NOT_OURS = {*_NUMBERS, "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_OURS]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    for _letter in "-+0123456789.":
        _Loader.yaml_implicit_resolvers.setdefault(_letter, []).append((_tag, re.compile(f"^(?:{_pattern})$")))


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that the loader above, or any other, would take for something else."""


_Dumper.yaml_implicit_resolvers = {
    letter: [*_Loader.yaml_implicit_resolvers.get(letter, []), *resolvers]
    for letter, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return the text from which `read` makes these values again."""
    dump = cast("Callable[..., str]", yaml.dump)  # pyright: ignore[reportUnknownMemberType]
    return dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    folder = Path(str(files("rallypoint"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def describe(path: Path) -> str:
    """Return the comment at the top of a recipe, as one line."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def find(name: str) -> Path:
    """Return the YAML file that a recipe name, a file name or a run folder stands for.

    Raises:
        ConfigError: there is none; the nearest shipped names are suggested.
    """
    path, shipped = Path(name), shipped_recipes()
    if path.is_dir() and (path / "config.yaml").is_file():
        return path / "config.yaml"
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise ConfigError((f"{name}: no such file (looked in {Path.cwd()})",))
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise ConfigError((f"{name} is a folder without config.yaml, so no run; name a recipe or a .yaml file",))
    if len(path.parts) > 1:
        said = f"{name}: no such folder (looked in {Path.cwd()}); expected a run, a recipe or a .yaml file"
        raise ConfigError((said,))
    swapped = [one for one in shipped if sorted(one) == sorted(name)]
    near = swapped or difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"shipped recipes: {', '.join(shipped)}"
    raise ConfigError((f"{name!r} is neither a shipped recipe nor a .yaml file nor a run folder; {hint}",))


def read(name: str, overrides: Sequence[str] = ()) -> Source:
    """Read a recipe with everything it builds on, then apply overrides such as `actor.optimizer.lr=3e-4`.

    Raises:
        ConfigError: a file cannot be read or an override cannot be parsed; all such problems at once.
    """
    path = find(name)
    source = _read_file(path, seen=())
    values, origins, problems = source.values, source.origins, list[str]()
    parts: list[tuple[dict[str, Any], dict[str, str]]] = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"\w[\w-]*(\.\w[\w-]*)*", dotted):
            problems.append(f"{override!r}: expected key=value, such as trainer.num_steps=20")
            continue
        try:
            node = _parse(text)
        except _NotYAMLError as error:
            problems.append(f"{override!r}: the value is not valid YAML: {error}")
            continue
        if node is None:
            problems.append(f"{override!r}: no value after `=`; write {dotted}=null to switch it off")
            continue
        dotted = _in_full(dotted, node)
        part, part_origins = _plain(node, COMMAND_LINE, dotted, problems)
        parts.append((nested({dotted: part}), part_origins))
    if problems:
        raise ConfigError(tuple(problems))
    together: dict[str, Any] = {}
    for part, _ in parts:
        _merge(together, part, {}, "")
    _forget(values, named_own(together), origins)
    for part, part_origins in parts:
        _merge(values, named_own(part), origins, "")
        origins |= part_origins
    name = path.absolute().parent.name if path.name == "config.yaml" else path.stem
    return Source(name, values, origins)


def origin_of(origins: Mapping[str, str], dotted: str) -> str | None:
    """Return where a key was set: itself, something inside it, or the nearest section around it."""
    inside = [place for name, place in origins.items() if name.startswith(f"{dotted}.")]
    while dotted and dotted not in origins and not inside:
        dotted = dotted.rpartition(".")[0]
    return origins.get(dotted) or next(iter(inside), None)


def _read_file(path: Path, seen: tuple[Path, ...]) -> Source:
    """Read one file and, below it, the recipe that its key `base` names."""
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError((f"{path}: `base` leads back to itself: {chain}",))
    try:
        node = _parse(path.read_text(encoding="utf-8"))
    except _NotYAMLError as error:
        raise ConfigError((f"{path}:{error.line}: not valid YAML: {error}",)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError((f"{path}: cannot be read: {error}",)) from None
    if node is None:
        raise ConfigError((f"{path}: the file is empty; expected at least `recipe:` and `reward:`",))
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError((f"{path}: expected keys and values at the top, found a {_kind(node)}",))
    problems: list[str] = []
    values, origins = _plain(node, path.name, "", problems)
    if problems:
        raise ConfigError(tuple(problems))
    values = named_own(values)
    base, origin = values.pop("base", None), origins.pop("base", path.name)
    if base is None:
        return Source(path.stem, values, origins)
    below = _read_file(_find_base(base, path.parent, origin), (*seen, path.resolve()))
    _forget(below.values, values, below.origins)
    _merge(below.values, values, below.origins, "")
    return Source(path.stem, below.values, below.origins | origins)


def _find_base(base: object, folder: Path, origin: str) -> Path:
    if not isinstance(base, str):
        raise ConfigError((f"base={base} ({origin}): expected a shipped recipe or a .yaml file beside this one",))
    beside = folder / base
    try:
        return beside if beside.is_file() else find(base)
    except ConfigError as error:
        raise ConfigError(tuple(f"base={base!r} ({origin}): {problem}" for problem in error.problems)) from None


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> yaml.Node | None:
    """Return YAML's tree of nodes, which know their lines; None for a text without a value.

    A process reads its recipe, and what that is based on, several times.
    """
    compose = cast("Callable[..., yaml.Node | None]", yaml.compose)  # pyright: ignore[reportUnknownMemberType]
    try:
        node = compose(text, Loader=_Loader)
        num_values = 0 if node is None else _num_values(node, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(_one_line(part) for part in (error.context, error.problem) if part)
        raise _NotYAMLError(mark.line + 1 if mark else 1, reason) from None
    except yaml.YAMLError as error:
        raise _NotYAMLError(1, _one_line(error)) from None
    except RecursionError:
        raise _NotYAMLError(1, "it is nested too deeply") from None
    if num_values > _MOST_VALUES:
        raise _NotYAMLError(1, f"its aliases make {num_values:,} values of it, expected at most {_MOST_VALUES:,}")
    return node


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node stands for, where those that aliases repeat count every time."""
    if id(node) not in known:
        known[id(node)] = 1  # also for one inside itself, which is an error of its own
        inside = cast("list[Any]", node.value) if isinstance(node, yaml.CollectionNode) else []
        parts = itertools.chain.from_iterable(inside) if isinstance(node, yaml.MappingNode) else inside
        known[id(node)] += sum(_num_values(part, known) for part in parts)
    return known[id(node)]


def _plain(
    node: yaml.Node, file: str, prefix: str, problems: list[str], above: tuple[yaml.Node, ...] = ()
) -> tuple[Any, dict[str, str]]:
    """Return a node as plain values, and `file:line` for every leaf."""

    def place(of: yaml.Node) -> str:
        return file if file == COMMAND_LINE else f"{file}:{of.start_mark.line + 1}"

    if node in above:
        problems.append(f"{prefix} ({place(node)}) contains itself")
        return None, {}
    if not isinstance(node, yaml.MappingNode):
        return _leaf(node, prefix, place(node), problems), {prefix: place(node)}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {prefix: place(node)} if not node.value else {}
    for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{prefix or 'top level'} ({place(key_node)}): expected a name, found a {_kind(key_node)}")
            continue
        name = str(key_node.value)
        dotted = f"{prefix}.{name}" if prefix else name
        if name in values:
            problems.append(f"{dotted} is set twice: in {origin_of(origins, dotted)} and in {place(key_node)}")
        full = _in_full(dotted, value_node)
        value, inner = _plain(value_node, file, full, problems, (*above, node))
        values[name] = value if full == dotted else {SHORT[dotted]: value}
        origins |= inner
    return values, origins


def _in_full(dotted: str, node: yaml.Node) -> str:
    """Return the key that a value is for, where a section may be given as one of its keys."""
    is_value = not isinstance(node, yaml.MappingNode) and node.tag != "tag:yaml.org,2002:null"
    return f"{dotted}.{SHORT[dotted]}" if dotted in SHORT and is_value else dotted


def _leaf(node: yaml.Node, dotted: str, place: str, problems: list[str]) -> Any:
    loader = _Loader("")
    construct = cast("Callable[..., Any]", loader.construct_object)  # pyright: ignore[reportUnknownMemberType]
    try:
        return construct(node, deep=True)
    except yaml.MarkedYAMLError as error:
        problems.append(f"{dotted} ({place}): {_one_line(error.problem)}")
        return None
    except ValueError as error:
        shown = f"={node.value[:_MOST_SHOWN]!r}" if isinstance(node, yaml.ScalarNode) else ""
        problems.append(f"{dotted}{shown} ({place}): {error}")
        return None


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "section"
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"


def _forget(into: dict[str, Any], over: Mapping[str, Any], origins: dict[str, str]) -> None:
    """Remove the keys of sections whose `name` is replaced by `over`: they belong to the old name."""
    for section, name in of_other_names(into, over):
        into[section] = {key: value for key, value in into[section].items() if key != name}
        for stale in [k for k in origins if k == f"{section}.{name}" or k.startswith(f"{section}.{name}.")]:
            del origins[stale]


def _merge(into: dict[str, Any], over: Mapping[str, Any], origins: dict[str, str], prefix: str) -> None:
    """Lay `over` onto `into`; a value that replaces a section takes the section's origins away."""
    for name, value in over.items():
        dotted = f"{prefix}{name}"
        before = into.get(name)
        if isinstance(before, dict) and isinstance(value, dict) and value:
            _merge(cast("dict[str, Any]", before), cast("dict[str, Any]", value), origins, f"{dotted}.")
            continue
        if not (isinstance(before, dict) and value == {}):
            into[name] = value
            for stale in [k for k in origins if k == dotted or k.startswith(f"{dotted}.")]:
                del origins[stale]


def _one_line(error: object) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
