"""The runtime without Ray: every process of a pool is a thread of this one.

For debugging, for notebooks, and where Ray is not installed. The workers, their ranks and their results
are those of the Ray runtime, bit for bit; only the speed of several ranks differs, because they share
one interpreter. Arguments and results are not copied: a worker that modifies an argument in place, which is harmless
with Ray's copies, modifies it for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import platform
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from rallypoint.cluster.call import Process
from rallypoint.cluster.capacity import Node
from rallypoint.cluster.mesh import Mesh
from rallypoint.cluster.pool import Placed, Pool, ResourcePool
from rallypoint.cluster.process import WAS_ENDED, Invocation, ProcessInfo, Pulse, WorkerProcess
from rallypoint.cluster.reference import detach
from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.cluster.watch import HangDetector, Watchdog
from rallypoint.errors import RallyError, WorkerDiedError

_PATIENCE_S = 30.0
"""Seconds that a running call may take to end when the runtime is shut down."""

_LAST_MOMENT_S = 3.0
"""The same for abandoned threads: if one returns from a library while Python shuts down, Python aborts."""


@dataclasses.dataclass(frozen=True)
class InlinePending:
    """See `Pending`."""

    invocation: Invocation
    process: InlineProcess
    handle: Future[Any]

    def future(self) -> Future[Any]:
        """See `Pending.future`."""
        return self.handle

    def error(self, raised: BaseException) -> BaseException:
        """See `Pending.error`."""
        return copy.copy(raised) if isinstance(raised, RallyError) else raised  # other calls may refer to this one

    def cancel(self) -> None:
        """See `Pending.cancel`."""
        self.process.inner.interrupt(self.invocation.number)


class InlineProcess:
    """A `WorkerProcess` behind a thread of its own.

    The thread is a daemon: a rank that waits for one that failed cannot keep the program from ending.
    """

    def __init__(self, runtime: InlineRuntime, pool: ResourcePool, index: int) -> None:
        self.inner = WorkerProcess(pool.num_threads, pool.device)
        self.info = ProcessInfo(platform.node(), "inline", os.getpid())
        self.watch = runtime.watch
        self.roles: dict[str, int] = {}
        self.pool, self._runtime = pool, runtime
        self._calls: queue.SimpleQueue[tuple[InlinePending, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._running: InlinePending | None = None
        self._lock = threading.Lock()
        self._death: Callable[[Invocation], WorkerDiedError] | None = None
        self.thread = threading.Thread(target=self._run, name=f"{pool.name}-{index}", daemon=True)
        runtime.threads.append(self.thread)
        self.thread.start()

    @property
    def ended(self) -> bool:
        """Whether it takes no more calls."""
        return self._death is not None

    def create(self, invocation: Invocation, kind: type, mesh: Mesh, args: Any, kwargs: Any) -> InlinePending:
        """See `Process.create`."""
        self.roles[invocation.role] = invocation.rank
        return self._submit(invocation, lambda: self.inner.create(invocation, kind, mesh, args, kwargs))

    def call(self, invocation: Invocation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InlinePending:
        """See `Process.call`."""
        args, kwargs, handles = detach(args, kwargs)
        return self._submit(
            invocation, lambda: self.inner.call(invocation, args, kwargs, *(handle.result() for handle in handles))
        )

    def share(self, value: Any) -> Any:
        """See `Process.share`; nothing is sent here."""
        return value

    def pulse(self) -> Future[Pulse]:
        """See `Process.pulse`."""
        answer: Future[Pulse] = Future()
        answer.set_result(self.inner.pulse())
        return answer

    def retire(self, invocation: Invocation) -> InlinePending:
        """See `Process.retire`."""
        return self._submit(invocation, lambda: self.inner.retire(invocation))

    def release(self, role: str) -> None:
        """See `Process.release`."""
        if self.roles.pop(role, None) is not None:
            self._runtime.released(self)

    def kill(self, why: WorkerDiedError) -> None:
        """See `Process.kill`; a thread cannot be killed: it is told to end, and nobody waits for it any more."""
        why.is_final = True
        self._end(lambda _: copy.copy(why))

    def end(self) -> None:
        """Take no more calls."""
        self._end(lambda invocation: invocation.died(WAS_ENDED, self.info))

    def _end(self, death: Callable[[Invocation], WorkerDiedError]) -> None:
        with self._lock:
            if self._death is not None:
                return
            self._death = death
            left = [] if self._running is None else [self._running]
            with contextlib.suppress(queue.Empty):
                while True:
                    if (submitted := self._calls.get_nowait()) is not None:
                        left.append(submitted[0])
            self._calls.put(None)
        for one in left:
            _settle(one, error=death(one.invocation))  # first: a call that is cancelled answers, too
            one.cancel()

    def _submit(self, invocation: Invocation, call: Callable[[], Any]) -> InlinePending:
        pending = InlinePending(invocation, self, Future())
        with self._lock:
            if self._death is None:
                self._calls.put((pending, call))
                return pending
            death = self._death
        _settle(pending, error=death(invocation))
        return pending

    def _run(self) -> None:
        while (submitted := self._calls.get()) is not None:
            self._running, call = submitted
            try:
                _settle(self._running, call())
            except SystemExit as asked:
                why = f"it asked its process to end: sys.exit({asked.code!r})"
                self.kill(self._running.invocation.died(why, self.info))
            except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
                _settle(self._running, error=error)
            self._running = None


def _settle(pending: InlinePending, result: Any = None, error: BaseException | None = None) -> None:
    """Give an answer, unless there is one: the call may have been abandoned meanwhile."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            pending.handle.set_result(result)
        else:
            pending.handle.set_exception(error)


class InlineRuntime:
    """Pools of threads."""

    head = None

    def __init__(self, *, log_folder: Path, silence_s: float = 60.0, say: Callable[[str], None] = print) -> None:
        self._pools: dict[ResourcePool, list[InlineProcess]] = {}
        self.threads: list[threading.Thread] = []
        """Threads of all processes, ended ones too."""
        detector = HangDetector(
            processes=self._all, silence_s=silence_s, save_stacks=_save_stacks, folder=log_folder, say=say
        )
        self.watch = Watchdog(detector)
        """Looks after the calls of all processes."""

    def hurry(self) -> None:
        """See `Runtime.hurry`; nothing here waits for anybody else's processes."""

    def tell_deaths(self, died: Callable[[WorkerDiedError], None]) -> None:
        """See `Runtime.tell_deaths`; threads die in calls only."""

    def keep_places(self) -> None:
        """See `Runtime.keep_places`; threads have none."""

    def open_rendezvous(self, scope: str) -> Rendezvous:
        """See `Runtime.open_rendezvous`: in memory."""
        return open_rendezvous("memory", scope)

    async def give_back_places(self) -> None:
        """See `Runtime.give_back_places`."""

    async def nodes(self) -> Sequence[Node]:
        """See `Runtime.nodes`; nobody counts cores for threads."""
        return ()

    async def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """See `Runtime.reserve`; threads always fit."""

    async def processes(self, pool: Pool) -> Sequence[Process]:
        """See `Runtime.processes`."""
        for source in pool.sources:
            running = self._pools.get(source, [None] * source.num_processes)
            self._pools[source] = [
                InlineProcess(self, source, index) if process is None or process.ended else process
                for index, process in enumerate(running)
            ]
        places = {source: [Placed(process, "inline") for process in self._pools[source]] for source in pool.sources}
        return pool.ranks(places)

    def released(self, process: InlineProcess) -> None:
        """End a thread without roles, and forget its pool if it was the pool's last."""
        if not process.roles:
            process.end()
        processes = self._pools.get(process.pool, [])
        if not any(one.roles for one in processes):
            for one in processes:
                one.end()
            self._pools.pop(process.pool, None)

    async def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        processes = self._all()
        for process in processes:
            process.end()
        for process in processes:
            await asyncio.to_thread(process.thread.join, _PATIENCE_S)
        for thread in self.threads:
            await asyncio.to_thread(thread.join, _LAST_MOMENT_S)
        await asyncio.to_thread(self.watch.stop)
        self._pools.clear()

    def _all(self) -> list[InlineProcess]:
        """Return the processes that have not ended."""
        return [process for pool in list(self._pools.values()) for process in pool if not process.ended]


def _save_stacks(processes: Sequence[Process], file: Path) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"=== thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    file.write_text("\n".join(stacks))
    return f"the stacks of all {len(processes)} ranks are in {file}"
