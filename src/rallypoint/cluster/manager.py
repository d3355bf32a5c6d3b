"""Which role is placed on which pool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rallypoint.cluster.call import Host
from rallypoint.cluster.group import Runtime
from rallypoint.cluster.pool import Pool, ResourcePool
from rallypoint.errors import PlacementError


class ResourcePoolManager:
    """Gives every role its pool.

    >>> roles = {"actor": "main", "critic": "main", "rollout": "side"}
    >>> manager = ResourcePoolManager({"main": [2], "side": [1]}, roles)
    >>> manager.pool("critic") is manager.pool("actor"), manager.pool("rollout").num_processes
    (True, 1)
    """

    def __init__(self, spec: Mapping[str, Pool | Sequence[int]], mapping: Mapping[str, str]) -> None:
        """Check that every role has a pool.

        Args:
            spec: pool name to pool, or to processes per node of one core each.
            mapping: role to pool name; roles of the same pool are colocated.

        Raises:
            PlacementError: a role is placed on a pool that does not exist.
        """
        self._pools: dict[str, Pool] = {name: _named(name, pool) for name, pool in spec.items()}
        self._mapping = dict(mapping)
        for role, name in mapping.items():
            if name not in self._pools:
                raise PlacementError(f"{role} is placed on pool {name!r}, but the pools are {', '.join(self._pools)}")

    def pool(self, role: str) -> Pool:
        """Return the pool of a role.

        Raises:
            PlacementError: the role has none.
        """
        if role not in self._mapping:
            raise PlacementError(f"{role} has no pool; the roles that have one are {', '.join(self._mapping)}")
        return self._pools[self._mapping[role]]

    async def open(self, runtime: Runtime) -> None:
        """Start the processes of all pools that a role is placed on, at the same time.

        Raises:
            PlacementError: they do not fit.
        """
        used = [pool for name, pool in self._pools.items() if name in self._mapping.values()]
        await runtime.reserve(list(dict.fromkeys(source for pool in used for source in pool.sources)))
        await asyncio.gather(*(runtime.hosts(pool) for pool in used))

    async def hosts(self, runtime: Runtime, role: str) -> Sequence[Host]:
        """Return the processes of a role, in rank order."""
        return await runtime.hosts(self.pool(role))


def _named(name: str, pool: Pool | Sequence[int]) -> Pool:
    return ResourcePool(pool, name=name) if isinstance(pool, Sequence) else pool
