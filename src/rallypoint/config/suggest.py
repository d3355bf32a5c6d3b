"""Suggestions for wrong keys and values: by names in other projects, by likeness, by meaning."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rallypoint.config.fields import Section, declared_words, leaves, nested, section_of, shown
from rallypoint.config.other_projects import VALUE, Alias, aliases_for, other_projects
from rallypoint.config.recipes import RECIPES
from rallypoint.config.tree import RunConfig

_MAX_SUGGESTIONS = 4
_TYPO, _LIKE = 0.85, 0.6
"""Similarity above which a name is a typo, and above which it is still worth suggesting."""
_OFF = (False, 0, -1, "none", "off", "false", "no", "")
"""Values that people write for "none"."""


def suggest_key(parts: Sequence[str], found: object, recipe: str | None = None) -> str:
    """Name the right key for an unknown one in a run of a recipe, with the value where that stays as it is."""
    here = section_at(parts[:-1]) or RunConfig
    chain, value = _chain(found)
    wanted = [*parts, *chain]
    alias, num_words = alias_of(wanted, aliases_for(recipe))
    if alias is not None and (num_words > 1 or not _like(parts, chain, here, _TYPO)):
        return _said(alias, wanted, value)
    meant = _like(parts, chain, here, _LIKE) or " or ".join(_elsewhere(wanted)[:_MAX_SUGGESTIONS])
    if meant:
        return f"did you mean {meant}?"
    return f"{'.'.join(parts[:-1]) or 'the top level'} has the keys {', '.join(here.model_fields)}"


def suggest_value(dotted: str, info: FieldInfo, found: object) -> str:
    """Guess what was meant by a value of the wrong type or range, or by a wrong word; empty without an idea."""
    kinds, words = options_of(info), words_of(info)
    near = [word for word in words if word == str(found).lower()]
    near = near or difflib.get_close_matches(str(found), words, n=1)
    if meant := other_projects().values.get(dotted, {}).get(_written(found)):
        return f"; did you mean {meant}?"
    if near:
        return f"; did you mean {near[0]}?"
    if type(None) in kinds and not isinstance(found, list | dict) and found in _OFF:
        return "; did you mean null, which is off?"
    if str in kinds and isinstance(found, int | float):
        return f'; with quotes it is text: "{shown(found)}"'
    if int in kinds and isinstance(found, float) and found.is_integer():
        return f"; did you mean {int(found)}?"
    return ""


def foreign_keys(parts: Sequence[str], found: object, recipe: str | None = None) -> tuple[dict[str, object], list[str]]:
    """Split what an unknown section holds: the keys that other projects have, with their values, and the rest."""
    inside = {".".join((*parts, *path)): value for path, value in _leaves_of(found)}
    known = aliases_for(recipe)
    theirs = {dotted: value for dotted, value in inside.items() if alias_of(dotted.split("."), known)[0] is not None}
    return theirs, [dotted for dotted in inside if dotted not in theirs]


def alias_of(parts: Sequence[str], known: Mapping[str, Alias]) -> tuple[Alias | None, int]:
    """Return the alias that matches the longest end of a dotted name, and the number of words matched."""
    for start in range(len(parts)):
        if alias := known.get(".".join(parts[start:])):
            return alias, len(parts) - start
    return None, 0


def options_of(info: FieldInfo) -> list[Any]:
    """Return the types that a key may have, without what they hold."""
    return [get_origin(option) or option for option in _alternatives(info)]


def words_of(info: FieldInfo) -> list[str]:
    """Return the words that a key may be; empty if it is not a choice of words."""
    words = (word for choice in _alternatives(info) if get_origin(choice) is Literal for word in get_args(choice))
    return [str(word) for word in words] or declared_words(info)


def _alternatives(info: FieldInfo) -> tuple[Any, ...]:
    """Return what stands between the bars of a key's type. `Literal[...] | None` is a `Union`, `int | None` is not."""
    annotation: Any = info.annotation
    is_union = isinstance(annotation, UnionType) or get_origin(annotation) is Union
    return get_args(annotation) if is_union else (annotation,)


def section_at(parts: Sequence[str]) -> type[Section] | None:
    """Return the section of a dotted name; None where it is none."""
    kind: type[Section] | None = RunConfig
    for part in parts:
        info = kind.model_fields.get(part) if kind else None
        kind = section_of(info) if info else None
    return kind


def assignments_of(alias: Alias, wanted: Sequence[str], value: object) -> tuple[str, ...]:
    """Return what an alias and its value are here: assignments, or keys alone where the value means something else."""
    to, written = alias.to, alias.values.get(_written(value))
    if written is not None:
        to = tuple(written.split(" "))
    elif VALUE in "".join(to) and not all(_fits(assignment, value) for assignment in to):
        to = tuple(assignment.partition("=")[0] for assignment in to)
    return tuple(_moved(assignment, wanted).replace(VALUE, shown(value).strip("'")) for assignment in to)


def _said(alias: Alias, wanted: Sequence[str], value: object) -> str:
    """Say how it is written here; in a section that has a key of that name, for that section."""
    if not alias.to:
        return alias.note
    meant = " ".join(map(_quoted, assignments_of(alias, wanted, value)))
    return f"did you mean {meant}?" + (f" ({alias.note})" if alias.note else "")


def _moved(assignment: str, wanted: Sequence[str]) -> str:
    """Return an assignment for the section or the role that was written, where that has a key of the name, too."""
    key, equals, value = assignment.partition("=")
    name, own = key.rpartition(".")[2], section_at(wanted[:-1])
    if own is not None and own is not RunConfig and name in own.model_fields:
        return f"{'.'.join(wanted[:-1])}.{name}{equals}{value}"
    for word, role in (("critic", "critic"), ("ref", "reference")):
        moved = f"{role}.{key.removeprefix('actor.')}"
        if word in wanted and moved in leaves(RunConfig):
            return f"{moved}{equals}{value}"
    return assignment


def _fits(assignment: str, value: object) -> bool:
    """Whether a value may be given to the key of an assignment such as `kl.coef=VALUE`."""
    key, _, template = assignment.partition("=")
    info = leaves(RunConfig).get(key)
    if isinstance(value, dict) or info is None:
        return False
    if template != VALUE:
        return isinstance(value, int)
    try:
        RunConfig.model_validate({"recipe": next(iter(RECIPES)), **nested({key: value})})
    except ValidationError:
        return False
    return True


def _like(parts: Sequence[str], chain: Sequence[str], here: type[Section], cutoff: float) -> str | None:
    """Return the name of the section that is most like a wrong one; a typing error only if the rest is right, too."""
    near = difflib.get_close_matches(parts[-1], here.model_fields, n=1, cutoff=cutoff)
    if not near:
        return None
    section = ".".join([*parts[:-1], near[0]])
    dotted = ".".join([section, *chain])
    if dotted in leaves(RunConfig):
        return dotted
    return None if chain and cutoff == _TYPO else section


def _elsewhere(wanted: Sequence[str]) -> list[str]:
    """Return the keys anywhere in the tree that end as the wanted one, or nearly; then those that speak of it."""
    known = leaves(RunConfig)
    tails = [".".join(wanted[start:]) for start in range(len(wanted))]
    near = difflib.get_close_matches(wanted[-1], {dotted.rsplit(".", 1)[-1] for dotted in known}, n=1, cutoff=0.7)
    for tail in (*tails, *near):
        if ending := [dotted for dotted in known if f".{dotted}".endswith(f".{tail}")]:
            return [dotted for dotted in ending if set(dotted.split(".")) & set(wanted[:-1])] or ending
    word = re.compile(rf"\b{re.escape(wanted[-1])}\b", re.IGNORECASE)
    return [dotted for dotted, info in known.items() if word.search(info.description or "")]


def _chain(found: object) -> tuple[list[str], object]:
    """Follow sections of a single key down to their value."""
    inside = list(_leaves_of(found))
    return (list(inside[0][0]), inside[0][1]) if len(inside) == 1 else ([], found)


def _leaves_of(found: object) -> Iterator[tuple[tuple[str, ...], object]]:
    if not isinstance(found, Mapping):
        yield (), found
        return
    for name, inner in cast("Mapping[str, object]", found).items():
        for path, value in _leaves_of(inner):
            yield (name, *path), value


def _written(value: object) -> str:
    return shown(value).strip("'").lower()


def _quoted(assignment: str) -> str:
    return f"'{assignment}'" if " " in assignment and "{" in assignment else assignment
