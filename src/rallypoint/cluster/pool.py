"""Devices that roles are placed on.

A `ResourcePool` is a number of processes on each of some nodes. A `PoolView` is part of one, or several of them
taken together; it has no processes of its own, so roles on a pool and roles on a view of it are colocated.

Ranks are a function of node and device. In a pool, ranks go through its nodes in the order of `processes_per_node`
and on a node from the lowest device number to the highest. In a view, the processes of one machine have
consecutive ranks, machines come in the order in which the parts name them, and on a machine the order of the parts is
kept:

>>> old, new = ResourcePool([2, 1], name="old"), ResourcePool([1], name="new")
>>> placed = {old: [Placed("a0", "A"), Placed("a1", "A"), Placed("b0", "B")], new: [Placed("a2", "A")]}
>>> merge(old, new).ranks(placed)
['a0', 'a1', 'a2', 'b0']
>>> first, rest = old.split([1, 2])
>>> first.ranks(placed), rest.ranks(placed)
(['a0'], ['a1', 'b0'])
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rallypoint.cluster.call import Process
from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.errors import PlacementError, WorkerDiedError

if TYPE_CHECKING:
    from rallypoint.cluster.capacity import Node

ProcessT = TypeVar("ProcessT")


@dataclasses.dataclass(frozen=True, slots=True)
class Placed(Generic[ProcessT]):
    """A process and where it is."""

    process: ProcessT
    node_id: str
    """Two machines never share one."""
    devices: tuple[str, ...] = ()
    """Numbers of its accelerators on the node."""


_GPU = "cuda"
"""torch's word for what Ray calls a GPU, unless a pool says another one."""


@dataclasses.dataclass(frozen=True, eq=False)
class ResourcePool:
    """A number of processes on each of some nodes, and what each process takes.

    >>> ResourcePool([4, 2], num_cpus=2).num_processes
    6
    """

    processes_per_node: Sequence[int]
    """One entry per node; different entries are different nodes."""
    name: str = "pool"
    num_cpus: float = 1
    num_gpus: float = 0
    """A fraction lets several processes share a GPU."""
    memory_gib: float = 0
    """Asked for and reserved; not enforced."""
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Other things that nodes offer, in Ray's words, such as {"TPU": 4}."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Only nodes with these labels, such as {"ray.io/accelerator-type": "H100"}."""
    device: str = ""
    """What workers call their device; empty: "cpu", or torch's word for GPUs where a process takes some."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "processes_per_node", tuple(self.processes_per_node))
        object.__setattr__(self, "device", self.device or (_GPU if self.num_gpus else "cpu"))
        if not self.processes_per_node or min(self.processes_per_node) < 1:
            raise ValueError(
                f"pool {self.name!r}: processes_per_node needs one number of 1 or more for each node, "
                f"found {list(self.processes_per_node)}"
            )
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(
                f"pool {self.name!r}: a process can share one GPU or have whole ones, found {self.num_gpus}"
            )
        if not self.bundle or any(amount < 0 for amount in self.bundle.values()):
            raise ValueError(f"pool {self.name!r}: a process must take something, found {self.bundle or 'nothing'}")

    @property
    def num_processes(self) -> int:
        """Processes on all nodes together; one process is one bundle."""
        return sum(self.processes_per_node)

    @property
    def num_threads(self) -> int:
        """Threads that a process can use: its whole cores, one at least."""
        return max(1, int(self.num_cpus))

    @property
    def bundle(self) -> dict[str, float]:
        """What one process takes, in Ray's words; memory in bytes."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory_gib * 2**30, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    @property
    def node_bundles(self) -> list[dict[str, float]]:
        """What the processes of each node take together."""
        return [{name: n * amount for name, amount in self.bundle.items()} for n in self.processes_per_node]

    @property
    def sources(self) -> tuple[ResourcePool, ...]:
        """The pools whose processes these are: itself."""
        return (self,)

    @property
    def parts(self) -> tuple[Share, ...]:
        """As a view of itself would list it."""
        return (Share(self, 0, self.num_processes),)

    def ranks(self, placed: Mapping[ResourcePool, Sequence[Placed[ProcessT]]]) -> list[ProcessT]:
        """Return the processes in rank order, from those of each node in the order of `processes_per_node`."""
        found: list[ProcessT] = []
        for stop, count in zip(itertools.accumulate(self.processes_per_node), self.processes_per_node, strict=True):
            on_node = placed[self][stop - count : stop]
            found += [one.process for one in sorted(on_node, key=_by_device)]
        return found

    def split(self, sizes: Sequence[int]) -> list[PoolView]:
        """Return views of consecutive ranks, of these sizes."""
        return PoolView(self.name, self.parts).split(sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Consecutive ranks of a pool."""

    pool: ResourcePool
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, eq=False)
class PoolView:
    """Ranks of one or more pools, taken together; made by `split` and `merge`."""

    name: str
    parts: tuple[Share, ...]

    @property
    def num_processes(self) -> int:
        """Processes of all parts together."""
        return sum(part.stop - part.start for part in self.parts)

    @property
    def sources(self) -> tuple[ResourcePool, ...]:
        """The pools whose processes these are."""
        return tuple(dict.fromkeys(part.pool for part in self.parts))

    def ranks(self, placed: Mapping[ResourcePool, Sequence[Placed[ProcessT]]]) -> list[ProcessT]:
        """Return the processes in rank order: those of one machine are consecutive."""
        where = {id(one.process): one.node_id for processes in placed.values() for one in processes}
        found = [process for part in self.parts for process in part.pool.ranks(placed)[part.start : part.stop]]
        machines = list(dict.fromkeys(where[id(process)] for process in found))
        return sorted(found, key=lambda process: machines.index(where[id(process)]))

    def split(self, sizes: Sequence[int]) -> list[PoolView]:
        """Return views of consecutive processes, in the order of the parts, of these sizes.

        Raises:
            ValueError: the sizes do not add up to the number of processes.
        """
        if sum(sizes) != self.num_processes or min(sizes, default=0) < 1:
            raise ValueError(
                f"pool {self.name!r} has {self.num_processes} processes: sizes of 1 or more must add up to that, "
                f"found {list(sizes)}"
            )
        borders = [0, *itertools.accumulate(sizes)]
        return [
            PoolView(f"{self.name}[{start}:{stop}]", tuple(self._between(start, stop)))
            for start, stop in itertools.pairwise(borders)
        ]

    def _between(self, start: int, stop: int) -> Iterable[Share]:
        """Return what of the parts lies between two places."""
        first = 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, part.stop - part.start)
            if low < high:
                yield Share(part.pool, part.start + low, part.start + high)
            first += part.stop - part.start


def _by_device(one: Placed[ProcessT]) -> list[int]:
    return sorted(int(number) for number in one.devices if number.isdigit())


Pool = ResourcePool | PoolView


def merge(*pools: Pool) -> PoolView:
    """Return a view of all processes of several pools.

    Raises:
        ValueError: a process would be in it twice, or nothing is.
    """
    parts = [part for pool in pools for part in pool.parts]
    if not parts:
        raise ValueError("merge needs one pool at least")
    for one, other in itertools.combinations(parts, 2):
        if one.pool is other.pool and one.start < other.stop and other.start < one.stop:
            raise ValueError(f"pools cannot be merged: both have processes of pool {one.pool.name!r}")
    return PoolView("+".join(pool.name for pool in pools), tuple(parts))


class Runtime(Protocol):
    """Where processes come from."""

    @property
    def head(self) -> str | None:
        """Address of the cluster's head; None if everything is on this machine."""
        ...

    def hurry(self) -> None:
        """Wait only seconds for what does not answer: the user wants the end. Safe in signal handlers."""
        ...

    def tell_deaths(self, died: Callable[[WorkerDiedError], None]) -> None:
        """Have a function called, from any thread, with the end of a process that no call has noticed; once or more."""
        ...

    def keep_places(self) -> None:
        """Give no pool's place back until `shutdown`, also while it has no processes: they are started again."""
        ...

    def open_rendezvous(self, scope: str) -> Rendezvous:
        """Open the rendezvous that suits these processes; the driver closes it.

        Args:
            scope: the run's unique id.
        """
        ...

    async def give_back_places(self) -> None:
        """Give the places of pools back that have no processes: others are asked for instead."""
        ...

    async def nodes(self) -> Sequence[Node]:
        """Return the machines that are there, with all that they offer."""
        ...

    async def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """Check that pools fit together, before anything is asked for.

        Raises:
            PlacementError: they can never fit; a table says what is wanted and what is there.
        """
        ...

    async def processes(self, pool: Pool) -> Sequence[Process]:
        """Return the processes of a pool, in rank order; the same ones for every role placed on it.

        Raises:
            PlacementError: the pool can never fit, or does not within the timeout.
        """
        ...

    async def shutdown(self) -> None:
        """End every process; nothing is left behind."""
        ...


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
        """Check that the pools fit together, and start their processes.

        Raises:
            PlacementError: they do not fit.
        """
        await runtime.reserve(list(dict.fromkeys(source for pool in self._used for source in pool.sources)))
        await self.start(runtime)

    async def start(self, runtime: Runtime) -> None:
        """Start the processes that are not running, of all pools that a role is placed on, at the same time.

        Raises:
            PlacementError: a pool has no place; processes of others that have no role yet are ended.
        """
        starting = [asyncio.ensure_future(runtime.processes(pool)) for pool in self._used]
        with contextlib.ExitStack() as unless_all_start:
            unless_all_start.callback(_end_idle, starting)
            await asyncio.gather(*starting)
            unless_all_start.pop_all()

    @property
    def _used(self) -> list[Pool]:
        return [pool for name, pool in self._pools.items() if name in self._mapping.values()]

    async def processes(self, runtime: Runtime, role: str) -> Sequence[Process]:
        """Return the processes of a role, in rank order."""
        return await runtime.processes(self.pool(role))


def _end_idle(starting: Iterable[asyncio.Future[Sequence[Process]]]) -> None:
    """End the processes without a role of the pools that have started."""
    there = [pool.result() for pool in starting if pool.done() and not pool.cancelled() and pool.exception() is None]
    for process in itertools.chain.from_iterable(there):
        if not process.roles:
            process.end()


def _named(name: str, pool: Pool | Sequence[int]) -> Pool:
    return ResourcePool(pool, name=name) if isinstance(pool, Sequence) else pool
