"""How a key is declared, with its help, unit, range and default in one place, and how a check reports what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_MAX_SHOWN = 120
_MARKED = re.compile(r"(?<![\w/.-])\^([a-z]\w*(?:\.[\w-]+)*)")

# YAML has lists only: a tuple is made from one, though all other types are taken strictly.
Texts = Annotated[
    tuple[str, ...], Strict(False), BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""One text, or a list of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A sentence on what is wrong, and the keys that it follows from; the first is the one to change."""

    keys: tuple[str, ...]
    text: str
    is_missing: bool = False
    """Whether the first key is required and was not set: what is the user's to say, as in a shipped recipe."""
    is_local: bool = False
    """Whether it says only what this machine lacks, such as a file or a package, which another machine may have."""

    @classmethod
    def of(cls, text: str, *, is_missing: bool = False, is_local: bool = False) -> Problem:
        """Return the problem of a text in which each key that it follows from has a ^ before it, once.

        >>> Problem.of("^rollout.top_k=1 makes all rollouts of ^rollout.group_size the same").keys
        ('rollout.top_k', 'rollout.group_size')
        """
        return cls(tuple(_MARKED.findall(text)), _MARKED.sub(r"\1", text), is_missing, is_local)


class Section(BaseModel):
    """A group of keys. Frozen, strict about types, and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_empty(cls, values: object) -> object:
        """Take null for a list or names without any, which is how a key of a recipe or of a run is unset."""
        if not isinstance(values, Mapping):
            return values
        given = cast("Mapping[str, object]", values)
        empty = {name for name, info in cls.model_fields.items() if info.default in ((), {})}
        return {name: value for name, value in given.items() if value is not None or name not in empty}


SectionT = TypeVar("SectionT", bound=Section)


def key(
    default: object = PydanticUndefined,
    *,
    help: str,  # noqa: A002 - the word users know from --help
    unit: str = "",
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    words: Collection[str] = (),
    automatic: bool = False,
    hidden: bool = False,
) -> Any:
    """Declare one leaf.

    Args:
        default: its value when nobody sets it; without one the key is required.
        help: one sentence, shown by `rally config --explain` and in the docs.
        unit: "s", "tokens", "GiB" ...; empty for plain numbers and words.
        above: exclusive lower bound.
        at_least: inclusive lower bound.
        at_most: inclusive upper bound.
        words: the texts that it takes, where its type does not say it.
        automatic: whether null stands for a value that follows from the machine; see `automatic.py`.
        hidden: whether it is shown only where it is set: for looking at a run, not for what it learns.
    """
    return Field(
        default,
        description=help,
        gt=above,
        ge=at_least,
        le=at_most,
        json_schema_extra={"unit": unit, "words": list(words), "automatic": automatic, "hidden": hidden},
    )


def section(default: object, *, help: str) -> Any:  # noqa: A002
    """Declare a nested section: a section type for "on by default", None for "off by default"."""
    if isinstance(default, type):
        # Made from an empty section, so that a required key inside is reported under its whole name.
        return Field(default_factory=dict, validate_default=True, description=help)
    return Field(default, description=help)


def named_section(*, help: str) -> Any:  # noqa: A002
    """Declare a section that has other keys for each `name`; the name is filled in before it is checked."""
    return Field(default_factory=dict, validate_default=True, description=help, discriminator="name")


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section type that a field holds (also when it may be None), or None for a leaf.

    Of a section that has other keys for each `name` it is the first; `named_sections` has all.
    """
    annotation: Any = info.annotation
    if get_origin(annotation) is tuple:  # a list of sections is a leaf
        return None
    for candidate in (annotation, *cast("tuple[Any, ...]", getattr(annotation, "__args__", ()))):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def named_sections(info: FieldInfo) -> dict[str, type[Section]]:
    """Return the section type for each `name` that a field may have; empty where it is not chosen by a name."""
    if info.discriminator is None:
        return {}
    kinds = cast("tuple[type[Section], ...]", get_args(info.annotation))
    return {str(get_args(kind.model_fields["name"].annotation)[0]): kind for kind in kinds}


@functools.cache
def leaves(kind: type[Section], prefix: str = "") -> Mapping[str, FieldInfo]:
    """Return every leaf of a section by its dotted key, in order of declaration.

    Of a section that has other keys for each `name`, all keys of all names.
    """
    found: dict[str, FieldInfo] = {}
    for name, info in kind.model_fields.items():
        dotted, named, inner = prefix + name, named_sections(info), section_of(info)
        for each in reversed(named.values()):
            found.update(leaves(each, f"{dotted}."))
        if named:
            chosen = key(next(iter(named)), words=named, help=info.description or "")
            found[f"{dotted}.name"] = FieldInfo.from_annotated_attribute(str, chosen)
        elif inner:
            found.update(leaves(inner, f"{dotted}."))
        else:
            found[dotted] = info
    return found


def sections_in(kind: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every section inside a section by its dotted name, in order of declaration."""
    found: dict[str, FieldInfo] = {}
    for name, info in kind.model_fields.items():
        if inner := section_of(info):
            found |= {prefix + name: info, **sections_in(inner, f"{prefix}{name}.")}
    return found


def nested(keys: Mapping[str, object]) -> dict[str, Any]:
    """Return dotted keys as sections in sections.

    >>> nested({"kl.coef": 0.1, "kl.adaptive.target": 6, "seed": 1})
    {'kl': {'coef': 0.1, 'adaptive': {'target': 6}}, 'seed': 1}
    """
    tree: dict[str, Any] = {}
    for dotted, value in keys.items():
        *sections, name = dotted.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return tree


def without(values: Mapping[str, Any], path: Sequence[str | int]) -> dict[str, Any]:
    """Return the tree without the value at a path; list items take their whole key with them."""
    if not path or path[0] not in values:
        return dict(values)
    name = str(path[0])
    inner = values[name]
    rest = {k: v for k, v in values.items() if k != name}
    if len(path) > 1 and isinstance(inner, dict) and not isinstance(path[1], int):
        rest[name] = without(cast("dict[str, Any]", inner), path[1:])
    return rest


def changed(section: SectionT, changes: Mapping[str, object]) -> SectionT:
    """Return a section with other values for some dotted keys; a section that is off is on then, with its defaults."""
    update: dict[str, Any] = {}
    for dotted, value in changes.items():
        name, _, inner = dotted.partition(".")
        if inner:
            off = section_of(type(section).model_fields[name]) or Section
            value = changed(update.get(name, getattr(section, name)) or off(), {inner: value})  # noqa: PLW2901
        update[name] = value
    return section.model_copy(update=update)


def values_of(config: Section, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf of a config with its value, except hidden ones; a section that is off counts as a leaf."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        extra = info.json_schema_extra
        if value == info.default and isinstance(extra, dict) and cast("dict[str, object]", extra).get("hidden"):
            continue
        if isinstance(value, tuple):
            items = cast("tuple[object, ...]", value)
            value = tuple(item.model_dump() if isinstance(item, Section) else item for item in items)
        if isinstance(value, Section) and section_of(info) is not None:
            yield from values_of(value, f"{prefix}{name}.")
        elif isinstance(value, Section):  # an object in place of a text
            yield f"{prefix}{name}", value.model_dump()
        else:
            yield f"{prefix}{name}", None if section_of(info) else value


def shown(value: object) -> str:
    """Write a value as in YAML, text in quotes, cut when it is long.

    >>> shown({"lr": 1e-06, "name": "a", "pools": (2, 2), "kl": None})
    "{lr: 1e-06, name: 'a', pools: [2, 2], kl: null}"
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            items = cast("dict[object, object]", value).items()
            text = "{" + ", ".join(f"{name}: {shown(inner)}" for name, inner in items) + "}"
        case list() | tuple():
            text = f"[{', '.join(map(shown, cast('Sequence[object]', value)))}]"
        case str():
            text = repr(value)
        case _:
            text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ..."


def declared_words(info: FieldInfo) -> list[str]:
    """Return the texts that a leaf takes by its declaration; none where its type says it."""
    extra = cast("dict[str, Collection[str]] | None", info.json_schema_extra)
    return list(extra["words"]) if extra else []


def unit_of(info: FieldInfo) -> str:
    """Return the unit of a leaf, or an empty string."""
    extra = cast("dict[str, object] | None", info.json_schema_extra)
    return str(extra["unit"]) if extra else ""


def is_automatic(info: FieldInfo) -> bool:
    """Whether null stands for a value of this leaf that follows from the machine."""
    return bool(cast("dict[str, object] | None", info.json_schema_extra or {}).get("automatic"))  # pyright: ignore[reportOptionalMemberAccess]
