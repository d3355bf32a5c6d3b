"""Defaults that are others off the CPU: where a GPU computes, half precision and checkpointing are what fits it.

They are filled in when a config is loaded, so that the config of a run has them as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

OFF_CPU = {"model": ("dtype", "bfloat16"), "engine": ("activations", "checkpoint")}
"""Section -> key and its default where cluster.device is not cpu."""


def with_device_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of plain values in which keys that nobody set have the default of the device.

    >>> with_device_defaults({"cluster": {"device": "warp"}, "model": {"dtype": "float32"}})["model"]
    {'dtype': 'float32'}
    >>> with_device_defaults({"cluster": {"device": "warp"}})["engine"]
    {'activations': 'checkpoint'}
    >>> with_device_defaults({"seed": 1})
    {'seed': 1}
    """
    filled, cluster = dict(values), values.get("cluster")
    device: object = cast("Mapping[str, Any]", cluster).get("device", "cpu") if isinstance(cluster, Mapping) else "cpu"
    if device == "cpu":
        return filled
    for section, (name, default) in OFF_CPU.items():
        inner = filled.get(section, {})
        if isinstance(inner, Mapping):  # what else it may be is complained of elsewhere
            filled[section] = {name: default, **cast("Mapping[str, Any]", inner)}
    return filled
