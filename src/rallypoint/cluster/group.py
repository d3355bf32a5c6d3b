"""N workers that act as one, and the runtime that holds their processes.

A call names the worker's method itself, so that an editor jumps to it and a type checker knows its
arguments and result:

    logprobs = await group.call(ActorWorker.logprobs, batch)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from rallypoint.cluster.dispatch import rule_of
from rallypoint.cluster.pool import ResourcePool
from rallypoint.errors import WorkerError

_PATIENCE_S = 10.0
"""How long the rank that failed first may take to say so after another one stopped because of it."""

WorkerT = TypeVar("WorkerT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


class Host(Protocol):
    """The driver's end of one process; calls are executed one after another, in order of submission."""

    def create(
        self, role: str, kind: type, rank: int, num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Awaitable[None]:
        """See `WorkerHost.create`."""
        ...

    def call(
        self, role: str, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Awaitable[Any]:
        """Submit now, return what can be awaited; see `WorkerHost.call`."""
        ...


class Runtime(Protocol):
    """Where processes come from."""

    async def hosts(self, pool: ResourcePool) -> Sequence[Host]:
        """Return the processes of a pool, in rank order; the same ones for every role placed on it."""
        ...

    async def shutdown(self) -> None:
        """End every process; nothing is left behind."""
        ...


class WorkerGroup(Generic[WorkerT]):
    """The workers of one role."""

    def __init__(self, role: str, hosts: Sequence[Host]) -> None:
        self.role = role
        self.hosts = tuple(hosts)

    @classmethod
    async def create(
        cls,
        role: str,
        kind: Callable[Concatenate[Any, P], WorkerT],
        hosts: Sequence[Host],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> WorkerGroup[WorkerT]:
        """Make one worker on each host.

        Args:
            role: what the model is for; names the group in errors.
            kind: the worker's class; its first argument is a `WorkerContext`, added here.
            hosts: in rank order.
            *args: for every worker's constructor.
            **kwargs: for every worker's constructor.
        """
        making = [
            host.create(role, cast("type", kind), rank, len(hosts), args, kwargs) for rank, host in enumerate(hosts)
        ]
        await _all(making)
        return WorkerGroup(role, hosts)

    async def call(
        self,
        method: Callable[Concatenate[WorkerT, P], ResultT],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """Call a method by its rule and return its joined result.

        Raises:
            WorkerError: a rank raised; the first one's traceback is shown.
            WorkerDiedError: a process ended.
        """
        rule = rule_of(method)
        parts = rule.split(len(self.hosts), args, kwargs)
        waiting = [
            host.call(self.role, rank, method.__name__, part.args, part.kwargs)
            for rank, (host, part) in enumerate(zip(self.hosts, parts, strict=False))
        ]
        return cast("ResultT", rule.join(await _all(waiting)))


async def _all(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    """Wait for all; when one fails, stop waiting for the others and raise what failed first.

    A rank that stopped only because another one did is not what failed first: the other is waited for, shortly.
    """
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending and all(_is_consequence(task) for task in done if task.exception()):
            await asyncio.wait(pending, timeout=_PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception()]
        if not failed:
            return [task.result() for task in tasks]
        cause = next((task for task in failed if not _is_consequence(task)), failed[0])
        return cause.result()  # raises
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_consequence(task: asyncio.Future[Any]) -> bool:
    error = task.exception()
    return isinstance(error, WorkerError) and error.is_consequence
