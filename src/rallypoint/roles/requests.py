"""Requests on their way to the ranks that sample, and outputs on their way back.

Owns: both ends of the way: the driver's queue, and the engine of a rank. Must not know: who asks, and what a
response is for. Invariant: a rank gets its requests in the order in which they were submitted.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from rallypoint.errors import RallyError, RequestError
from rallypoint.generation import GenerationEngine, Output, Request

SLICE_S = 0.25
"""Seconds that a rank samples before it answers, if no request ends."""
_SHORTEST_SLICE_S = 0.1
"""Seconds that a rank samples before it answers although a request has ended; an answer costs a millisecond or two."""


@dataclasses.dataclass(frozen=True, slots=True)
class SliceRequest:
    """What one rank is asked to do in the next slice of time."""

    new: tuple[tuple[int, Request], ...] = ()
    """Requests to begin with, each with the driver's number for it."""
    cancelled: tuple[int, ...] = ()
    """Numbers of requests to give up."""
    version: int = 0
    """Version of the weights to sample from."""
    num_steps: int | None = None
    """Steps of the engine to take; None: as many as a slice of time has."""


@dataclasses.dataclass(frozen=True, slots=True)
class SliceResult:
    """What a rank has done in a slice of time."""

    outputs: tuple[Output, ...] = ()
    num_steps: int = 0
    """Steps that its engine has taken."""
    busy_s: float = 0.0
    """Seconds that it has sampled."""


def failed_output(number: int, version: int, error: RallyError) -> Output:
    """Return the last output of a request that has failed."""
    return Output(
        request_id=number,
        tokens=(),
        logprobs=(),
        sampled_logprobs=(),
        version=version,
        finish_reason="failed",
        error=error,
    )


class RankEngine:
    """An engine, whose requests have the driver's numbers."""

    def __init__(self, engine: GenerationEngine, tick: Callable[[], None]) -> None:
        self.engine, self._tick = engine, tick
        self._numbers: dict[int, int] = {}

    def take(self, asked: SliceRequest, *, streamed: bool = False) -> list[Output]:
        """Begin with requests and give others up; return the ends of those that the engine refuses."""
        refused: list[Output] = []
        for number, request in asked.new:
            sent = dataclasses.replace(request, streamed=True) if streamed and not request.streamed else request
            try:
                self._numbers[self.engine.submit(sent)] = number
            except RequestError as error:
                refused.append(failed_output(number, self.engine.version, error))
        if asked.cancelled:
            cancelled = set(asked.cancelled)
            for request_id, number in self._numbers.items():
                if number in cancelled:
                    self.engine.cancel(request_id)
        return refused

    def sample(self, *, until_one_ends: bool, num_steps: int | None = None) -> SliceResult:
        """Step so many times, or for a slice of time; no longer than there is a request."""
        outputs: list[Output] = []
        began, has_ended, num_taken = time.monotonic(), False, 0
        while self.engine.has_work and num_taken != num_steps:
            num_taken += 1
            for output in self.engine.step():
                number = self._numbers[output.request_id]
                if output.finish_reason is not None:
                    del self._numbers[output.request_id]
                    has_ended = True
                outputs.append(dataclasses.replace(output, request_id=number))
            self._tick()
            slice_s = _SHORTEST_SLICE_S if has_ended and until_one_ends else SLICE_S
            if num_steps is None and time.monotonic() - began >= slice_s:
                break
        return SliceResult(tuple(outputs), num_taken, time.monotonic() - began)

    def clear(self) -> None:
        """Forget all requests; the engine is asleep."""
        for request_id in self._numbers:
            self.engine.cancel(request_id)
        self._numbers.clear()
        self.engine.step()  # asleep, it only ends what was cancelled


_STEPS = 16
"""Steps of the engines after which ranks are held where a gate is watched."""
_PASSES = 10
"""Passes of the event loop in which whoever waited for a response goes on: an episode, its group, its next request."""


class Gate:
    """Holds the ranks after every slice while somebody decides what goes on.

    It is open unless it is watched. Then slices have so many steps of the engines instead of so many seconds, so what
    has ended at a gate follows from the requests alone.

    Consumes: the ends of slices. Produces: a moment in which no rank samples. Waits for: whoever watches. Unblocked by:
    `next`, and the end of watching.
    """

    def __init__(self) -> None:
        self.num_steps: int | None = None
        """Steps of a slice; None while nobody watches."""
        self._reached, self._opened = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Hold the ranks at the end of every slice, until `next` or the end of the block."""
        self.num_steps = _STEPS
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
        """Let whoever watches look, although no rank samples."""
        self._reached.set()

    async def hold(self) -> None:
        """Wait at the end of a slice until the gate is open."""
        if self.num_steps is None:
            return
        await self._let_others_go_on()
        self._opened.clear()
        self._reached.set()
        await self._opened.wait()
        await self._let_others_go_on()

    async def _let_others_go_on(self) -> None:
        for _ in range(_PASSES):
            await asyncio.sleep(0)


Advance = Callable[[Sequence[SliceRequest]], Awaitable[Sequence[Sequence[Output]]]]
"""Has every rank do what it is asked, and returns the outputs of each."""


class RequestQueue:
    """Requests of one kind on their way to the ranks, and their outputs on their way back; all in the driver's loop."""

    def __init__(self, num_ranks: int, advance: Advance, version: Callable[[], int], gate: Gate | None = None) -> None:
        """Begin without requests.

        Args:
            num_ranks: that there are.
            advance: calls all of them.
            version: of the weights that they sample from when they are called.
            gate: where they may be held between two slices.
        """
        self._advance, self._version, self._gate = advance, version, gate or Gate()
        self._open: dict[int, tuple[int, Callable[[Output], None]]] = {}
        self._new: list[list[tuple[int, Request]]] = [[] for _ in range(num_ranks)]
        self._cancelled: list[list[int]] = [[] for _ in range(num_ranks)]

    @property
    def has_work(self) -> bool:
        """Whether the ranks have to be called."""
        return bool(self._open) or any(self._cancelled)

    @property
    def open(self) -> tuple[int, ...]:
        """Numbers of the requests that have not ended, oldest first."""
        return tuple(self._open)

    def submit(self, number: int, request: Request, deliver: Callable[[Output], None], rank: int | None = None) -> None:
        """Queue a request; `deliver` is called with each of its outputs, and must not raise.

        Args:
            number: that no other request has; stands in its outputs.
            request: what is asked for.
            deliver: takes the outputs.
            rank: to sample it; None: that with the fewest requests.
        """
        if rank is None:
            load = collections.Counter(taken for taken, _ in self._open.values())
            rank = min(range(len(self._new)), key=lambda rank: load[rank])
        self._open[number] = (rank, deliver)
        self._new[rank].append((number, request))

    def cancel(self, number: int) -> None:
        """Give a request up, of which nothing is delivered any more; one that has ended is left alone."""
        if number in self._open:
            rank, _ = self._open.pop(number)
            self._cancelled[rank].append(number)

    def fail(self, number: int, error: RallyError) -> None:
        """Give a request up and deliver why."""
        if number in self._open:
            _, deliver = self._open[number]
            self.cancel(number)
            deliver(failed_output(number, 0, error))

    def clear(self) -> None:
        """Forget all requests; a rank that still has some is told with the next slice."""
        for number, (rank, _) in self._open.items():
            self._cancelled[rank].append(number)
        for each in (self._open, *self._new):
            each.clear()

    async def advance(self) -> None:
        """Have every rank sample for a slice of time, and deliver what comes of it."""
        asked = [
            SliceRequest(
                tuple(one for one in new if one[0] in self._open),
                tuple(cancelled),
                self._version(),
                self._gate.num_steps,
            )
            for new, cancelled in zip(self._new, self._cancelled, strict=True)
        ]
        for sent in (*self._new, *self._cancelled):
            sent.clear()
        for output in itertools.chain.from_iterable(await self._advance(asked)):
            waiting = self._open.get(output.request_id)
            if waiting is None:  # it was given up meanwhile
                continue
            if output.finish_reason is not None:
                del self._open[output.request_id]
            waiting[1](output)
        await self._gate.hold()
