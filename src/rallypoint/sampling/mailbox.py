"""The mailbox in front of the rollout role: every request, and every load of weights, reaches the ranks through it.

Owns: which requests there are, of which class and on which rank, and when a rank is called. Must not know: prompts,
groups, and what a response is for.

Invariants: a rank gets its requests in order of submission, and each is kept until the rank is idle. A lost rank is
sent all of them again (`resend`), and gives the same tokens: random numbers follow from seed, prompt, sample, turn and
position. Logits depend on the batch too (unless `rollout.exact`), so all of it is sent again.

Consumes: requests and weights. Produces: outputs, as responses end. Waits for: the ranks, one time slice per call.
Unblocked by: `sample`, `load`, the barrier.

Each rank is called in a loop of its own, so that none waits for a slower one, except at a watched barrier
(`rollout.over_sampling`): which groups end first must not depend on time, so all ranks take as many steps together.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from rallypoint.cluster.group import Keeper
from rallypoint.errors import GenerationError, RallyError, WorkerDiedError
from rallypoint.generation import Output, Request
from rallypoint.roles.rank_engine import SliceRequest
from rallypoint.roles.rollout import Rollouts
from rallypoint.sampling.replay import Schedule

RequestClass: TypeAlias = Literal["training", "person"]
"""Who asks: a rollout, of an episode or an agent's session, or a person at the endpoint, on a separate engine."""

_GRACE_S = 10.0
"""Seconds that ranks may take to drop cancelled requests."""
_BARRIER_STEPS = 16
"""Steps of the engines after which ranks are held where a barrier is watched."""
_PASSES = 10
"""Passes of the event loop until all that waited for a response have run: an episode, its group, its next request."""


class Barrier:
    """Holds all ranks after every slice while somebody decides what goes on.

    It is open unless it is watched. Then slices have so many steps of the engines instead of so many seconds, and all
    ranks have theirs at once, so what has ended at a barrier follows from the requests alone.

    Consumes: the ends of slices. Produces: a moment in which no rank samples. Waits for: its watchers. Unblocked by:
    `next`, and the end of watching.
    """

    def __init__(self) -> None:
        self.num_steps: int | None = None
        """Steps of a slice; None while nobody watches."""
        self._reached, self._opened = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Hold the ranks at the end of every slice, until `next` or the end of the block."""
        self.num_steps = _BARRIER_STEPS
        try:
            yield
        finally:
            self.num_steps = None
            self._opened.set()

    async def next(self) -> None:
        """Let the ranks go on, and wait until they are held again or `look` is called."""
        self._reached.clear()
        self._opened.set()
        await self._reached.wait()

    def look(self) -> None:
        """Wake those that watch, although no rank samples."""
        self._reached.set()

    async def hold(self) -> None:
        """Wait at the end of a slice until the barrier is open."""
        if self.num_steps is not None:
            await self._let_others_go_on()
            self._opened.clear()
            self._reached.set()
            await self._opened.wait()
            await self._let_others_go_on()

    async def _let_others_go_on(self) -> None:
        for _ in range(_PASSES):
            await asyncio.sleep(0)


@dataclasses.dataclass(slots=True, eq=False)
class KeptRequest:
    """A request from its submission until it has ended."""

    number: int
    """Number that no other request has; stands in its outputs."""
    request: Request
    """Has its prompt, its sample, and its seed, which says the turn."""
    kind: RequestClass
    rank: int
    ended: asyncio.Future[None]
    deliver: Callable[[Output], None] | None = None
    """Called with each output as it comes, and must not raise; None if only the whole response is wanted."""
    outputs: list[Output] = dataclasses.field(default_factory=list[Output])
    is_again: bool = False
    """Whether it has ended, and is sampled again because others of its batch are."""
    told: tuple[int, ...] = ()
    """Tokens that were delivered before their rank was lost, and are sampled again."""

    def receive(self, output: Output) -> None:
        """Take an output in."""
        self.outputs.append(output)
        if output.finish_reason is not None and not self.ended.done():
            self.ended.set_result(None)
        if self.deliver is not None:
            num = min(len(self.told), len(output.tokens))
            self.told = self.told[num:]
            self.deliver(output.without(num))

    def begin_again(self) -> None:
        """Forget what a lost rank has sampled, but not what was delivered of it."""
        if self.deliver is not None:
            self.told = (*(token for output in self.outputs for token in output.tokens), *self.told)
        self.outputs.clear()

    def repeats(self, output: Output) -> bool:
        """Whether an output has the tokens that were delivered before; with newer weights it may have others."""
        return all(map(operator.eq, self.told, output.tokens))


class RequestQueue:
    """The requests for one engine of every rank, each until it has ended."""

    def __init__(self, num_ranks: int) -> None:
        self._open: dict[int, KeptRequest] = {}
        self._new: list[list[KeptRequest]] = [[] for _ in range(num_ranks)]
        self._sent: list[list[KeptRequest]] = [[] for _ in range(num_ranks)]
        """What a rank was sent since it was last idle, also what has ended, but not what was cancelled."""
        self._cancelled: list[list[int]] = [[] for _ in range(num_ranks)]

    def has_work(self, rank: int) -> bool:
        """Whether a rank has to be called."""
        return bool(self._cancelled[rank]) or any(one.rank == rank for one in self._open.values())

    @property
    def open(self) -> tuple[int, ...]:
        """Numbers of the requests that have not ended, oldest first."""
        return tuple(self._open)

    def submit(
        self,
        number: int,
        request: Request,
        kind: RequestClass,
        *,
        rank: int | None = None,
        deliver: Callable[[Output], None] | None = None,
    ) -> KeptRequest:
        """Keep a request, see `KeptRequest`, and send it with the next slice; without a rank, to the least busy one."""
        if rank is None:
            load = collections.Counter(one.rank for one in self._open.values())
            rank = min(range(len(self._new)), key=lambda rank: load[rank])
        ended = asyncio.get_running_loop().create_future()
        self._open[number] = kept = KeptRequest(number, request, kind, rank, ended, deliver)
        self._new[rank].append(kept)
        return kept

    def cancel(self, number: int) -> None:
        """Give a request up, of which nothing is delivered any more; one that has ended is left alone."""
        if (kept := self._open.pop(number, None)) is not None:
            self._cancelled[kept.rank].append(number)
            for some in (self._new, self._sent):
                some[kept.rank] = [one for one in some[kept.rank] if one is not kept]
            self._end_batch(kept.rank)

    def fail(self, number: int, error: RallyError) -> None:
        """Give a request up and deliver why."""
        if (kept := self._open.get(number)) is not None:
            self.cancel(number)
            kept.receive(Output.failed(number, 0, error))

    def clear(self) -> list[KeptRequest]:
        """Cancel all requests and return them; a rank that still has some is told with the next slice."""
        given_up = list(self._open.values())
        for kept in given_up:
            self.cancel(kept.number)
        return given_up

    def resend(self, rank: int) -> None:
        """Send again all that a rank has had since it was idle, with the next slice; it has forgotten everything.

        A person who has read the beginning of a response is told that it is lost: weights may have changed since.
        """
        for kept in [one for one in self._open.values() if one.rank == rank]:
            if kept.kind == "person" and kept.outputs:
                self.fail(kept.number, GenerationError(f"rank {rank} that sampled this response was lost; ask again"))
            else:
                kept.begin_again()
        again = [one for one in self._sent[rank] if one.kind == "training" or one.number in self._open]
        for kept in again:
            kept.is_again = kept.number not in self._open
        self._new[rank], self._sent[rank] = [*again, *self._new[rank]], []
        self._cancelled[rank].clear()
        self._end_batch(rank)

    def take(self, rank: int, *, version: int, num_steps: int | None = None) -> SliceRequest:
        """Return what a rank is asked to do in the next slice; see `SliceRequest`."""
        new, cancelled = self._new[rank], self._cancelled[rank]
        self._sent[rank] += new
        self._new[rank], self._cancelled[rank] = [], []
        return SliceRequest(tuple((one.number, one.request) for one in new), tuple(cancelled), version, num_steps)

    def receive(self, outputs: Sequence[Output]) -> None:
        """Deliver what ranks have sampled; outputs of requests that were cancelled meanwhile are left out."""
        for output in outputs:
            if (kept := self._open.get(output.request_id)) is None:
                continue
            if not kept.repeats(output):
                lost = f"rank {kept.rank} that sampled this response was lost, and newer weights differ; ask again"
                self.fail(kept.number, GenerationError(lost))
                continue
            kept.receive(output)
            if output.finish_reason is not None:
                self._open.pop(output.request_id, None)
                self._end_batch(kept.rank)

    def _end_batch(self, rank: int) -> None:
        """Forget what a rank was sent if nothing of it is open; what is sampled again for its company is cancelled."""
        if not any(one.rank == rank for one in self._open.values()):
            self._cancelled[rank] += [one.number for one in self._sent[rank] if one.is_again]
            self._new[rank], self._sent[rank] = [], []


class Mailbox:
    """Keeps the requests of the rollout role, and calls its ranks."""

    def __init__(self, rollouts: Rollouts, schedule: Schedule, keeper: Keeper | None = None) -> None:
        """Begin without requests.

        Args:
            rollouts: the role that samples.
            schedule: how calls get to the ranks.
            keeper: restores a rank that was lost, whose requests are then sent again; without one they fail.
        """
        self.role, self.schedule, self._keeper = rollouts, schedule, keeper
        self._send = functools.partial(schedule.send, rollouts.advance) if schedule.has_slices else rollouts.advance
        self.version = 0
        """Version of the weights that the ranks hold."""
        self.num_loads = self._next_version = 0
        self.is_idle = asyncio.Event()
        """Set while no rank samples for training or a session."""
        self.is_idle.set()
        self.barrier = Barrier()
        self.guests = RequestQueue(rollouts.num_ranks)
        self._requests = RequestQueue(rollouts.num_ranks)
        self._pumps: dict[tuple[int, ...], asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._busy_s = [0.0] * rollouts.num_ranks

    def rank_of(self, place: int, num_prompts: int) -> int:
        """Return the rank that samples the prompt at a place in its batch; neighbouring prompts share a rank."""
        return (self.role.num_ranks * (place + 1) - 1) // num_prompts

    async def sample(
        self, request: Request, rank: int | None = None, deliver: Callable[[Output], None] | None = None
    ) -> list[Output]:
        """Sample one response and return its outputs; the last one has the finish reason.

        Requests that are submitted in the same pass of the event loop are sampled together.

        Args:
            request: what to sample.
            rank: the rank that samples it; None for the one with the fewest requests.
            deliver: see `KeptRequest`.

        Raises:
            GenerationError: the engine failed on this request.
            WorkerError: a rank failed, and all requests with it.
        """
        kept = self._requests.submit(next(self._numbers), request, "training", rank=rank, deliver=deliver)
        if self.schedule.replay is not None:
            self.schedule.replay.wake()
        self._begin_calls(kept.rank)
        try:
            await kept.ended
        except asyncio.CancelledError:
            self._requests.cancel(kept.number)
            raise
        if (error := kept.outputs[-1].error) is not None:
            raise error
        return kept.outputs

    def resend(self, rank: int) -> None:
        """Send all requests again that a rank had, which was lost and is there again."""
        self._requests.resend(rank)
        self.guests.resend(rank)
        if self._requests.has_work(rank):
            self._begin_calls(rank)

    async def refill(self, ranks: Sequence[int]) -> None:
        """See `Refiller`: give ranks that were made anew the weights of the others, and their requests."""
        for rank in ranks:
            if self.num_loads:
                await self.role.refill(rank)
            self.resend(rank)

    async def stop(self) -> None:
        """Cancel all requests of training and sessions, and wait until none is running."""
        running = [pump for pump in self._pumps.values() if not pump.done()]
        if not running:
            return
        for pump in running:
            pump.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(RallyError, TimeoutError):  # the reason for stopping is reported elsewhere
            async with asyncio.timeout(_GRACE_S):
                await self.role.forget()

    def take_busy_s(self) -> list[float]:
        """Return the seconds that each rank has sampled since the last call."""
        busy_s, self._busy_s = self._busy_s, [0.0] * self.role.num_ranks
        return busy_s

    def _begin_calls(self, rank: int) -> None:
        """Have a rank called while it has requests: in a loop of its own, or with all ranks at a barrier."""
        if any(rank in ranks and not pump.done() for ranks, pump in self._pumps.items()):
            return
        ranks = (rank,) if self.barrier.num_steps is None else tuple(range(self.role.num_ranks))
        is_alone = len(ranks) == 1 or all(pump.done() for pump in self._pumps.values())
        assert is_alone, "a barrier is watched from a moment on in which no rank samples"
        self.is_idle.clear()
        self._pumps[ranks] = pump = asyncio.create_task(self._call(ranks))
        pump.add_done_callback(self._end_calls)

    async def _call(self, ranks: tuple[int, ...]) -> None:
        """Call ranks until none of them has a request; one that was lost is called again when it was restored."""
        while any(map(self._requests.has_work, ranks)):
            try:
                await self._advance(ranks)
            except WorkerDiedError as error:
                if self._keeper is None:
                    raise
                await self._keeper.restore(error)
                if len(ranks) > 1:  # those that answered in this slice were not heard
                    await self.role.forget()
                for rank in ranks:
                    self.resend(rank)

    async def _advance(self, ranks: tuple[int, ...]) -> None:
        """Have ranks sample for a slice, and deliver what comes of it."""
        await self.role.until_whole(ranks)
        version, num_steps = self._next_version, self.barrier.num_steps
        asked = {rank: self._requests.take(rank, version=version, num_steps=num_steps) for rank in ranks}
        if len(ranks) == 1:
            slices = [await self._send(ranks[0], asked[ranks[0]])]
        else:
            slices = await asyncio.gather(*(self.role.advance(rank, one) for rank, one in asked.items()))
        for rank, one in zip(ranks, slices, strict=True):
            self._busy_s[rank] += one.busy_s
        self._requests.receive([output for one in slices for output in one.outputs])
        await self.barrier.hold()

    def _end_calls(self, pump: asyncio.Task[None]) -> None:
        """Pass a rank's error on to every caller who waits for a response."""
        error = None if pump.cancelled() else pump.exception()
        if pump.cancelled() or error is not None:
            for kept in self._requests.clear():
                if error is None:
                    kept.ended.cancel()
                elif not kept.ended.done():
                    kept.ended.set_exception(error)
        self._pumps = {these: one for these, one in self._pumps.items() if one is not pump}
        if not self._pumps:
            self.is_idle.set()

    async def advance_guests(self) -> None:
        """Have all ranks sample for persons for a slice, on their second engine; only while `is_idle` is set."""
        asked = [self.guests.take(rank, version=self._next_version) for rank in range(self.role.num_ranks)]
        for outputs in await self.role.advance_guests(asked):
            self.guests.receive(outputs)

    def announce(self, version: int, digest: str) -> None:
        """See `Subscriber`."""
        self.schedule.announce(version, digest)

    async def load(self, version: int, published: Path | None = None) -> None:
        """Load new weights, from a folder or as they arrive: between two slices, as ranks execute calls in order."""
        await self.schedule.load(version, functools.partial(self._load, version, published))
        self.version = version
        self.num_loads += 1

    async def _load(self, version: int, published: Path | None) -> str | None:
        self._next_version = version  # slices that are sent from now on run after this load
        return await self.role.load(version, published)
