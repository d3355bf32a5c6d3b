"""The pools of a config as a cluster knows them, and smaller ones for the nodes that are left.

Owns: how keys of `cluster` become pools. Must not know: Ray, memory of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rallypoint.cluster import ResourcePool, ResourcePoolManager
from rallypoint.cluster.capacity import Node, misfit
from rallypoint.config import RunConfig
from rallypoint.config.fields import changed
from rallypoint.prepare.plan import divides

_MOST_TRIES = 2000
"""Ways to make pools smaller that are looked at for each number of entries."""


def resource_pools(config: RunConfig) -> dict[str, ResourcePool]:
    """Return the pools of a config by their names."""
    cluster = config.cluster
    return {
        name: ResourcePool(
            processes_per_node,
            name=name,
            num_cpus=cluster.num_cpus_per_process * _devices_of(config, name),
            num_gpus=0 if cluster.device == "cpu" else cluster.num_gpus_per_process * _devices_of(config, name),
            memory_gib=cluster.memory_gib_per_process or 0,
            labels=cluster.labels,
            device=cluster.device,
        )
        for name, processes_per_node in cluster.pools.items()
    }


def _devices_of(config: RunConfig, pool: str) -> int:
    """Return the devices of each process of a pool: several where it has a server alone, which cuts its model."""
    has_rollouts = "rollout" in config.roles and config.roles["rollout"].pool == pool
    return config.devices_of_rollout if has_rollouts else 1


def num_devices(config: RunConfig) -> float:
    """Return the devices of all pools, where they are not processors."""
    num = sum(sum(each) * _devices_of(config, pool) for pool, each in config.cluster.pools.items())
    return num * (1 if config.cluster.runtime == "inline" else config.cluster.num_gpus_per_process)


def shrunk(config: RunConfig, nodes: Sequence[Node]) -> RunConfig | None:
    """Return a config whose pools have places on these nodes: with as few entries and processes less as possible.

    Roles must still divide their models as the config says, and have each at least one rank; the global batch is the
    same. None if no such pools fit, or if those of the config do.
    """
    if misfit(list(resource_pools(config).values()), nodes) is None:
        return None
    entries = [(pool, place) for pool, counts in config.cluster.pools.items() for place in range(len(counts))]
    for num in range(1, len(entries)):
        ways = itertools.islice(itertools.combinations(entries, num), _MOST_TRIES)
        for left_out in sorted(ways, key=lambda way: sum(config.cluster.pools[pool][place] for pool, place in way)):
            pools = {
                name: tuple(count for place, count in enumerate(counts) if (name, place) not in left_out)
                for name, counts in config.cluster.pools.items()
            }
            smaller = changed(config, {"cluster.pools": pools})
            if (
                all(pools.values())
                and divides(smaller)
                and misfit(list(resource_pools(smaller).values()), nodes) is None
            ):
                return smaller
    return None


def pools_of(config: RunConfig) -> ResourcePoolManager:
    """Return the pools of a config, and which role is placed on which."""
    return ResourcePoolManager(
        resource_pools(config), {role: placement.pool for role, placement in config.roles.items()}
    )
