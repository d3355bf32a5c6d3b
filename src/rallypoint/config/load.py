"""From a source to a checked config: every problem found, all of them reported together.

Three passes, each over what the one before left whole: the types and ranges of single keys, then
contradictions between keys (`check.py`), then whatever the caller looks at, such as the files that keys name.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rallypoint.config.automatic import Choose, with_values, without_nulls
from rallypoint.config.check import contradictions
from rallypoint.config.fields import (
    Problem,
    Section,
    is_automatic,
    leaves,
    named_sections,
    shown,
    unit_of,
    values_of,
    without,
)
from rallypoint.config.recipes import RECIPES
from rallypoint.config.source import COMMAND_LINE, Source, origin_of, read
from rallypoint.config.suggest import foreign_keys, options_of, section_at, suggest_key, suggest_value, words_of
from rallypoint.config.tree import RunConfig, names_in
from rallypoint.errors import ConfigError
from rallypoint.user_code import Value

_MAX_LISTED = 12

AUTOMATICALLY, THIS_MACHINE = "automatic", "this machine"
"""Origins of automatic keys that are not set: before and after a value is chosen for them."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config that passed every check, and where each of its values was set."""

    name: str
    """Name of the recipe or file; a run is named after it."""
    config: RunConfig
    origins: Mapping[str, str]
    """Dotted key -> `digits.yaml:12`, `command line`, `default`, `automatic` or `this machine`."""
    missing: tuple[str, ...] = ()
    """Required keys that are not set; always empty, except in a draft."""
    overrides: tuple[str, ...] = ()
    """Overrides of the command line, as they were given."""


def load_config(
    name: str,
    overrides: Sequence[str] = (),
    *,
    look: Callable[[RunConfig], Iterable[Problem]] | None = None,
    choose: Choose | None = None,
    draft: bool = False,
) -> LoadedConfig:
    """Read, merge and check a config.

    Args:
        name: a shipped recipe, a YAML file, or the folder of a run.
        overrides: dotted keys and YAML values, such as `actor.optimizer.lr=3e-4`.
        look: finds problems outside the config, such as files that are missing; see `recipes.preflight`.
        choose: chooses values of automatic keys that nobody set; see `recipes.machine`. Without it they have their
            defaults.
        draft: whether keys that are required may still be missing, as in a recipe that is only looked at.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    source = read(name, overrides)
    values, left_open = without_nulls(_of_their_names(source))
    source = dataclasses.replace(source, values=values)
    problems: dict[str, str] = {}
    misfits: list[str] = []
    missing: tuple[str, ...] = ()
    chosen: Mapping[str, object] = {}
    try:
        config = RunConfig.model_validate(values)
        if choose is not None and left_open:
            chosen = choose(config, left_open)
            config = RunConfig.model_validate(with_values(values, chosen))
    except ValidationError as error:
        for detail in error.errors():
            location = _untagged(detail["loc"])
            if detail["type"] == "union_tag_invalid" and len(location) == 1:
                location = (*location, "name")
            problems |= _explain({**detail, "loc": location}, source)
            values = without(values, location)
        config = _repaired(values, problems)
    if config is not None:
        found = [*contradictions(config, source.origins), *(look(config) if look else ())]
        missing = tuple(problem.keys[0] for problem in found if problem.is_missing)
        for problem in found:
            if draft and problem.is_missing:
                continue
            if not any(_overlap(own, bad) for own in problem.keys for bad in problems):
                misfits.append(_with_origins(problem, source))
    if problems or misfits or config is None:
        raise ConfigError((*problems.values(), *misfits))
    origins = {dotted: _set_at(dotted, source) for dotted, _ in values_of(config)}
    automatic = dict.fromkeys(chosen, THIS_MACHINE) if choose else dict.fromkeys(left_open, AUTOMATICALLY)
    origins |= {dotted: origin for dotted, origin in automatic.items() if dotted in origins}
    return LoadedConfig(source.name, config, origins, missing, tuple(overrides))


def _of_their_names(source: Source) -> dict[str, Any]:
    """Return the values without keys that files set for another name of a section: they may wait there for their day.

    On the command line such a key is an error.
    """
    values = dict(source.values)
    for section, name in names_in(values).items():
        kinds = named_sections(RunConfig.model_fields[section])
        own = kinds[name].model_fields if isinstance(name, str) and name in kinds else None
        others = {key for kind in kinds.values() for key in kind.model_fields}
        if own is not None and section in values:
            values[section] = {
                key: value
                for key, value in values[section].items()
                if key in own or key not in others or source.origins.get(f"{section}.{key}") == COMMAND_LINE
            }
    return values


def _untagged(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return where a problem is, without the name that pydantic puts after a section that is chosen by one.

    It also lacks the name that pydantic puts after a key that may be a text or an object.
    """
    first, *rest = location or ("",)
    info = RunConfig.model_fields.get(str(first))
    if info is not None and rest and rest[0] in named_sections(info):
        return (first, *rest[1:])
    known = leaves(RunConfig)
    owners = ((at, known.get(".".join(map(str, location[:at])))) for at in range(1, len(location)))
    at = next((at for at, leaf in owners if leaf is not None and Annotated in options_of(leaf)), None)
    return location if at is None else location[:at] + location[at + 1 :]


def _repaired(values: Mapping[str, Any], problems: Mapping[str, str]) -> RunConfig | None:
    """Validate what is left without the wrong keys, standing in for required ones, to look for more problems."""
    try:
        return RunConfig.model_validate({"recipe": next(iter(RECIPES)), **values})
    except ValidationError:
        assert problems, "what was left out must have been reported"
        return None


def _overlap(first: str, second: str) -> bool:
    return first == second or first.startswith(f"{second}.") or second.startswith(f"{first}.")


def _with_origins(problem: Problem, source: Source) -> str:
    places = {place for name in problem.keys if (place := origin_of(source.origins, name)) is not None}
    return f"{problem.text} ({', '.join(sorted(places))})" if places else problem.text


def _explain(detail: ErrorDetails, source: Source) -> dict[str, str]:
    """Turn one of pydantic's errors into sentences with key, value, range and place, by dotted key."""
    parts = [str(part) for part in takewhile(lambda part: isinstance(part, str), detail["loc"])]
    dotted, found = ".".join(parts), detail["input"]
    if detail["type"] == "union_tag_invalid" or len(parts) < len(detail["loc"]):  # of an item the list is the value
        found = _value_at(source.values, parts)
    known = leaves(RunConfig)
    owner = next((name for name in known if dotted == name or dotted.startswith(f"{name}.")), dotted)
    info = known.get(owner)
    if info is not None and Annotated in options_of(info):
        return {owner: _explain_object(owner, info, detail, source)}
    if owner != dotted and info is not None and dict in options_of(info):  # each type that a value may have complains
        dotted = ".".join(parts[: owner.count(".") + 2])
    if detail["type"] == "missing" and len(parts) == len(detail["loc"]):
        meaning = f": {info.description.rstrip('.')}" if info and info.description else ""
        return {dotted: f"{dotted}: required, but not set; expected {expected(info) if info else 'a value'}{meaning}"}
    if detail["type"] == "extra_forbidden" and info is not None and len(parts) < len(detail["loc"]):
        *_, where, name = detail["loc"]
        return {dotted: f"{_said(dotted, found, source)}: {where} has no key {name}; expected {expected(info)}"}
    if detail["type"] == "extra_forbidden":
        return _unknown(parts, found, source)
    said = _said(dotted, found, source)
    item = _sections_in(info)
    if item is not None and detail["loc"][-1] in item.model_fields:
        said = f"{said}: {detail['loc'][-1]}: {detail['msg'].lower()}"
    if info is None:
        return {dotted: f"{said}: expected {_expected_section(parts, found)}"}
    if found is None and dotted == owner and not info.is_required() and type(None) not in options_of(info):
        default = shown(info.get_default(call_default_factory=True, validated_data={}))
        said, near = f"{said}: it cannot be unset; its default is {dotted}={default},", ""
    else:
        said, near = f"{said}:", suggest_value(owner, info, found)
    return {dotted: f"{said} expected {expected(info)}{near}"}


def _explain_object(owner: str, info: FieldInfo, detail: ErrorDetails, source: Source) -> str:
    """Return what is wrong inside a key that is a text or an object."""
    said = _said(owner, _value_at(source.values, owner.split(".")), source)
    inside = [str(part) for part in detail["loc"][owner.count(".") + 1 :]]
    return f"{said}: {'.'.join(inside) or 'it'}: {detail['msg'].lower()}; expected {expected(info)}"


def _set_at(leaf: str, source: Source) -> str:
    """Return where a leaf was set, or something inside of one that holds names of the user's."""
    inside = (place for name, place in source.origins.items() if name.startswith(f"{leaf}."))
    return source.origins.get(leaf) or next(inside, "default")


def _said(dotted: str, found: object, source: Source) -> str:
    origin = origin_of(source.origins, dotted)
    return f"{dotted}={shown(found)}" + (f" ({origin})" if origin else "")


def _unknown(parts: Sequence[str], found: object, source: Source) -> dict[str, str]:
    """Say of an unknown key, or of each key in an unknown section that is another project's, what it is here."""
    dotted = ".".join(parts)
    if dotted in leaves(RunConfig):  # of another name of its section
        section, name = parts[0], names_in(source.values)[parts[0]]
        kinds = named_sections(RunConfig.model_fields[section])
        have = ", ".join(kinds[str(name)].model_fields)
        owners = " or ".join(other for other, kind in kinds.items() if parts[-1] in kind.model_fields)
        said = f"{_said(dotted, found, source)}: {section}.name={name} has the keys {have}"
        return {dotted: f"{said}; {parts[-1]} is one of {section}.name={owners}"}
    named = source.values.get("recipe")
    recipe = named if isinstance(named, str) else None
    theirs, others = foreign_keys(parts, found, recipe)
    if not theirs:
        return {dotted: f"{_said(dotted, found, source)}: unknown key; {suggest_key(parts, found, recipe)}"}
    problems = {
        name: f"{_said(name, value, source)}: unknown key; {suggest_key(name.split('.'), value, recipe)}"
        for name, value in theirs.items()
    }
    if others:
        cut = " ..." if len(others) > _MAX_LISTED else ""
        problems[dotted] = f"{dotted}: unknown section, also with {', '.join(others[:_MAX_LISTED])}{cut}"
    return problems


def expected(info: FieldInfo) -> str:
    """Describe what a key takes: its words, or its type with range and unit.

    >>> expected(leaves(RunConfig)["actor.num_epochs"]), expected(leaves(RunConfig)["checkpoint.every_steps"])
    ('a whole number from 1 to 100', 'a whole number of at least 1 (steps) or null')
    """
    options = options_of(info)
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    by_value: dict[object, str] = {
        str: "labels with their values, such as {zone: west}",
        Value: "names with numbers, texts, true, false or null, such as {floor: 0.1}",
        Any: "arguments by name, such as {tag: answer}",
    }
    pools = "pool names with process counts, such as {main: [2]}"
    kinds |= {
        tuple: _items(info),
        dict: by_value.get(get_args(info.annotation)[-1], pools) if dict in options else pools,
        Annotated: f"text, or an object with the keys {', '.join(_keys_of(info))}",
    }
    words = words_of(info)
    kind = f"one of {', '.join(words)}" if words else next(kinds[option] for option in options if option in kinds)
    unit = f" ({unit_of(info)})" if unit_of(info) else ""
    return kind + _range(info) + unit + (" or null" if type(None) in options or is_automatic(info) else "")


def _sections_in(info: FieldInfo | None) -> type[Section] | None:
    """Return the section that an item of a list may be in place of a text; None where it may not."""
    kinds = list(_kinds(info.annotation)) if info is not None and get_origin(info.annotation) is tuple else []
    sections = [kind for kind in kinds if issubclass(kind, Section)]
    return sections[0] if sections and str in kinds else None


def _keys_of(info: FieldInfo) -> list[str]:
    """Return the keys of the section that a key's value may be."""
    return list(next((kind for kind in _kinds(info.annotation) if issubclass(kind, Section)), Section).model_fields)


def _kinds(annotation: object) -> Iterator[type]:
    """Yield the types that an annotation is made of."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _items(info: FieldInfo) -> str:
    """Describe what a list holds: texts, or so many numbers in a range."""
    kinds = get_args(info.annotation)
    if found := _sections_in(info):
        return f"text, or a list of texts and of objects with the keys {', '.join(found.model_fields)}"
    if Ellipsis in kinds and str not in kinds:
        return "a list of sections with a name each, such as [{name: tis, cap: 2.0}]"
    if not kinds or str in kinds:
        return "text or a list of texts"
    return f"{len(kinds)} numbers, each{_range(FieldInfo.from_annotation(kinds[0]))}, such as {shown(info.default)}"


def _expected_section(parts: Sequence[str], found: object) -> str:
    above, kind = section_at(parts[:-1]), section_at(parts)
    assert above is not None, "what is no leaf is a section"
    assert kind is not None, "what is no leaf is a section"
    hint, names = "", named_sections(above.model_fields[parts[-1]])
    if isinstance(found, str) and (near := difflib.get_close_matches(found, names, n=1)):
        hint = f"; did you mean {parts[-1]}.name={near[0]}?"
    elif isinstance(found, str) and names and ":" in found:
        hint = f"; did you mean {parts[-1]}.function={found}?"
    elif type(None) in get_args(above.model_fields[parts[-1]].annotation):
        hint = "; {} switches it on as it is, null off"
    elif found is None:
        hint = "; leave it out for its defaults"
    return f"a section with the keys {', '.join(kind.model_fields)}{hint}"


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


def _value_at(values: Mapping[str, Any], parts: Sequence[str]) -> object:
    value: Any = values
    for part in parts:
        value = value[part]
    return value
