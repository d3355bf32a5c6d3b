"""Processes and how they are called: pools, worker groups, dispatch, failures. The only importer of Ray.

Must not know: tensors, roles, configs, RL.

Ray itself is imported when a `RayRuntime` is asked for and not before, so that everything else works
where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rallypoint.cluster.call import Call as Call, Process as Process
from rallypoint.cluster.dispatch import (
    DispatchRule as DispatchRule,
    Joinable as Joinable,
    RankArguments as RankArguments,
    Splittable as Splittable,
    broadcast as broadcast,
    collect as collect,
    dispatched as dispatched,
    first_rank as first_rank,
    joined as joined,
    scatter as scatter,
    shard as shard,
)
from rallypoint.cluster.group import Layout as Layout, WorkerGroup as WorkerGroup, at_step as at_step
from rallypoint.cluster.inline import InlineRuntime as InlineRuntime
from rallypoint.cluster.mesh import Mesh as Mesh
from rallypoint.cluster.pool import (
    Pool as Pool,
    PoolView as PoolView,
    ResourcePool as ResourcePool,
    ResourcePoolManager as ResourcePoolManager,
    Runtime as Runtime,
    merge as merge,
)
from rallypoint.cluster.process import ProcessInfo as ProcessInfo, WorkerContext as WorkerContext
from rallypoint.cluster.ray_thread import is_held_by_ray as is_held_by_ray
from rallypoint.cluster.warm import IS_POSSIBLE
from rallypoint.errors import ClusterError
from rallypoint.extras import why_not


def open_runtime(
    kind: Literal["ray", "inline"],
    *,
    log_folder: Path,
    address: str | None = None,
    namespace: str = "rallypoint",
    object_store_gib: float = 0.5,
    placement_timeout_s: float = 300.0,
    silence_s: float = 60.0,
    preload: Sequence[str] = (),
    forks: bool = False,
    say: Callable[[str], None] = print,
) -> Runtime:
    """Start the runtime of that kind.

    Args:
        kind: Ray's processes, or threads of this one.
        log_folder: receives Ray's logs, and the stacks of processes that hang.
        address: of a running Ray cluster to join, "auto" or "host:port"; None starts one on this machine.
        namespace: of our named Ray actors; two runs on one cluster need two.
        object_store_gib: shared memory for data between processes, of a cluster that is started.
        placement_timeout_s: how long a pool may wait for its place.
        silence_s: how long a process may give no sign of life during a call, and Ray no answer.
        preload: modules that every process imports as soon as it has started.
        forks: whether processes of a cluster that is started are forks of one that has imported these; not with GPUs,
            whose drivers do not survive a fork.
        say: called with one line about every wait.

    Raises:
        ClusterError: Ray is asked for and not installed, or there is no cluster at the address.
    """
    if kind == "inline":
        return InlineRuntime(log_folder=log_folder, silence_s=silence_s, say=say)
    try:
        from rallypoint.cluster.ray_cluster import RayCluster
        from rallypoint.cluster.ray_runtime import RayRuntime
    except ImportError as error:
        raise ClusterError(
            f"cluster.runtime=ray {why_not(error, ('ray',), 'ray')}, "
            "or run everything in one process with cluster.runtime=inline"
        ) from None
    if address is None:
        cluster = RayCluster.start_local(
            log_folder=log_folder,
            object_store_gib=object_store_gib,
            say=say,
            silence_s=silence_s,
            imported=preload if forks and IS_POSSIBLE else (),
        )
    else:
        cluster = RayCluster.join(address, namespace=namespace, say=say, silence_s=silence_s)
    return RayRuntime(
        cluster,
        log_folder=log_folder,
        placement_timeout_s=placement_timeout_s,
        silence_s=silence_s,
        preload=preload,
        say=say,
    )
