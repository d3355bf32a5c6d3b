"""Rooms in a named Ray actor, which wakes those who wait and ends with the job that opened it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rallypoint.cluster.ray_thread import AnswerT, Ask, is_held_by_ray
from rallypoint.cluster.rendezvous.leases import LOOKS_PER_LEASE
from rallypoint.cluster.rendezvous.memory import RoomKeeper
from rallypoint.errors import RendezvousError, RendezvousUnreachableError

if TYPE_CHECKING:
    from rallypoint.cluster.rendezvous.protocol import Change
    from rallypoint.cluster.rendezvous.room import Room

_ANSWER_S = 60.0
"""Seconds that a call may take if it does not wait for other ranks."""
_MAX_WAITING = 100_000
"""Most calls that the actor serves at once; each waiting rank is one."""


class _KeeperActor:
    """A keeper on one event loop."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._keeper = RoomKeeper()
        self._news = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._looking = asyncio.create_task(self._look())

    async def transact(self, name: str, change: Change, wait_s: float) -> Room | RendezvousError:
        async with self._news:
            outcome, is_news = self._keeper.transact(name, change)
            if is_news:
                self._news.notify_all()
        if is_news or wait_s <= 0 or isinstance(outcome, RendezvousError):
            return outcome
        return await self.wait(name, outcome.news, wait_s)

    async def wait(self, name: str, news: int, timeout_s: float) -> Room:
        async with self._news:
            with contextlib.suppress(TimeoutError):
                is_news = self._news.wait_for(lambda: self._keeper.room(name).news != news)
                await asyncio.wait_for(is_news, timeout_s)
        return self._keeper.room(name)

    async def renew(self, name: str, incarnation: str) -> None:
        self._keeper.renew(name, incarnation)

    async def release(self, incarnation: str) -> None:
        self._keeper.release(incarnation)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / LOOKS_PER_LEASE)
            async with self._news:
                if self._keeper.look():
                    self._news.notify_all()


def _ask_directly(what: str, question: Callable[[], AnswerT], *, needs_gcs: bool = True) -> AnswerT:
    del what, needs_gcs
    return question()


class RayRooms:
    """See `Rooms`: calls to the actor. Copies in other processes hold its handle; the job that opened it owns it."""

    def __init__(self, actor: Any, lease_s: float, towards: str) -> None:
        self._actor, self.lease_s, self.towards = actor, lease_s, towards
        self._renewed: dict[str, ray.ObjectRef] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self._actor, self.lease_s, self.towards))

    @classmethod
    def open(cls, scope: str, lease_s: float, ask: Ask = _ask_directly) -> RayRooms:
        """Start the Ray actor on the driver's node: when that node is lost, so is the job.

        Args:
            scope: the run's unique id.
            lease_s: see `Rooms`.
            ask: has Ray asked where it can be waited for.

        Raises:
            RendezvousError: this scope is open already.
        """
        return ask("Ray to open the rendezvous", lambda: cls._opened(scope, lease_s))

    @classmethod
    def _opened(cls, scope: str, lease_s: float) -> RayRooms:
        context = ray.get_runtime_context()
        options: dict[str, Any] = {
            "name": f"rendezvous of {scope}",
            "num_cpus": 0,
            "max_concurrency": _MAX_WAITING,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True),
        }
        try:
            actor = ray.remote(_KeeperActor).options(**options).remote(lease_s)
        except ValueError as error:
            raise RendezvousError(f"the rendezvous of scope {scope!r} is open already: {error}") from None
        rooms = cls(actor, lease_s, context.gcs_address.rsplit(":", 1)[0].strip("[]"))
        rooms._call("start")
        return rooms

    def transact(self, name: str, change: Change, wait_s: float = 0.0) -> Room | RendezvousError:
        """See `Rooms.transact`."""
        return self._call("transact", name, change, wait_s, answer_s=wait_s + _ANSWER_S)

    def wait(self, name: str, news: int, timeout_s: float) -> Room:
        """See `Rooms.wait`."""
        return self._call("wait", name, news, timeout_s, answer_s=timeout_s + _ANSWER_S)

    def renew(self, name: str, incarnation: str) -> None:
        """See `Rooms.renew`; the answer to the last one is looked at before the next, and is there by then."""
        if incarnation in self._renewed:
            self._answer("renew", self._renewed[incarnation], _ANSWER_S)
        self._renewed[incarnation] = self._ask("renew", name, incarnation)

    def release(self, incarnation: str) -> None:
        """See `Rooms.release`; nobody needs the answer."""
        self._renewed.pop(incarnation, None)
        self._ask("release", incarnation)

    def close(self) -> None:
        """See `Rooms.close`; of a Ray that is not well nothing is asked, and the actor goes with the job."""
        if ray.is_initialized() and not is_held_by_ray():
            ray.kill(self._actor)

    def _call(self, method: str, *args: object, answer_s: float = _ANSWER_S) -> Any:
        return self._answer(method, self._ask(method, *args), answer_s)

    def _ask(self, method: str, *args: object) -> Any:
        """Send a call; an actor gets those of one process in their order."""
        if not ray.is_initialized():  # a call would start a new Ray
            raise RendezvousUnreachableError("the rendezvous went away with Ray, which was shut down")
        return getattr(self._actor, method).remote(*args)

    def _answer(self, method: str, asked: Any, answer_s: float) -> Any:
        try:
            return ray.get(asked, timeout=answer_s)
        except RayActorError as error:
            reason = str(error).splitlines()[0]
            raise RendezvousUnreachableError(f"the Ray actor that keeps the rendezvous is gone: {reason}") from None
        except GetTimeoutError:
            message = f"the Ray actor that keeps the rendezvous did not answer {method} within {answer_s:.0f} s"
            raise RendezvousUnreachableError(message) from None
