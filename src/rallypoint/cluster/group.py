"""N workers that act as one.

A call names the worker's method itself, so that an editor jumps to it and a type checker knows its
arguments and result. It can be awaited, blocked on, or passed to another group before its result exists:

    squares = await group.call(Counter.squares, numbers)
    squares = group.call(Counter.squares, numbers).result()
    other.call(Adder.add, group.call(Counter.squares, numbers).reference)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import operator
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from rallypoint.cluster.call import Call, Pending, Process
from rallypoint.cluster.dispatch import RankArguments, rule_of
from rallypoint.cluster.mesh import Mesh
from rallypoint.cluster.process import Invocation
from rallypoint.cluster.reference import Fetch, ResultReference, whole
from rallypoint.errors import WorkerDiedError
from rallypoint.failpoints import check_calls

WorkerT = TypeVar("WorkerT")
MadeT = TypeVar("MadeT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")

_STEP: contextvars.ContextVar[int | None] = contextvars.ContextVar("training step", default=None)
_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """Name the training step in errors of the calls made inside."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


class Keeper(Protocol):
    """Makes workers again that were lost."""

    async def restore(self, error: WorkerDiedError) -> None:
        """Return when the workers of a lost process are there again; raise the error if that cannot be."""
        ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """The processes of a role's ranks, and how they are arranged."""

    role: str
    """What the model is for; names the group in errors."""
    processes: Sequence[Process]
    """In rank order."""
    mesh: Mesh | None = None
    """None: all ranks are data-parallel."""
    deadline_s: float | None = None
    """Seconds a call may take without progress; None for no limit."""
    keeper: Keeper | None = None
    """What makes lost workers again; None if nothing does."""

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.size != len(self.processes):
            axes = " x ".join(f"{name}={size}" for name, size in self.mesh.axes.items())
            raise ValueError(f"{self.role}: {axes} makes {self.mesh.size} ranks, but there are {len(self.processes)}")
        if len(set(self.processes)) != len(self.processes):
            raise ValueError(f"{self.role}: a process cannot be two ranks of one role")


class WorkerGroup(Generic[WorkerT]):
    """The workers of one role."""

    def __init__(self, layout: Layout, made: tuple[type, tuple[Any, ...], dict[str, Any]]) -> None:
        self.role, self.deadline_s, self._keeper = layout.role, layout.deadline_s, layout.keeper
        self.mesh = layout.mesh or Mesh({"dp": len(layout.processes)})
        self.processes = tuple(layout.processes)
        self._made = made

    @classmethod
    async def create(
        cls, layout: Layout, kind: Callable[Concatenate[Any, P], MadeT], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerGroup[MadeT]:
        """Make one worker in each process.

        Args:
            layout: the role's name, processes and mesh.
            kind: the worker's class; its first argument is a `WorkerContext`, added here.
            *args: for every worker's constructor.
            **kwargs: for every worker's constructor.

        Raises:
            ValueError: the role has a worker in one of the processes already.
            WorkerError: a constructor raised.
        """
        if any(layout.role in process.roles for process in layout.processes):
            raise ValueError(f"{layout.role} is in these processes already: shut that group down, or use another name")
        check_calls(layout.role, cast("type", kind))
        group = WorkerGroup[MadeT](layout, (cast("type", kind), args, kwargs))
        with contextlib.ExitStack() as unless_all_goes_well:
            unless_all_goes_well.callback(group._abandon)
            await group._make(range(len(group.processes)))
            unless_all_goes_well.pop_all()
        return group

    async def _make(self, ranks: Sequence[int]) -> None:
        number, (kind, args, kwargs) = next(_NUMBERS), self._made
        making = [
            self.processes[rank].create(self._invocation(number, rank, "__init__"), kind, self.mesh, args, kwargs)
            for rank in ranks
        ]
        await Call[None](making, (), lambda _: None, self.deadline_s)

    async def renew(self, processes: Sequence[Process]) -> list[int]:
        """Make workers anew in processes that took the place of lost ones; return their ranks.

        Args:
            processes: those of all ranks; a rank whose process is the same keeps its worker.

        Raises:
            WorkerError: a constructor raised.
        """
        new = [rank for rank, process in enumerate(processes) if process is not self.processes[rank]]
        self.processes = tuple(processes)
        if new:
            await self._make(new)
        return new

    async def retried(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Wait for some work, and do it again, from the beginning, after workers were lost and made again.

        Args:
            work: begins it; nothing may change by doing it twice.
        """
        while True:
            try:
                return await work()
            except WorkerDiedError as error:
                if self._keeper is None:
                    raise
                await self._keeper.restore(error)

    def call(
        self, method: Callable[Concatenate[WorkerT, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
    ) -> Call[ResultT]:
        """Call a method by its rule; see `Call` for the result and its errors."""
        rule = rule_of(method)
        parts = rule.split(self.mesh, args, kwargs)
        if len(parts) != self.mesh.size or not any(parts):
            raise ValueError(
                f"{self.role}.{method.__name__}: rule {rule.name!r} must make a part, or None, for each of "
                f"{self.mesh.size} ranks and not None for all, found {list(parts)}"
            )
        answering = rule.answering(self.mesh)
        pending = self._send(method.__name__, self._sent_once(parts), answering)
        answers = [index for index, rank in enumerate(pending) if rank in answering]
        values = (*args, *kwargs.values())
        sources = [process for value in values if isinstance(value, ResultReference) for process in value.makers]
        return Call(tuple(pending.values()), answers, rule.join, self.deadline_s, sources)

    def call_ranks(
        self, ranks: list[int], method: Callable[Concatenate[WorkerT, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
    ) -> Call[ResultT]:
        """Call a method of some ranks, which needs no rule; the first one's result does not wait for the others."""
        pending = self._send(method.__name__, [(rank, RankArguments(args, kwargs)) for rank in ranks], ranks[:1])
        return Call[ResultT](tuple(pending.values()), (0,), operator.itemgetter(0), self.deadline_s)

    def _send(self, name: str, parts: Iterable[tuple[int, RankArguments]], heard: Sequence[int]) -> dict[int, Pending]:
        """Send a call to ranks, each with its arguments, to all or none; keep the results of those that are heard."""
        number, pending = next(_NUMBERS), dict[int, Pending]()
        with contextlib.ExitStack() as unless_all_are_sent:
            for rank, part in parts:
                invocation = self._invocation(number, rank, name, answers=rank in heard)
                pending[rank] = self.processes[rank].call(invocation, part.args, part.kwargs)
                unless_all_are_sent.callback(pending[rank].cancel)
            unless_all_are_sent.pop_all()
        return pending

    def _sent_once(self, parts: Sequence[RankArguments | None]) -> Iterator[tuple[int, RankArguments]]:
        """Yield each rank and its arguments; a large value that several ranks get is sent once, by reference."""
        if not any(part.args or part.kwargs for part in parts if part):
            yield from ((rank, part) for rank, part in enumerate(parts) if part)
            return
        counts = Counter(id(value) for part in parts if part for value in (*part.args, *part.kwargs.values()))
        shared: dict[int, Any] = {}

        def once(value: Any) -> Any:
            if isinstance(value, ResultReference | Fetch) or counts[id(value)] == 1:
                return whole(value)
            if id(value) not in shared:
                shared[id(value)] = self.processes[0].share(value)
            return shared[id(value)]

        for rank, part in enumerate(parts):
            if part is not None:
                kwargs = {name: once(value) for name, value in part.kwargs.items()}
                yield rank, RankArguments(tuple(map(once, part.args)), kwargs)

    def _invocation(self, number: int, rank: int, method: str, *, answers: bool = False) -> Invocation:
        return Invocation(number, self.role, rank, method, answers, _STEP.get()).failing()

    async def shutdown(self, patience_s: float = 30.0) -> None:
        """Release the workers once they have finished their calls; processes that hold no other role end.

        A second call does nothing. A process that is already dead is not an error.

        Args:
            patience_s: seconds they may take. A process that is busy for longer, or waits for a dead one, is killed.

        Raises:
            WorkerError: a worker that can be closed (a context manager) raised on closing.
        """
        number = next(_NUMBERS)
        left = [rank for rank, process in enumerate(self.processes) if self.role in process.roles]
        closing = {
            asyncio.ensure_future(Call[None]([pending], (), lambda _: None, None))
            for rank in left
            if not self.processes[rank].ended
            for pending in [self.processes[rank].retire(self._invocation(number, rank, "__exit__"))]
        }
        errors: list[BaseException] = []
        until = time.monotonic() + (patience_s if len(closing) == len(left) else 0)
        try:
            while closing and (left_s := until - time.monotonic()) > 0:
                done, closing = await asyncio.wait(closing, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                errors += [error for one in done if (error := one.exception()) is not None]
                if any(isinstance(error, WorkerDiedError) for error in errors):
                    break
        finally:
            for one in closing:
                one.cancel()
            for rank in left:
                self.processes[rank].release(self.role)
        for error in errors:
            if not isinstance(error, WorkerDiedError):
                raise error

    def _abandon(self) -> None:
        """Release the workers of a group that could not be created."""
        number = next(_NUMBERS)
        for rank, process in enumerate(self.processes):
            if len(process.roles) > 1:  # the process stays, for other roles
                process.retire(self._invocation(number, rank, "__exit__"))
            process.release(self.role)
