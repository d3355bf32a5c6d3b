"""The runtime on Ray: every process of a pool is a Ray actor in a placement group.

Ray places, starts and connects. Added here: a pool that cannot fit is refused at once, a wait names what it waits for,
errors name role, rank and call, and processes that hang are found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

# First, because it decides what Ray reads when it is imported.
from rallypoint.cluster.ray_cluster import RayCluster

# isort: split
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rallypoint.cluster.call import Process
from rallypoint.cluster.capacity import Node, advice, amounts_text, misfit, table
from rallypoint.cluster.pool import Placed, Pool, ResourcePool
from rallypoint.cluster.process import Invocation, ProcessInfo
from rallypoint.cluster.ray_process import (
    LostNode,
    RayActor,
    RayPending,
    RayProcess,
    forwarded_environment,
    on_node,
    without_advice,
)
from rallypoint.cluster.rendezvous import LEASE_S, Rendezvous
from rallypoint.cluster.rendezvous.ray import RayRooms
from rallypoint.cluster.stacks import stacks_of
from rallypoint.cluster.waiting import Wait
from rallypoint.cluster.watch import HangDetector, Watchdog
from rallypoint.errors import NoPlaceError, PlacementError, RallyError, RayLostError, WorkerDiedError

AnswerT = TypeVar("AnswerT")

_LOOK_S, _STACKS_TIMEOUT_S = 1.0, 20.0
_SIGNS_OF_A_LOST_NODE = ("node has died", "node has crashed", "Node died")
"""Phrases with which Ray says that a process was lost with its node."""


class RayRuntime:
    """Pools of Ray actors on a cluster that this program started, or joined."""

    def __init__(
        self,
        cluster: RayCluster,
        *,
        log_folder: Path,
        placement_timeout_s: float,
        silence_s: float,
        preload: Sequence[str],
        say: Callable[[str], None],
        voice_every_s: float = 30.0,
    ) -> None:
        """Take a cluster over; it is left when the runtime is shut down.

        Args:
            cluster: that this program is connected to.
            log_folder: receives the stacks of processes that hang.
            placement_timeout_s: how long a pool may wait for its place.
            silence_s: how long a process may give no sign of life during a call.
            preload: modules that every process imports as soon as it is there.
            say: called, from any thread, with one line or a table about everything that is waited for.
            voice_every_s: seconds between two lines about a pool that waits.
        """
        self._cluster, self._timeout_s, self._preload, self._say = cluster, placement_timeout_s, tuple(preload), say
        self._voice_every_s = voice_every_s
        self._forwarded_environment = {} if cluster.is_local else forwarded_environment(os.environ)
        self._keeps_places = False
        self._tell_death: Callable[[WorkerDiedError], None] = lambda _: None
        self._here = ray.get_runtime_context().get_node_id()
        self._groups: dict[ResourcePool, PlacementGroup] = {}
        self._pools: dict[ResourcePool, asyncio.Task[list[RayProcess]]] = {}
        self._running: dict[ResourcePool, list[RayProcess]] = {}
        """Those that were there last, also while some of them are started again."""
        self.ray_thread = cluster.ray_thread
        """Makes the calls to Ray that may take long."""
        detector = HangDetector(
            processes=self._all,
            silence_s=silence_s,
            save_stacks=self._save_stacks,
            folder=log_folder,
            ground=self.ray_thread.look,
            say=say,
            died=self._died,
        )
        self.watch = Watchdog(detector)
        """Looks after the calls of all processes."""

    @property
    def head(self) -> str | None:
        """See `Runtime.head`."""
        return None if self._cluster.is_local else self._cluster.address.rpartition(":")[0]

    def hurry(self) -> None:
        """See `Runtime.hurry`."""
        self.ray_thread.hurry()

    def tell_deaths(self, died: Callable[[WorkerDiedError], None]) -> None:
        """See `Runtime.tell_deaths`."""
        self._tell_death = died

    def _died(self, process: Process, error: BaseException) -> None:
        """Pass the end of a process on, unless it was intended or ends the run anyway."""
        if isinstance(process, RayProcess) and isinstance(error, RayActorError) and not process.ended:
            role, rank = next(iter(process.roles.items()), ("", 0))
            death = RayPending(Invocation(0, role, rank, "waiting for calls", answers=False), process, None).error(
                error
            )
            if role and isinstance(death, WorkerDiedError):
                self._tell_death(death)

    def keep_places(self) -> None:
        """See `Runtime.keep_places`."""
        self._keeps_places = True

    def open_rendezvous(self, scope: str) -> Rendezvous:
        """See `Runtime.open_rendezvous`: in a named Ray actor."""
        return Rendezvous(RayRooms.open(scope, LEASE_S, self.ray_thread.ask))

    async def give_back_places(self) -> None:
        """See `Runtime.give_back_places`."""
        for pool in [pool for pool in self._groups if pool not in self._running]:
            await asyncio.to_thread(self._give_back, pool)

    async def nodes(self) -> Sequence[Node]:
        """See `Runtime.nodes`."""
        return await self._asked("Ray to list its nodes", _nodes)

    async def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """See `Runtime.reserve`."""
        nodes = await self.nodes()
        problem = misfit(pools, nodes, grows=not self._cluster.is_local)
        if problem:
            raise PlacementError(f"{problem}\n{advice(pools, nodes, is_local=self._cluster.is_local)}")

    async def processes(self, pool: Pool) -> Sequence[Process]:
        """See `Runtime.processes`."""
        for source in pool.sources:
            starting, running = self._pools.get(source), self._running.get(source, [])
            if starting is None or (starting.done() and (not running or any(process.ended for process in running))):
                self._pools[source] = asyncio.create_task(self._start(source, running))
        started = {source: await asyncio.shield(self._pools[source]) for source in pool.sources}
        placed = {
            source: [Placed(process, process.info.node_id, process.info.devices) for process in processes]
            for source, processes in started.items()
        }
        return pool.ranks(placed)

    async def _start(self, pool: ResourcePool, running: Sequence[RayProcess]) -> list[RayProcess]:
        """Reserve the nodes of a pool, and start the processes that are not running; all or none."""
        with contextlib.ExitStack() as unless_all_goes_well:
            if pool not in self._groups:
                await self.reserve([pool])
                # One bundle per node: Ray gives each bundle a node of its own, and processes share their node's.
                labels = [dict(pool.labels)] * len(pool.node_bundles)
                self._groups[pool] = await self._asked(
                    f"Ray to register pool {pool.name!r}",
                    lambda: placement_group(pool.node_bundles, strategy="STRICT_SPREAD", bundle_label_selector=labels),
                )
                unless_all_goes_well.callback(self._give_back, pool)
            nodes = [node for node, count in enumerate(pool.processes_per_node) for _ in range(count)]
            processes = await self._asked(
                f"Ray to register the processes of pool {pool.name!r}",
                lambda: [
                    self._process(pool, node) if before is None or before.ended else before
                    for node, before in itertools.zip_longest(nodes, running)
                ],
            )
            new = [process for process in processes if process not in running]
            for process in new:
                unless_all_goes_well.callback(process.end)
            await self._describe(pool, processes, new)
            unless_all_goes_well.pop_all()
        self._running[pool] = processes
        return processes

    async def _describe(self, pool: ResourcePool, processes: Sequence[RayProcess], new: Sequence[RayProcess]) -> None:
        """Wait until new processes have a place and have said where they are; say now and then what is missing."""
        asked = {asyncio.wrap_future(process.handle.describe.remote().future()): process for process in new}
        for answer in asked:
            # Seen, so that asyncio does not complain about an error that came after the first.
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        group, place = self._groups[pool], f"a place for pool {pool.name!r}"
        wait = Wait(place, self._timeout_s, self._say, every_s=self._voice_every_s)
        while pending := [answer for answer in asked if not answer.done()]:
            pause_s = min(max(wait.pause_s, 0.01), _LOOK_S)
            done, _ = await asyncio.wait(pending, timeout=pause_s, return_when=asyncio.FIRST_EXCEPTION)
            self.ray_thread.check(place)
            for answer in done:
                if (error := answer.exception()) is not None:
                    raise self._ended_at_start(pool, processes.index(asked[answer]), error) from error
            wait.look()
            if done or not (wait.is_due or wait.is_over):
                continue
            missing = await self._asked("Ray to report what is free", lambda: _missing(pool, group))
            missing = f"missing {missing or f'{len(pending)} of {len(new)} processes, which are starting'}"
            if wait.is_over:
                raise NoPlaceError(
                    f"gave up after cluster.placement_timeout_s={self._timeout_s:g}: {wait.line(missing)}"
                )
            wait.say_if_due(missing)
        for answer, process in asked.items():
            process.info = answer.result()

    def _ended_at_start(self, pool: ResourcePool, index: int, error: BaseException) -> RallyError:
        """Return our error for a process that was not there yet."""
        if not isinstance(error, RayActorError) or error.actor_init_failed:
            return PlacementError(f"pool {pool.name!r}: a process ended while it started: {error}")
        gone = self.node_lost(ProcessInfo("", "", 0), str(error))
        if gone is not None and gone.is_ours:
            return RayLostError(f"{gone}; the processes of pool {pool.name!r} ended with it, while they started")
        why = without_advice(error) if gone is None else str(gone)
        died = WorkerDiedError(f"pool {pool.name!r}", index, "its start", why)
        died.is_preempted, died.is_node_lost = error.preempted, gone is not None
        return died

    def _process(self, pool: ResourcePool, node: int) -> RayProcess:
        """Start a process in a pool's place on one of its nodes."""
        takes = pool.bundle
        actor = RayActor.options(
            enable_task_events=False,
            num_cpus=takes.pop("CPU", 0),
            num_gpus=takes.pop("GPU", 0),
            memory=takes.pop("memory", None),
            resources=takes,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[pool], placement_group_bundle_index=node),
        ).remote(pool.num_threads, pool.device, self._preload, self._forwarded_environment)
        return RayProcess(self, pool, actor)

    def process_of(self, actor_id: str | None) -> RayProcess | None:
        """Return the process of a Ray actor, if it is one of this runtime."""
        for process in itertools.chain(*list(self._running.values())):
            if process.handle._actor_id.hex() == actor_id:
                return process
        return None

    def released(self, process: RayProcess) -> None:
        """End a process without roles, and give its pool's place back if it was the pool's last."""
        if not process.roles:
            process.end()
        processes = self._running.get(process.pool, [])
        if processes and self._pools[process.pool].done() and not any(one.roles for one in processes):
            for one in processes:
                one.end()
            del self._running[process.pool], self._pools[process.pool]
            if not self._keeps_places:
                self._give_back(process.pool)

    def _give_back(self, pool: ResourcePool) -> None:
        if pool in self._groups:
            group = self._groups.pop(pool)
            with contextlib.suppress(RayLostError):  # it ended with Ray
                self.ray_thread.ask(f"Ray to take pool {pool.name!r} back", lambda: remove_placement_group(group))

    def _all(self) -> list[RayProcess]:
        """Return the processes that we have not ended."""
        return [process for process in itertools.chain(*list(self._running.values())) if not process.ended]

    async def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        await asyncio.to_thread(self.watch.stop)
        if (found := self._cluster.daemons.fault()) is not None:
            self.ray_thread.lose(found.what)
        starting = [pool for pool in self._pools.values() if not pool.done()]
        for pool in starting:
            pool.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for process in self._all():
            process.ended = True
            self.ray_thread.put(partial(ray.kill, process.handle))  # how long leaving takes shows whether it is done
        for group in self._groups.values():
            self.ray_thread.put(partial(remove_placement_group, group))
        self._pools.clear()
        self._running.clear()
        self._groups.clear()
        await asyncio.to_thread(self._cluster.shutdown)

    async def _asked(self, what: str, question: Callable[[], AnswerT]) -> AnswerT:
        return await asyncio.to_thread(self.ray_thread.ask, what, question)

    def node_lost(self, where: ProcessInfo, told: str) -> LostNode | None:
        """Return the cause if a process was lost with its whole node; `told` is what Ray says about its end."""
        found = self._cluster.daemons.fault()
        is_ours = found is not None and found.is_raylet
        if not is_ours and not any(sign in told for sign in _SIGNS_OF_A_LOST_NODE):
            return None
        if is_ours or self._cluster.is_local or where.node_id == self._here:
            return LostNode(self._cluster.daemons.why_workers_ended(), is_ours=True)
        reason = " ".join(told.split()).rpartition("is dead because ")[2]
        return LostNode(f"Ray has lost node {where.node} of the cluster: {reason}", is_ours=False)

    def _save_stacks(self, processes: Sequence[Process], file: Path) -> str:
        """Ask every node for the stacks of its processes."""
        by_node: defaultdict[str, list[ProcessInfo]] = defaultdict(list)
        for process in processes:
            by_node[process.info.node_id].append(process.info)
        there = [node for node in by_node if node != self._here]
        asked = self.ray_thread.put(lambda: [on_node(node, stacks_of).remote(by_node[node]).future() for node in there])
        texts = [stacks_of(by_node[self._here])] if self._here in by_node else []
        until = time.monotonic() + _STACKS_TIMEOUT_S
        for place, node in enumerate(there):
            try:
                answer = asked.result(max(0.0, until - time.monotonic()))[place]
                texts.append(answer.result(max(0.0, until - time.monotonic())))
            except (RayError, TimeoutError) as error:
                texts.append(f"=== node {node}: no stacks: {error or f'no answer in {_STACKS_TIMEOUT_S:g} s'}")
        file.write_text("\n".join(texts))
        return f"the stacks of all {len(processes)} processes are in {file}"


def _nodes(*, free: bool = False) -> list[Node]:
    """Return the nodes that are alive, with all that they offer, or with what is free of it."""
    now: dict[str, dict[str, float]] = available_resources_per_node() if free else {}
    return [
        Node(
            node["NodeManagerAddress"],
            now.get(node["NodeID"], {}) if free else node["Resources"],
            node.get("Labels", {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _missing(pool: ResourcePool, group: PlacementGroup) -> str | None:
    """Return what a pool waits for and what is free now; None once it is placed."""
    if placement_group_table(group)["state"] == "CREATED":
        return None
    wanted = " + ".join(f"{n} x ({amounts_text(pool.bundle)})" for n in pool.processes_per_node)
    return f"{wanted}; free now:\n{table(pool, _nodes(free=True))}"
