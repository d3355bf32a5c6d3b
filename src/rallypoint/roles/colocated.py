"""What colocated roles share: the memory of their process, which one of them leases at a time, and the actor's weights.

Owns: which role is awake, and what a role leaves for the others of its process. Must not know: what the roles compute.
Invariant: of the roles of a process at most one has the lease, so an update never meets sampling that is under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch

from rallypoint.cluster import WorkerContext, broadcast, collect
from rallypoint.cpu.pages import give_back
from rallypoint.engine import TrainingEngine
from rallypoint.journal import Work
from rallypoint.observability.memory import MemoryMeter, resident_bytes
from rallypoint.types import Metrics
from rallypoint.weights import Exposed, Sender

HolderT = TypeVar("HolderT", bound="LeaseHolder")
Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")

_PROCESS, _ACTOR = "process/memory", "actor/parts"
"""Names in `WorkerContext.shared`; what begins with a role's name goes with the role."""
_PROFILING = threading.Lock()
"""Held while a thread of this process is recorded: torch has one profiler a process."""
_MOST_WORK = 32
"""Calls of a rank in a step that the journal has one by one."""
_MOST_ALLOCATIONS = 100_000
"""Allocations that a snapshot of CUDA's memory has, the newest."""


@dataclasses.dataclass(frozen=True, slots=True)
class ActorParts:
    """What an actor worker leaves for a rollout or reference worker of its process."""

    engine: TrainingEngine[Any]
    open_sender: Callable[[], contextlib.AbstractContextManager[Sender]]
    """Opens the weights to publish, which are awake until it is closed."""
    exposed: Callable[[], Exposed | None]
    """Returns what other processes of the node read from where it is."""

    def leave(self, context: WorkerContext) -> None:
        """Leave the parts for workers that start later."""
        context.shared[_ACTOR] = self

    @staticmethod
    def find(context: WorkerContext) -> ActorParts | None:
        """Return what the actor worker of this process has left; None if there is no actor here."""
        return context.shared.get(_ACTOR)


@dataclasses.dataclass(slots=True)
class _ProcessMemory:
    """The memory of a process, as its roles share it."""

    baseline_bytes: int
    """Bytes that were taken before the first role was started."""
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
        self.role, self.rank, self._device = context.role, context.rank, torch.device(context.device)
        self._memory = _ProcessMemory.of(context)
        self._meter = MemoryMeter(self._device, self._memory.baseline_bytes)
        self._sleepers: tuple[TrainingEngine[Any], ...] = ()
        self._work: list[Work] = []
        self._profile: Path | None = None

    def sleep_between(self, *engines: TrainingEngine[Any]) -> None:
        """Put engines to sleep now, and whenever the lease is given back."""
        self._sleepers = engines
        for engine in engines:
            engine.sleep()
        self._memory.release(self._device)

    @contextlib.contextmanager
    def held(self, *, to_train: bool = False, doing: str = "other") -> Iterator[None]:
        """Hold the memory of the process; the optimizer's state is awake only `to_train`. `doing` names the work."""
        outer = self._memory.holder
        assert outer in (None, self), f"{self.role} wants the memory while {outer.role if outer else ''} has it"
        self._memory.holder = self
        began_s = time.time()
        try:
            with self._meter.measured(), self._profiled(doing if outer is None else None):
                for engine in self._sleepers:
                    engine.wake(to_train=to_train)
                try:
                    yield
                finally:
                    for engine in self._sleepers:
                        engine.sleep()
        finally:
            self._memory.holder = outer
            if outer is None:
                self._add(doing, began_s, time.time())
        give_back(self._device)
        self._memory.release(self._device)

    def profile(self, below: Path | None) -> None:
        """Record what the role does from now on, a file for each call; None ends it.

        Args:
            below: beginning of the files' paths, such as `profile/step-000003-actor-rank0`.
        """
        self._profile = below

    @contextlib.contextmanager
    def _profiled(self, doing: str | None) -> Iterator[None]:
        """Record the block if that was asked for, unless another thread of this process is recorded."""
        if self._profile is None or doing is None or not _PROFILING.acquire(blocking=False):
            yield
            return
        path = next(path for path in _names(self._profile, doing) if not path.exists())
        try:
            with recorded(path, torch.cuda.memory if self._device.type == "cuda" else None):
                yield
        finally:
            _PROFILING.release()

    def _add(self, doing: str, began_s: float, ended_s: float) -> None:
        """Add a call; once there are many, as of guests, add its time to the newest one of its name."""
        at = next((at for at in reversed(range(len(self._work))) if self._work[at][0] == doing), len(self._work))
        if len(self._work) < _MOST_WORK or at == len(self._work):
            self._work.append((doing, round(began_s, 4), round(ended_s, 4), round(ended_s - began_s, 4), 1))
        else:
            _, first_s, _, spent_s, num = self._work[at]
            self._work[at] = doing, first_s, round(ended_s, 4), round(spent_s + ended_s - began_s, 4), num + 1

    def work(self) -> list[Work]:
        """Return what the role did while it held the process, since this was last asked."""
        found, self._work = self._work, []
        return found

    def metrics(self, beside_bytes: int = 0) -> Metrics:
        """Return the peak while it was held since this was last asked.

        Args:
            beside_bytes: private memory of another process that works for the role; on a CPU it is the role's, too.
        """
        return self._meter.take(beside_bytes if self._device.type == "cpu" else 0)


class LeaseHolder:
    """A worker whose memory and time are measured."""

    lease: MemoryLease

    def memory(self) -> Metrics:
        """Return `memory_gib`, the peak of the calls since this was last asked."""
        return self.lease.metrics()

    @broadcast
    def profile(self, folder: Path, step: int) -> None:
        """Record what the role does in a step, until `measured` is called; see `MemoryLease.profile`."""
        self.lease.profile(folder / f"step-{step:06d}-{self.lease.role}-rank{self.lease.rank}")

    @collect
    def measured(self) -> tuple[Metrics, Sequence[Work]]:
        """Return the peak memory, and what the role did, since this was last asked."""
        self.lease.profile(None)
        return self.memory(), self.lease.work()


class Allocations(Protocol):
    """What records the allocations of a device: `torch.cuda.memory`, whose functions for it are private."""

    def _record_memory_history(self, enabled: Literal["all"] | None = "all", *, max_entries: int = 0) -> None: ...

    def _dump_snapshot(self, filename: str) -> None: ...


@contextlib.contextmanager
def recorded(path: Path, allocations: Allocations | None) -> Iterator[None]:
    """Record a block with torch's profiler into a file, and what it allocates into another beside it."""
    if allocations is not None:
        allocations._record_memory_history(max_entries=_MOST_ALLOCATIONS)
    try:
        with torch.profiler.profile(record_shapes=True) as found:
            yield
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))
        if allocations is not None:
            allocations._dump_snapshot(str(path.with_suffix(".memory.pickle")))
    finally:
        if allocations is not None:
            allocations._record_memory_history(enabled=None)


def _names(below: Path, doing: str) -> Iterator[Path]:
    """Yield names for what a role did, of which the first that is free is taken."""
    for number in itertools.count(1):
        yield below.with_name(f"{below.name}-{doing}{'' if number == 1 else f'-{number}'}.json")


def with_lease(
    *, to_train: bool = False
) -> Callable[[Callable[Concatenate[HolderT, Params], ResultT]], Callable[Concatenate[HolderT, Params], ResultT]]:
    """Run a worker's method while its role holds the memory of the process."""

    def decorate(
        method: Callable[Concatenate[HolderT, Params], ResultT],
    ) -> Callable[Concatenate[HolderT, Params], ResultT]:
        @functools.wraps(method)
        def run(self: HolderT, /, *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
            with self.lease.held(to_train=to_train, doing=method.__name__):
                return method(self, *args, **kwargs)

        return run

    return decorate
