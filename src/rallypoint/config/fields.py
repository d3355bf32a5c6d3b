"""How a key of the config is declared: its help text, its unit, its range, its default, in one place."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


class Section(BaseModel):
    """A group of keys. Frozen, strict about types, and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def key(
    default: object = PydanticUndefined,
    *,
    help: str,  # noqa: A002 - the word users know from --help
    unit: str = "",
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Declare one leaf.

    Args:
        default: its value when nobody sets it; without one the key is required.
        help: one sentence, shown by `rally config --help-keys` and in the docs.
        unit: "s", "tokens", "GiB" ...; empty for plain numbers and words.
        above: exclusive lower bound.
        at_least: inclusive lower bound.
        at_most: inclusive upper bound.
    """
    return Field(
        default,
        description=help,
        gt=above,
        ge=at_least,
        le=at_most,
        json_schema_extra={"unit": unit},
    )


def section(default: object, *, help: str) -> Any:  # noqa: A002
    """Declare a nested section: a section type for "on by default", None for "off by default"."""
    if isinstance(default, type):
        return Field(default_factory=default, description=help)
    return Field(default, description=help)


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section type that a field holds (also when it may be None), or None for a leaf."""
    annotation: Any = info.annotation
    for candidate in (annotation, *cast("tuple[Any, ...]", getattr(annotation, "__args__", ()))):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def leaves(kind: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every leaf of a section by its dotted key, in order of declaration."""
    found: dict[str, FieldInfo] = {}
    for name, info in kind.model_fields.items():
        inner = section_of(info)
        found |= leaves(inner, f"{prefix}{name}.") if inner else {prefix + name: info}
    return found


def unit_of(info: FieldInfo) -> str:
    """Return the unit of a leaf, or an empty string."""
    extra = info.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""
