"""Whether pools can fit on some nodes: arithmetic before anything is asked of Ray.

>>> nodes = [Node("a", {"CPU": 4}), Node("b", {"CPU": 2})]
>>> print(misfit([ResourcePool([2, 2]), ResourcePool([2], name="side")], nodes))
None
>>> print(misfit([ResourcePool([3, 3])], nodes, grows=False))
pool 'pool' cannot fit on this cluster:
  node   wanted  available
  1 (a)  3 CPU   4 CPU
  2 (b)  3 CPU   2 CPU      too little
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rallypoint.cluster.pool import ResourcePool

_MOST_TRIES = 20_000
_ROUNDING = 1e-6
"""Tolerance for rounding, in processes: amounts are fractions, and three times 0.1 must fit into 0.3."""


def num_cores() -> int:
    """Return how many cores of this machine this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container that this process is in."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            return min(there, int(limit.read_text()))
        except (OSError, ValueError):  # no such limit: `max`, or no such file
            continue
    return there


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """All that a machine offers, free or not."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def has_labels_of(self, pool: ResourcePool) -> bool:
        """Return whether processes of a pool may be here at all."""
        return all(self.labels.get(name) == value for name, value in pool.labels.items())

    def room_for(self, pool: ResourcePool, taken: Mapping[str, float] | None = None) -> int:
        """Return how many processes of a pool fit into what is not taken yet."""
        if not self.has_labels_of(pool):
            return 0
        free = {name: self.resources.get(name, 0) - (taken or {}).get(name, 0) for name in pool.bundle}
        return min(math.floor(free[name] / amount + _ROUNDING) for name, amount in pool.bundle.items())


def misfit(pools: Sequence[ResourcePool], nodes: Sequence[Node], *, grows: bool = False) -> str | None:
    """Say why pools can never fit together on these nodes; None if they can, as far as is known.

    Args:
        pools: all that are wanted at the same time.
        nodes: all nodes, as if they were empty.
        grows: whether nodes may still join. Then a pool is a misfit only if it is too large for nodes like these.
    """
    for pool in pools:
        if grows and len(pool.processes_per_node) > sum(_offers(node, pool) for node in nodes):
            continue
        if any(room < wanted for wanted, room in _side_by_side(pool, nodes)):
            return f"pool {pool.name!r} cannot fit on this cluster:\n{table(pool, nodes)}"
    if not grows and not _can_pack(pools, nodes):
        tables = "\n".join(f"pool {pool.name!r}:\n{table(pool, nodes)}" for pool in pools)
        return f"each of these pools fits on this cluster, but not all of them at the same time:\n{tables}"
    return None


def advice(pools: Sequence[ResourcePool], nodes: Sequence[Node], *, is_local: bool) -> str:
    """Return the remedy for a misfit: it depends on which resource is too small.

    Args:
        pools: that do not fit on the nodes.
        nodes: all that there are.
        is_local: whether the only node is this machine, because the cluster is one that we start.
    """
    elsewhere = "join a cluster with cluster.address"
    wanted = {name for pool in pools for name in pool.bundle}
    if "GPU" in wanted and not any(node.resources.get("GPU", 0) for node in nodes):
        return f"There is no GPU: set cluster.device=cpu, or {elsewhere} that has GPUs."
    labelled = [pool for pool in pools if pool.labels and not any(node.has_labels_of(pool) for node in nodes)]
    if labelled:
        return f"No node has the labels {dict(labelled[0].labels)}: start nodes with them, or change cluster.labels."
    if is_local and any(len(pool.processes_per_node) > 1 for pool in pools):
        return (
            "A cluster that a run starts has one node, this machine: give cluster.pools one number for it, or "
            f"{elsewhere}."
        )
    keys = {"GPU": "cluster.num_gpus_per_process", "memory": "cluster.memory_gib_per_process"}
    short = [keys[name] for name in keys if name in wanted and not _has_enough(name, pools, nodes)]
    less = " or ".join(short or ["cluster.num_cpus_per_process"])
    return f"Ask for fewer processes (cluster.pools) or less for each ({less}), or {elsewhere}."


def _has_enough(name: str, pools: Sequence[ResourcePool], nodes: Sequence[Node]) -> bool:
    """Whether the nodes together have as much of a resource as pools take; which nodes it is on does not matter."""
    wanted = sum(bundle.get(name, 0) for pool in pools for bundle in pool.node_bundles)
    return wanted <= sum(node.resources.get(name, 0) for node in nodes) * (1 + _ROUNDING)


def table(pool: ResourcePool, nodes: Sequence[Node]) -> str:
    """Draw a table of what a pool wants and what there is, by node: the largest entry beside the roomiest node."""
    wants = sorted(pool.processes_per_node, reverse=True)
    there = _roomiest_first(pool, nodes)
    rows = [("node", "wanted", "available", "")]
    for number, (want, node) in enumerate(itertools.zip_longest(wants, there), 1):
        name = f"{number} ({node.name})" if node else f"{number}"
        wanted = amounts_text({name: want * amount for name, amount in pool.bundle.items()}) if want else "-"
        if node is None:
            rows.append((name, wanted, "no such node", "missing"))
        else:
            offer = amounts_text({name: node.resources.get(name, 0) for name in pool.bundle})
            rows.append((name, wanted, offer, "" if (want or 0) <= node.room_for(pool) else "too little"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if pool.labels:
        lines.append(f"(only nodes with the labels {dict(pool.labels)}: {len(there)} of {len(nodes)})")
    return "\n".join(f"  {line}" for line in lines)


def amounts_text(amounts: Mapping[str, float]) -> str:
    """Return resources as text for the user; memory is given in bytes and shown in GiB."""
    parts = [
        f"{amount / 2**30:g} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in amounts.items()
    ]
    return ", ".join(parts)


def _offers(node: Node, pool: ResourcePool) -> bool:
    """Whether a node has every resource that a pool takes: a head without GPUs does not count for a pool of GPUs."""
    return all(node.resources.get(name, 0) > 0 for name in pool.bundle) and node.has_labels_of(pool)


def _roomiest_first(pool: ResourcePool, nodes: Sequence[Node]) -> list[Node]:
    suiting = [node for node in nodes if node.has_labels_of(pool)]
    return sorted(suiting, key=lambda node: node.room_for(pool), reverse=True)


def _side_by_side(pool: ResourcePool, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Return (processes wanted, processes that fit) for each node, for the best of all ways to choose the nodes."""
    rooms = [node.room_for(pool) for node in _roomiest_first(pool, nodes)]
    wants = sorted(pool.processes_per_node, reverse=True)
    return list(itertools.zip_longest(wants, rooms[: len(wants)], fillvalue=0))


def _can_pack(pools: Sequence[ResourcePool], nodes: Sequence[Node]) -> bool:
    """Try to give every pool its nodes, never one node to two entries of a pool; returns True if it takes too long."""
    wants = [(pool, count) for pool in pools for count in sorted(pool.processes_per_node, reverse=True)]
    taken = [Counter[str]() for _ in nodes]
    tries = 0

    def place(index: int, used: frozenset[int]) -> bool:
        nonlocal tries
        if index == len(wants):
            return True
        pool, count = wants[index]
        for here, node in enumerate(nodes):
            tries += 1
            if tries > _MOST_TRIES:
                return True  # Ray will know
            if here in used or node.room_for(pool, taken[here]) < count:
                continue
            takes = {name: count * amount for name, amount in pool.bundle.items()}
            taken[here].update(takes)
            is_last_of_pool = index + 1 == len(wants) or wants[index + 1][0] is not pool
            if place(index + 1, frozenset() if is_last_of_pool else used | {here}):
                return True
            taken[here].subtract(takes)
        return False

    return place(0, frozenset())
