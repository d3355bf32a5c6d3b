"""Keys that follow from the machine while nobody sets them; `null` or `auto` asks for that, too.

Owns: which keys these are, and how a choice gets into a tree of plain values. Must not know: machines. A config that is
loaded has plain values for all of them, and so has the config.yaml of a run: a resume elsewhere has the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from rallypoint.config.fields import is_automatic, leaves, without
from rallypoint.config.tree import RunConfig

AUTOMATIC = tuple(name for name, info in leaves(RunConfig).items() if is_automatic(info))
"""Their dotted names."""

OFF_CPU = {"model.dtype": "bfloat16", "engine.activations": "checkpoint"}
"""Key -> its default where cluster.device is not cpu and nothing is known of the device."""

Choose: TypeAlias = Callable[[RunConfig, tuple[str, ...]], Mapping[str, object]]
"""(a config with its defaults, the automatic keys that are not set) -> values for some of them."""


def without_nulls(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a tree without automatic keys that are null, but with the defaults of its device, and the keys left open.

    >>> without_nulls({"cluster": {"device": "warp", "pools": None}})[0]
    {'cluster': {'device': 'warp'}, 'model': {'dtype': 'bfloat16'}, 'engine': {'activations': 'checkpoint'}}
    >>> without_nulls({"cluster": {"device": "warp"}, "model": {"dtype": "float32"}})[0]["model"]
    {'dtype': 'float32'}
    >>> without_nulls({"seed": 1})[0]
    {'seed': 1}
    """
    filled, left_open = dict(values), list[str]()
    for dotted in AUTOMATIC:
        *sections, name = dotted.split(".")
        inner: object = filled
        for section in sections:
            inner = cast("Mapping[str, Any]", inner).get(section, {}) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and cast("Mapping[str, Any]", inner).get(name) in (None, "auto"):
            left_open.append(dotted)
            if name in inner:
                filled = without(filled, dotted.split("."))
    cluster = filled.get("cluster")
    device: object = cast("Mapping[str, Any]", cluster).get("device", "cpu") if isinstance(cluster, Mapping) else "cpu"
    if device != "cpu":
        filled = with_values(filled, {dotted: OFF_CPU[dotted] for dotted in OFF_CPU if dotted in left_open})
    return filled, tuple(left_open)


def with_values(values: Mapping[str, Any], chosen: Mapping[str, object]) -> dict[str, Any]:
    """Return a tree with other values for some dotted keys.

    >>> with_values({"actor": {"name": "a"}}, {"actor.mesh.dp_shard": 2})
    {'actor': {'name': 'a', 'mesh': {'dp_shard': 2}}}
    """
    filled = dict(values)
    for dotted, value in chosen.items():
        section, _, rest = dotted.partition(".")
        filled[section] = with_values(filled.get(section) or {}, {rest: value}) if rest else value
    return filled
