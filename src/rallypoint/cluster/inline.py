"""The runtime without Ray: every process of a pool is a thread of this one.

For debugging, for notebooks, and where Ray is not installed. The workers, their ranks and their results
are those of the Ray runtime, bit for bit; only the speed of several ranks differs, because they share
one interpreter.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rallypoint.cluster.group import Host
from rallypoint.cluster.host import WorkerHost
from rallypoint.cluster.pool import ResourcePool

_PATIENCE_S = 30.0
"""How long a call that is under way may take to end when the runtime is shut down."""


class InlineHost:
    """A `WorkerHost` behind a thread of its own.

    The thread is a daemon: a rank that waits for one that failed cannot keep the program from ending.
    """

    def __init__(self, pool: ResourcePool, rank: int) -> None:
        self._host = WorkerHost(pool.num_cpus, pool.device)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{pool.name}-{rank}", daemon=True)
        self._thread.start()

    def create(
        self, role: str, kind: type, rank: int, num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Awaitable[None]:
        """See `Host.create`."""
        return self._submit(lambda: self._host.create(role, kind, rank, num_ranks, args, kwargs))

    def call(
        self, role: str, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Awaitable[Any]:
        """See `Host.call`."""
        del rank
        return self._submit(lambda: self._host.call(role, method, args, kwargs))

    def close(self) -> None:
        """Take no more calls."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the calls that were submitted, but not for ever."""
        self._thread.join(_PATIENCE_S)

    def _submit(self, call: Callable[[], Any]) -> Awaitable[Any]:
        outcome: Future[Any] = Future()
        self._calls.put((outcome, call))
        return asyncio.wrap_future(outcome)

    def _run(self) -> None:
        while (submitted := self._calls.get()) is not None:
            outcome, call = submitted
            if not outcome.set_running_or_notify_cancel():
                continue
            try:
                outcome.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
                outcome.set_exception(error)


class InlineRuntime:
    """Pools of threads."""

    def __init__(self) -> None:
        self._pools: dict[str, list[InlineHost]] = {}

    async def hosts(self, pool: ResourcePool) -> Sequence[Host]:
        """See `Runtime.hosts`."""
        if pool.name not in self._pools:
            self._pools[pool.name] = [InlineHost(pool, rank) for rank in range(pool.num_processes)]
        return self._pools[pool.name]

    async def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        hosts = [host for pool in self._pools.values() for host in pool]
        for host in hosts:
            host.close()
        for host in hosts:
            await asyncio.to_thread(host.join)
        self._pools.clear()
