"""What colocated roles share: the memory of their process, which one of them leases at a time, and the actor's weights.

Owns: which role is awake, and what a role leaves for the others of its process. Must not know: what the roles compute.
Invariant: of the roles of a process at most one has the lease, so an update never meets sampling that is under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from rallypoint.cluster import WorkerContext, collect
from rallypoint.cpu.pages import give_back
from rallypoint.engine import TrainingEngine
from rallypoint.observability.memory import MemoryMeter, resident_bytes
from rallypoint.types import Metrics
from rallypoint.weights import Exposed, Sender

HolderT = TypeVar("HolderT", bound="LeaseHolder")
Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")

_PROCESS, _ACTOR = "process/memory", "actor/parts"
"""Names in `WorkerContext.shared`; what begins with a role's name goes with the role."""


@dataclasses.dataclass(frozen=True, slots=True)
class ActorParts:
    """What an actor worker leaves for a rollout or reference worker of its process."""

    engine: TrainingEngine[Any]
    open_source: Callable[[], contextlib.AbstractContextManager[Sender]]
    """Opens the weights to publish, which are awake until it is closed."""
    exposed: Callable[[], Exposed | None]
    """Returns what other processes of the node read from where it is."""

    def leave(self, context: WorkerContext) -> None:
        """Leave the parts for workers that come to life later."""
        context.shared[_ACTOR] = self

    @staticmethod
    def find(context: WorkerContext) -> ActorParts | None:
        """Return what the actor worker of this process has left; None if there is no actor here."""
        return context.shared.get(_ACTOR)


@dataclasses.dataclass(slots=True)
class _ProcessMemory:
    """The memory of a process, as its roles share it."""

    baseline_bytes: int
    """Bytes that were taken before the first role came to life."""
    has_neighbour: bool = False
    """Whether another process needs the accelerator while the roles of this one sleep."""
    holder: MemoryLease | None = None
    """Lease of the role that is awake."""

    @staticmethod
    def of(context: WorkerContext) -> _ProcessMemory:
        if _PROCESS not in context.shared:
            context.shared[_PROCESS] = _ProcessMemory(resident_bytes(torch.device(context.device)))
        return context.shared[_PROCESS]

    def release(self, device: torch.device) -> None:
        """Leave what torch's allocator keeps to the neighbour; without one it is kept for the next role."""
        if device.type != "cpu" and self.has_neighbour:
            torch.accelerator.empty_cache()


def make_room_for_neighbour(context: WorkerContext) -> None:
    """Have the roles of this process leave its accelerator's memory to another process whenever they sleep."""
    memory = _ProcessMemory.of(context)
    memory.has_neighbour = True
    memory.release(torch.device(context.device))


class MemoryLease:
    """When a role holds the memory of its process, and how much."""

    def __init__(self, context: WorkerContext) -> None:
        """Begin before the role loads anything: what is there now counts for none of the roles of the process."""
        self._role, self._device = context.role, torch.device(context.device)
        self._memory = _ProcessMemory.of(context)
        self._meter = MemoryMeter(self._device, self._memory.baseline_bytes)
        self._sleepers: tuple[TrainingEngine[Any], ...] = ()

    def sleep_between(self, *engines: TrainingEngine[Any]) -> None:
        """Put engines to sleep now, and whenever the lease is given back."""
        self._sleepers = engines
        for engine in engines:
            engine.sleep()
        self._memory.release(self._device)

    @contextlib.contextmanager
    def held(self, *, to_train: bool = False) -> Iterator[None]:
        """Hold the process for a while; what the optimizer remembers wakes `to_train` only."""
        outer = self._memory.holder
        assert outer in (None, self), f"{self._role} wants the memory while {outer._role if outer else ''} has it"
        self._memory.holder = self
        try:
            with self._meter.measured():
                for engine in self._sleepers:
                    engine.wake(to_train=to_train)
                try:
                    yield
                finally:
                    for engine in self._sleepers:
                        engine.sleep()
        finally:
            self._memory.holder = outer
        give_back(self._device)
        self._memory.release(self._device)

    def metrics(self, beside_bytes: int = 0) -> Metrics:
        """Return the peak while it was held since this was last asked.

        Args:
            beside_bytes: private memory of another process that works for the role; on a CPU it is the role's, too.
        """
        return self._meter.take(beside_bytes if self._device.type == "cpu" else 0)


class LeaseHolder:
    """A worker whose memory is measured."""

    lease: MemoryLease

    @collect
    def memory(self) -> Metrics:
        """Return `memory_gib`, the peak of the calls since this was last asked."""
        return self.lease.metrics()


def with_lease(
    *, to_train: bool = False
) -> Callable[[Callable[Concatenate[HolderT, Params], ResultT]], Callable[Concatenate[HolderT, Params], ResultT]]:
    """Run a worker's method while its role holds the memory of the process."""

    def decorate(
        method: Callable[Concatenate[HolderT, Params], ResultT],
    ) -> Callable[Concatenate[HolderT, Params], ResultT]:
        @functools.wraps(method)
        def run(self: HolderT, /, *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
            with self.lease.held(to_train=to_train):
                return method(self, *args, **kwargs)

        return run

    return decorate
