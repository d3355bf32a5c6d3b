"""Where the values of a config come from: YAML files that build on each other, then dotted overrides.

Owns: reading, merging, and the origin of every value. Must not know: what any key means.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml

from rallypoint.errors import ConfigError

COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A merged tree of plain values, and for each dotted key where it was set."""

    name: str
    values: dict[str, Any]
    origins: dict[str, str]


class _Loader(yaml.SafeLoader):
    """YAML with the floats that people write (`3e-4`); plain YAML 1.1 reads them as text."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)|[-+]?(\d[\d_]*\.\d*|\.\d+)|[-+]?\.(inf|Inf)|\.(nan|NaN)"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^({_FLOAT.pattern})$"), list("-+0123456789."))


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
    near = difflib.get_close_matches(name, shipped, n=1)
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
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", dotted):
            problems.append(f"{override!r}: expected key=value, such as trainer.num_steps=20")
            continue
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.YAMLError as error:
            problems.append(f"{override!r}: the value is not valid YAML ({_one_line(error)})")
            continue
        if node is None:
            problems.append(f"{override!r}: no value after `=`; write {dotted}=null to switch it off")
            continue
        part, part_origins = _plain(node, COMMAND_LINE, "", problems)
        for name_part in reversed(dotted.split(".")):
            part = {name_part: part}
        _merge(values, cast("dict[str, Any]", part), origins, "")
        origins |= {f"{dotted}.{inner}" if inner else dotted: origin for inner, origin in part_origins.items()}
    if problems:
        raise ConfigError(tuple(problems))
    return Source(path.parent.name if path.name == "config.yaml" else path.stem, values, origins)


def _read_file(path: Path, seen: tuple[Path, ...]) -> Source:
    """Read one file and, below it, the recipe that its key `base` names."""
    if path in seen:
        raise ConfigError((f"{path}: `base` leads back to itself: {' -> '.join(p.name for p in (*seen, path))}",))
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError((f"{path}: not valid YAML: {_one_line(error)}",)) from None
    if node is None:
        raise ConfigError((f"{path}: the file is empty; expected at least `recipe:` and `reward:`",))
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError((f"{path}: expected keys and values at the top, found a {node.id}",))
    problems: list[str] = []
    values, origins = _plain(node, path.name, "", problems)
    if problems:
        raise ConfigError(tuple(problems))
    base = values.pop("base", None)
    origins.pop("base", None)
    if base is None:
        return Source(path.stem, values, origins)
    beside = path.parent / str(base)
    below = _read_file(beside if beside.is_file() else find(str(base)), (*seen, path))
    _merge(below.values, values, below.origins, "")
    return Source(path.stem, below.values, below.origins | origins)


def _plain(node: yaml.Node, file: str, prefix: str, problems: list[str]) -> tuple[Any, dict[str, str]]:
    """Return a node as plain values, and `file:line` for every leaf."""
    origin = file if file == COMMAND_LINE else f"{file}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        loader = _Loader("")
        try:
            return loader.construct_object(node, deep=True), {prefix: origin}  # pyright: ignore[reportUnknownMemberType]
        except yaml.YAMLError as error:
            problems.append(f"{prefix or 'value'} ({origin}): {_one_line(error)}")
            return None, {prefix: origin}
        finally:
            loader.dispose()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {prefix: origin} if not node.value else {}
    for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        name = str(cast("Any", key_node.value))
        if name in values:
            problems.append(
                f"{prefix}{'.' if prefix else ''}{name} is set twice, again in {file}:{key_node.start_mark.line + 1}"
            )
        values[name], inner = _plain(value_node, file, f"{prefix}.{name}" if prefix else name, problems)
        origins |= inner
    return values, origins


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


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
