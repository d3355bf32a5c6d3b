"""The pools that a config asks for; without torch, so that they can be compared with a machine before anything else."""

from __future__ import annotations

from rallypoint.cluster import ResourcePool, ResourcePoolManager
from rallypoint.config import RunConfig


def resource_pools(config: RunConfig) -> dict[str, ResourcePool]:
    """Return the pools of a config by their names."""
    cluster = config.cluster
    return {
        name: ResourcePool(
            processes_per_node,
            name=name,
            num_cpus=cluster.num_cpus_per_process,
            num_gpus=0 if cluster.device == "cpu" else cluster.num_gpus_per_process,
            memory_gib=cluster.memory_gib_per_process or 0,
            labels=cluster.labels,
            device=cluster.device,
        )
        for name, processes_per_node in cluster.pools.items()
    }


def pools_of(config: RunConfig) -> ResourcePoolManager:
    """Return the pools of a config, and which role is placed on which."""
    return ResourcePoolManager(
        resource_pools(config), {role: placement.pool for role, placement in config.roles.items()}
    )
