"""From a source to a checked config: every problem found, all of them reported together.

Three passes, each over what the one before left whole: the types and ranges of single keys, then
contradictions between keys (`check.py`), then whatever the caller looks at, such as the files that keys name.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rallypoint.config.check import contradictions
from rallypoint.config.fields import Section, leaves, section_of, shown, unit_of, values_of
from rallypoint.config.problem import Problem
from rallypoint.config.source import Source, origin_of, read
from rallypoint.config.tree import RunConfig
from rallypoint.errors import ConfigError

_MAX_SUGGESTIONS = 4
_FOLLOWS = {
    "dp_replicate": "it is what the others leave: the role's ranks (cluster.pools, or its placement.num_ranks) divided "
    "by dp_shard x sp x tp"
}
"""What is no key because it follows from others."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config that passed every check, and where each of its values was set."""

    name: str
    """Of the recipe or file, for naming the run."""
    config: RunConfig
    origins: Mapping[str, str]
    """Dotted key -> `digits.yaml:12`, `command line` or `default`."""


def load_config(
    name: str, overrides: Sequence[str] = (), *, look: Callable[[RunConfig], Iterable[Problem]] | None = None
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
    misfits: list[str] = []
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
        found = [*contradictions(config, source.origins), *(look(config) if look else ())]
        for problem in found:
            if not any(_overlap(own, bad) for own in problem.keys for bad in problems):
                misfits.append(_with_origins(problem, source))
    if problems or misfits or config is None:
        raise ConfigError((*problems.values(), *misfits))
    origins = {dotted: source.origins.get(dotted, "default") for dotted, _ in values_of(config)}
    return LoadedConfig(source.name, config, origins)


def _repaired(values: Mapping[str, Any], problems: Mapping[str, str]) -> RunConfig | None:
    """Validate what is left without the wrong keys, standing in for required ones, to look for more problems."""
    try:
        return RunConfig.model_validate({"recipe": "ppo", **values})
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


def _with_origins(problem: Problem, source: Source) -> str:
    places = {place for name in problem.keys if (place := origin_of(source.origins, name)) is not None}
    return f"{problem.text} ({', '.join(sorted(places))})" if places else problem.text


def _explain(detail: ErrorDetails, source: Source) -> tuple[str, str]:
    """Turn one of pydantic's errors into a dotted key and a sentence with key, value, range and place."""
    parts = [str(part) for part in takewhile(lambda part: isinstance(part, str), detail["loc"])]
    dotted, found = ".".join(parts), detail["input"]
    if len(parts) < len(detail["loc"]):  # an item of a list: the list is the value
        found = _value_at(source.values, parts)
    known = leaves(RunConfig)
    owner = next((name for name in known if dotted == name or dotted.startswith(f"{name}.")), dotted)
    info = known.get(owner)
    if detail["type"] == "missing" and len(parts) == len(detail["loc"]):
        meaning = f": {info.description.rstrip('.')}" if info and info.description else ""
        return dotted, f"{dotted}: required, but not set; expected {expected(info) if info else 'a value'}{meaning}"
    origin = origin_of(source.origins, dotted)
    said = f"{dotted}={shown(found)}" + (f" ({origin})" if origin else "")
    if detail["type"] == "extra_forbidden":
        return dotted, f"{said}: unknown key; {_suggest(parts, found)}"
    if info is None:
        return dotted, f"{said}: expected {_expected_section(parts, found)}"
    return dotted, f"{said}: expected {expected(info)}{_hint(info, found)}"


def expected(info: FieldInfo) -> str:
    """Say what a key takes: its words, or its type with range and unit.

    >>> expected(leaves(RunConfig)["actor.num_epochs"]), expected(leaves(RunConfig)["checkpoint.every_steps"])
    ('a whole number from 1 to 100', 'a whole number of at least 1 (steps) or null')
    """
    options = _options(info)
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    labels = "labels with their values, such as {zone: west}"
    pools = "pool names with process counts, such as {main: [2]}"
    kinds |= {
        tuple: _items(info),
        dict: labels if info.annotation == dict[str, str] else pools,
    }
    words = _words(info)
    kind = f"one of {', '.join(words)}" if words else next(kinds[option] for option in options if option in kinds)
    unit = f" ({unit_of(info)})" if unit_of(info) else ""
    return kind + _range(info) + unit + (" or null" if type(None) in options else "")


def _items(info: FieldInfo) -> str:
    """Say what a list holds: texts, or so many numbers in a range."""
    kinds = get_args(info.annotation)
    if not kinds or str in kinds:
        return "text or a list of texts"
    return f"{len(kinds)} numbers, each{_range(FieldInfo.from_annotation(kinds[0]))}, such as {shown(info.default)}"


def _expected_section(parts: Sequence[str], found: object) -> str:
    above, kind = _section_at(parts[:-1]), _section_at(parts)
    assert above is not None, "what is no leaf is a section"
    assert kind is not None, "what is no leaf is a section"
    hint = ""
    if type(None) in get_args(above.model_fields[parts[-1]].annotation):
        hint = "; {} switches it on as it is, null off"
    elif found is None:
        hint = "; leave it out for its defaults"
    return f"a section with the keys {', '.join(kind.model_fields)}{hint}"


def _options(info: FieldInfo) -> list[Any]:
    """Return the types that a key may have, without what they hold."""
    annotation: Any = info.annotation
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return [get_origin(option) or option for option in options]


def _words(info: FieldInfo) -> list[str]:
    return [str(word) for word in get_args(info.annotation)] if get_origin(info.annotation) is Literal else []


def _range(info: FieldInfo) -> str:
    limits = {name: getattr(m, name) for m in info.metadata for name in ("gt", "ge", "le") if hasattr(m, name)}
    match limits:
        case {"ge": low, "le": high}:
            return f" from {low} to {high}"
        case {"gt": low, "le": high}:
            return f" above {low}, at most {high}"
        case {"gt": low}:
            return f" above {low}"
        case {"ge": low}:
            return f" of at least {low}"
        case _:
            return ""


def _hint(info: FieldInfo, found: object) -> str:
    """Guess what was meant by a value of the wrong type, or by a wrong word."""
    options = _options(info)
    near = difflib.get_close_matches(str(found), _words(info), n=1)
    if near:
        return f"; did you mean {near[0]}?"
    if str in options and isinstance(found, int | float):
        return f'; with quotes it is text: "{shown(found)}"'
    if int in options and isinstance(found, float) and found.is_integer():
        return f"; did you mean {int(found)}?"
    return ""


def _value_at(values: Mapping[str, Any], parts: Sequence[str]) -> object:
    value: Any = values
    for part in parts:
        value = value[part]
    return value


def _section_at(parts: Sequence[str]) -> type[Section] | None:
    kind: type[Section] | None = RunConfig
    for part in parts:
        info = kind.model_fields.get(part) if kind else None
        kind = section_of(info) if info else None
    return kind


def _suggest(parts: Sequence[str], found: object) -> str:
    """Name the nearest right keys: beside the wrong one, then anywhere in the tree, then by their meaning."""
    known = leaves(RunConfig)
    rest: list[str] = []
    while isinstance(found, dict) and len(cast("dict[str, object]", found)) == 1:
        [(name, found)] = cast("dict[str, object]", found).items()
        rest.append(name)
    *prefix, name = parts
    if name in _FOLLOWS:
        return _FOLLOWS[name]
    here = _section_at(prefix) or RunConfig
    near = difflib.get_close_matches(name, here.model_fields, n=1)
    if near:
        section = ".".join([*prefix, near[0]])
        whole = ".".join([section, *rest])
        return f"did you mean {whole if whole in known else section}?"
    wanted = [*parts, *rest]
    tails = [".".join(wanted[start:]) for start in range(len(wanted))]
    near = difflib.get_close_matches(wanted[-1], {dotted.rsplit(".", 1)[-1] for dotted in known}, n=1, cutoff=0.7)
    for tail in (*tails, *near):
        ending = [dotted for dotted in known if f".{dotted}".endswith(f".{tail}")]
        if ending:
            return f"did you mean {' or '.join(ending[:_MAX_SUGGESTIONS])}?"
    meant = [d for d, info in known.items() if re.search(rf"\b{re.escape(wanted[-1])}\b", info.description or "", re.I)]
    if meant:
        return f"did you mean {' or '.join(meant[:_MAX_SUGGESTIONS])}?"
    return f"{'.'.join(prefix) or 'the top level'} has the keys {', '.join(here.model_fields)}"
