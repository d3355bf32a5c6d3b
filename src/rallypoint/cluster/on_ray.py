"""The runtime on Ray: every process of a pool is a Ray actor in a bundle of a placement group.

The only file that imports ray. Ray places, starts and connects; what is added here is that waiting has a
voice, that what cannot fit says so at once, and that errors name role, rank and call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Before ray is imported, which reads these once: no usage statistics, no advice on accelerators we do not use.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray makes its workers nice (15); ours do the actual work, and the driver waits for them.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rallypoint.cluster.group import Host
from rallypoint.cluster.host import WorkerHost
from rallypoint.cluster.pool import ResourcePool
from rallypoint.errors import PlacementError, WorkerDiedError, WorkerError

_VOICE_EVERY_S = 30.0

# A dead or frozen node is noticed in seconds instead of a minute; the first check leaves time to start.
_HEALTH = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


class RayHost:
    """The driver's end of one Ray actor."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def create(
        self, role: str, kind: type, rank: int, num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Awaitable[None]:
        """See `Host.create`."""
        submitted = self.handle.create.remote(role, kind, rank, num_ranks, args, kwargs)
        return _result(submitted, role, rank, "__init__")

    def call(
        self, role: str, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Awaitable[Any]:
        """See `Host.call`."""
        submitted = self.handle.call.remote(role, method, args, kwargs)
        return _result(submitted, role, rank, method)


async def _result(submitted: ray.ObjectRef, role: str, rank: int, call: str) -> Any:
    """Wait for a result, and turn Ray's errors into ours."""
    try:
        return await submitted
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, WorkerError):
            raise cause from None
        raise WorkerError(role, rank, call, str(cause), str(error)) from None
    except RayActorError as error:
        # What follows in Ray's text are guesses and advice about Ray's own settings.
        detail = " ".join(str(error).split()).split(" Some common causes include")[0]
        raise WorkerDiedError(role, rank, call, detail) from None


class RayRuntime:
    """A local Ray cluster, started by this program and ended by it."""

    def __init__(
        self,
        *,
        log_folder: Path,
        object_store_gib: float,
        placement_timeout_s: float,
        preload: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        """Start Ray.

        Args:
            log_folder: receives Ray's own logs.
            object_store_gib: shared memory for data between processes.
            placement_timeout_s: how long a pool may wait for its place.
            preload: modules that every process imports as soon as it is there.
            say: called with one line about everything that is waited for.
        """
        self._timeout_s, self._preload, self._say = placement_timeout_s, tuple(preload), say
        self._groups: list[PlacementGroup] = []
        self._pools: dict[str, list[RayHost]] = {}
        log_folder.mkdir(parents=True, exist_ok=True)
        context: Any = ray.init(
            address="local",
            num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            include_dashboard=False,
            object_store_memory=int(object_store_gib * 2**30),
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config=_HEALTH,
        )
        self._ray_logs = Path(context.address_info["session_dir"]) / "logs"
        self._log_link = log_folder / "ray"
        if self._log_link.is_symlink():
            self._log_link.unlink()
        shutil.rmtree(self._log_link, ignore_errors=True)
        self._log_link.symlink_to(self._ray_logs)

    async def hosts(self, pool: ResourcePool) -> Sequence[Host]:
        """See `Runtime.hosts`.

        Raises:
            PlacementError: the pool can never fit, or does not within the timeout.
        """
        if pool.name not in self._pools:
            _check_it_can_fit(pool)
            hosts: list[RayHost] = []
            for num_processes in pool.processes_per_node:
                group = placement_group([pool.bundle] * num_processes, strategy="STRICT_PACK")
                self._groups.append(group)
                await self._wait_for(group, pool)
                hosts += [RayHost(_start(pool, group, bundle, self._preload)) for bundle in range(num_processes)]
            self._pools[pool.name] = hosts
        return self._pools[pool.name]

    async def _wait_for(self, group: PlacementGroup, pool: ResourcePool) -> None:
        started = spoken = time.monotonic()
        while not await asyncio.to_thread(group.wait, 1):
            now = time.monotonic()
            state = f"pool {pool.name!r} waits for {_amounts(pool)}; free now: {_free()}"
            if now - started > self._timeout_s:
                raise PlacementError(f"{state}; gave up after cluster.placement_timeout_s={self._timeout_s:g}")
            if now - spoken > _VOICE_EVERY_S:
                spoken = now
                self._say(f"{state} ({now - started:.0f} s)")

    async def shutdown(self) -> None:
        """See `Runtime.shutdown`; Ray's logs are copied to where they were linked."""
        for hosts in self._pools.values():
            for host in hosts:
                ray.kill(host.handle)
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()
        with contextlib.suppress(OSError):
            self._log_link.unlink()
            shutil.copytree(self._ray_logs, self._log_link, ignore=shutil.ignore_patterns("old"))


def _start(pool: ResourcePool, group: PlacementGroup, bundle: int, preload: tuple[str, ...]) -> Any:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return (
        ray.remote(WorkerHost)
        .options(
            num_cpus=pool.bundle["CPU"],
            num_gpus=pool.bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(pool.num_cpus)}},
            max_restarts=0,
        )
        .remote(pool.num_cpus, pool.device, preload)
    )


def _check_it_can_fit(pool: ResourcePool) -> None:
    """Compare what the pool takes with all that the nodes have, free or not."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name in pool.bundle:
        wanted = sorted((count * pool.bundle[name] for count in pool.processes_per_node), reverse=True)
        there = sorted((float(node.get(name, 0)) for node in nodes), reverse=True)
        if len(wanted) > len(there) or any(want > has for want, has in zip(wanted, there, strict=False)):
            table = "\n".join(
                f"  node {i}: wanted {f'{wanted[i]:g}' if i < len(wanted) else '-':>5} {name}, "
                f"has {f'{there[i]:g}' if i < len(there) else 'no such node':>5}"
                for i in range(max(len(wanted), len(there)))
            )
            raise PlacementError(
                f"pool {pool.name!r} cannot fit on this cluster:\n{table}\n"
                f"Lower cluster.pools.{pool.name}={list(pool.processes_per_node)} or cluster.num_cpus_per_process."
            )


def _amounts(pool: ResourcePool) -> str:
    each = ", ".join(f"{amount:g} {name}" for name, amount in pool.bundle.items())
    return f"{pool.num_processes} x ({each})"


def _free() -> str:
    return ", ".join(f"{v:g} {k}" for k, v in ray.available_resources().items() if k in {"CPU", "GPU"}) or "nothing"
