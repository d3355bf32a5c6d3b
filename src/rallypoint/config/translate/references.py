"""References of OmegaConf, which verl's YAML files are written in: `${data.train_batch_size}`, `${oc.env:HOME}`.

Owns: what they refer to, as far as the config or the environment has it. A reference that stays is named by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from rallypoint.config.translate.reading import Keys, value_of

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_LOST = object()


def with_referred(keys: Mapping[str, object], usual: Mapping[str, object], environment: Mapping[str, str]) -> Keys:
    """Put in what keys refer to.

    Args:
        keys: theirs, dotted.
        usual: what keys are that are not given.
        environment: variables for `oc.env`.

    >>> keys = {"data.size": 64, "actor.size": "${data.size}", "actor.n": "${.size}", "a": "${oc.select:b,2}/${c.d}"}
    >>> with_referred(keys, {}, {})
    {'data.size': 64, 'actor.size': 64, 'actor.n': 64, 'a': '2/${c.d}'}
    """
    found: Keys = dict(keys)
    for _ in range(20):  # a reference may lead to another one; one that leads to itself stays
        before, found = (
            found,
            {key: _filled(value, key, {**usual, **found}, environment) for key, value in found.items()},
        )
        if found == before:
            break
    return found


def _filled(value: object, key: str, known: Mapping[str, object], environment: Mapping[str, str]) -> object:
    if isinstance(value, list):
        return [_filled(one, key, known, environment) for one in cast("list[object]", value)]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        referred = _referred(whole[1], key, known, environment)
        return value if referred is _LOST else referred

    def written(found: re.Match[str]) -> str:
        referred = _referred(found[1], key, known, environment)
        return found[0] if referred is _LOST else str(referred)

    return _REFERENCE.sub(written, value)


def _referred(name: str, key: str, known: Mapping[str, object], environment: Mapping[str, str]) -> object:
    """Return what stands in `${...}`: a name from the root, or with dots in front from the section of the key."""
    resolver, colon, inner = name.partition(":")
    if not colon:
        return known.get(_from_root(name, key), _LOST)
    wanted, has_usual, usual = (part.strip() for part in inner.partition(","))
    if resolver not in {"oc.env", "oc.select"}:
        return _LOST
    where = environment if resolver == "oc.env" else known
    found = where.get(wanted, usual if has_usual else _LOST)
    return value_of(found) if isinstance(found, str) else found


def _from_root(name: str, key: str) -> str:
    """Return a name without dots in front: one is the key's section, each further one the section around.

    >>> _from_root(".n", "a.b.c"), _from_root("..n", "a.b.c"), _from_root("n", "a.b.c")
    ('a.b.n', 'a.n', 'n')
    """
    dots = len(name) - len(name.lstrip("."))
    return ".".join([*key.split(".")[:-dots], name[dots:]]) if dots else name
