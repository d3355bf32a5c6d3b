"""What a role needs to come to life: the config, the runtime, and the model's folder."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, TypeVar

import torch

from rallypoint.cluster import ResourcePool, Runtime, WorkerContext, WorkerGroup
from rallypoint.config import RoleName, RunConfig
from rallypoint.parallel import Collective, connect

WorkerT = TypeVar("WorkerT")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What every worker of a role is given."""

    config: RunConfig
    model_path: str
    """Hugging Face folder or hub name of the initial policy."""
    meeting_file: Path
    """Where the ranks of this group find each other; used once."""

    def prepare(self, context: WorkerContext) -> None:
        """Set up this process (or thread) for its rank."""
        torch.set_num_threads(context.num_cpus)

    def meet(self, context: WorkerContext) -> Collective:
        """Connect to the other ranks of the role; the result must be kept, for the others connect to it."""
        return connect(self.meeting_file, context.rank, context.num_ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Puts worker groups onto the pools of a run."""

    config: RunConfig
    runtime: Runtime
    model_path: str
    meeting_folder: Path
    """A folder that the processes of this machine share."""

    async def group(
        self, role: RoleName, kind: Callable[Concatenate[WorkerContext, WorkerSpec, ...], WorkerT], *args: Any
    ) -> WorkerGroup[WorkerT]:
        """Start the workers of a role where the config places them.

        Args:
            role: names the placement in the config.
            kind: the worker's class, called with its context, a `WorkerSpec` and the further arguments.
            *args: for every worker's constructor.
        """
        pool = _pool(self.config, self.config.roles[role].pool)
        hosts = (await self.runtime.hosts(pool))[: self.config.num_ranks(role)]
        spec = WorkerSpec(self.config, self.model_path, self.meeting_folder / f"{role}-{uuid.uuid4().hex}")
        return await WorkerGroup.create(role, kind, hosts, spec, *args)


async def open_pools(config: RunConfig, runtime: Runtime) -> None:
    """Start the processes of all pools, so that they get ready while the driver is busy with other things.

    Raises:
        PlacementError: a pool does not fit.
    """
    for name in dict.fromkeys(placement.pool for placement in config.roles.values()):
        await runtime.hosts(_pool(config, name))


def _pool(config: RunConfig, name: str) -> ResourcePool:
    cluster = config.cluster
    return ResourcePool(name, cluster.pools[name], cluster.num_cpus_per_process, cluster.device)
