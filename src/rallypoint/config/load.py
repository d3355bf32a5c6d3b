"""From a source to a checked config: every problem found, all of them reported together.

Three passes, each over what the one before left whole: the types and ranges of single keys, then
contradictions between keys (`check.py`), then whatever the caller looks at, such as the files that keys name.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rallypoint.config import check
from rallypoint.config.fields import Section, leaves, section_of, unit_of
from rallypoint.config.source import Source, read
from rallypoint.config.tree import RunConfig
from rallypoint.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config that passed every check, and where each of its values was set."""

    name: str
    """Of the recipe or file, for naming the run."""
    config: RunConfig
    origins: Mapping[str, str]
    """Dotted key -> `digits.yaml:12`, `command line` or `default`."""


def load_config(
    name: str, overrides: Sequence[str] = (), *, look: Callable[[RunConfig], Iterable[check.Problem]] | None = None
) -> LoadedConfig:
    """Read, merge and check a config.

    Args:
        name: a shipped recipe, a YAML file, or the folder of a run.
        overrides: dotted keys and YAML values, such as `actor.optimizer.lr=3e-4`.
        look: finds problems outside the config, such as files that are missing; see `recipes.preflight`.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    source = read(name, overrides)
    problems: dict[str, str] = {}
    contradictions: list[str] = []
    try:
        config = RunConfig.model_validate(source.values)
    except ValidationError as error:
        values = source.values
        for detail in error.errors():
            dotted, sentence = _explain(detail, source)
            problems[dotted] = sentence
            values = _without(values, detail["loc"])
        config = _repaired(values, problems)
    if config is not None:
        found = [*check.contradictions(config, source.origins), *(look(config) if look else ())]
        for problem in found:
            if not any(_overlap(own, bad) for own in problem.keys for bad in problems):
                contradictions.append(_with_origins(problem, source))
    if problems or contradictions or config is None:
        raise ConfigError((*problems.values(), *contradictions))
    origins = {dotted: source.origins.get(dotted, "default") for dotted, _ in values_of(config)}
    return LoadedConfig(source.name, config, origins)


def values_of(config: Section, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf of a config with its value; a section that is off counts as a leaf."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section):
            yield from values_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if section_of(info) else value


def _repaired(values: Mapping[str, Any], problems: Mapping[str, str]) -> RunConfig | None:
    """Validate what is left without the wrong keys, standing in for required ones, to look for more problems."""
    standins: dict[str, Any] = {"recipe": "ppo", "reward": {"function": "digits"}}
    merged = {**standins, **values}
    if isinstance(merged["reward"], dict):
        merged["reward"] = {**standins["reward"], **cast("dict[str, Any]", merged["reward"])}
    try:
        return RunConfig.model_validate(merged)
    except ValidationError:
        assert problems, "what was left out must have been reported"
        return None


def _without(values: Mapping[str, Any], location: tuple[str | int, ...]) -> dict[str, Any]:
    """Return the tree without the value at a location; list items take their whole key with them."""
    if not location or location[0] not in values:
        return dict(values)
    name = str(location[0])
    inner = values[name]
    rest = {k: v for k, v in values.items() if k != name}
    if len(location) > 1 and isinstance(inner, dict) and not isinstance(location[1], int):
        rest[name] = _without(cast("dict[str, Any]", inner), location[1:])
    return rest


def _overlap(first: str, second: str) -> bool:
    return first == second or first.startswith(f"{second}.") or second.startswith(f"{first}.")


def _with_origins(problem: check.Problem, source: Source) -> str:
    places = {source.origins[name] for name in problem.keys if name in source.origins}
    return f"{problem.text} ({', '.join(sorted(places))})" if places else problem.text


def _explain(detail: ErrorDetails, source: Source) -> tuple[str, str]:
    """Turn one of pydantic's errors into a dotted key and a sentence with key, value, range and place."""
    parts = [str(part) for part in detail["loc"]]
    dotted = ".".join(parts)
    known = leaves(RunConfig)
    owner = next((dotted[: dotted.find(name) + len(name)] for name in known if dotted.startswith(f"{name}.")), dotted)
    origin = source.origins.get(dotted) or source.origins.get(owner)
    origin = origin or next((o for k, o in source.origins.items() if k.startswith(f"{dotted}.")), None)
    place = f" ({origin})" if origin else ""
    if detail["type"] == "extra_forbidden":
        return dotted, f"{dotted}: unknown key{place}; {_suggest(parts)}"
    if detail["type"] == "missing":
        return dotted, f"{dotted}: required, but not set; expected {_expected(known.get(dotted), detail)}"
    found = detail["input"]
    if isinstance(found, Section):
        found = found.model_dump()
    return dotted, f"{dotted}={_show(found)}{place}: expected {_expected(known.get(owner), detail, dotted)}"


def _show(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def _expected(info: FieldInfo | None, detail: ErrorDetails, dotted: str = "") -> str:
    """Say what a key takes: its words, or its type with its range and unit."""
    if info is None:
        inner = _section_at(dotted.split("."))
        return f"a section with the keys {', '.join(inner.model_fields)}" if inner else detail["msg"].lower()
    annotation: Any = info.annotation
    options = [annotation, *get_args(annotation)]
    words = next((get_args(option) for option in options if get_origin(option) is Literal), None)
    null = " or null" if type(None) in get_args(annotation) else ""
    if words:
        near = difflib.get_close_matches(str(detail["input"]), [str(word) for word in words], n=1)
        return f"one of {', '.join(str(w) for w in words)}{null}" + (f"; did you mean {near[0]}?" if near else "")
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    kind = next((name for kind, name in names.items() if kind in options), "a list")
    if get_origin(annotation) is dict:
        kind = "pool names with lists of process counts, such as {main: [2]}"
    return kind + range_of(info) + (f" ({unit_of(info)})" if unit_of(info) else "") + null


def range_of(info: FieldInfo) -> str:
    """Return the allowed range of a leaf as words, such as ` above 0, at most 1`; empty for none."""
    words = {"gt": "above", "ge": "at least", "le": "at most"}
    bounds = [f"{words[name]} {getattr(m, name)}" for m in info.metadata for name in words if hasattr(m, name)]
    return f" {', '.join(bounds)}" if bounds else ""


def _section_at(parts: Sequence[str]) -> type[Section] | None:
    kind: type[Section] | None = RunConfig
    for part in parts:
        info = kind.model_fields.get(part) if kind else None
        kind = section_of(info) if info else None
    return kind


def _suggest(parts: Sequence[str]) -> str:
    """Name the nearest right key: first beside the wrong one, then anywhere in the tree."""
    prefix, name = list(parts[:-1]), parts[-1]
    here = _section_at(prefix) or RunConfig
    near = difflib.get_close_matches(name, here.model_fields, n=1)
    if near:
        return f"did you mean {'.'.join([*prefix, near[0]])}?"
    everywhere = leaves(RunConfig)
    same_name = [dotted for dotted in everywhere if dotted.rsplit(".", 1)[-1] == name]
    found = same_name or difflib.get_close_matches(".".join(parts), everywhere, n=1, cutoff=0.5)
    if found:
        return f"did you mean {found[0]}?"
    return f"{'.'.join(prefix) or 'the top level'} has the keys {', '.join(here.model_fields)}"
