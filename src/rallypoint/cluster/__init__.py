"""Processes and how they are called. The only package that imports ray; it knows no tensors and no RL.

Ray itself is imported when a `RayRuntime` is asked for and not before, so that everything else works
where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rallypoint.cluster.dispatch import Joinable, Rule, Splittable, broadcast, collect, dispatched, first_rank, shard
from rallypoint.cluster.group import Host, Runtime, WorkerGroup
from rallypoint.cluster.host import WorkerContext, WorkerHost
from rallypoint.cluster.inline import InlineRuntime
from rallypoint.cluster.pool import ResourcePool
from rallypoint.errors import PlacementError


def open_runtime(
    kind: Literal["ray", "inline"],
    *,
    log_folder: Path,
    object_store_gib: float,
    placement_timeout_s: float,
    preload: Sequence[str] = (),
    say: Callable[[str], None],
) -> Runtime:
    """Start the runtime of that kind.

    Raises:
        PlacementError: Ray is asked for and not installed.
    """
    if kind == "inline":
        return InlineRuntime()
    try:
        from rallypoint.cluster.on_ray import RayRuntime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise PlacementError(
            "cluster.runtime=ray, but ray is not installed: pip install 'rallypoint[ray]', "
            "or run everything in one process with cluster.runtime=inline"
        ) from None
    return RayRuntime(
        log_folder=log_folder,
        object_store_gib=object_store_gib,
        placement_timeout_s=placement_timeout_s,
        preload=preload,
        say=say,
    )


__all__ = [
    "Host",
    "InlineRuntime",
    "Joinable",
    "ResourcePool",
    "Rule",
    "Runtime",
    "Splittable",
    "WorkerContext",
    "WorkerGroup",
    "WorkerHost",
    "broadcast",
    "collect",
    "dispatched",
    "first_rank",
    "open_runtime",
    "shard",
]
