"""Requests of persons at the endpoint of a run: sampled by its rollout role while training samples nothing.

Owns: how long such a request may wait, and that each one ends. Must not know: HTTP, texts. Invariant: what training
samples does not depend on them (`RolloutWorker.advance_guests`).

Consumes: requests, from any thread. Produces: outputs, as they are sampled. Waits for: training to sample nothing, and
for weights that are being changed where they are the actor's own. Unblocked by: `submit`, a publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable

from rallypoint.errors import BusyError, GenerationError, RallyError, first_line
from rallypoint.generation import Output, Request
from rallypoint.sampling.mailbox import Mailbox

PATIENCE_S = 60.0
"""Seconds that a request may get no slice, as while a colocated actor trains."""


class GuestRequests:
    """Takes requests from any thread, as `EngineThread` does; made and run in the driver's event loop."""

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        max_request_tokens: int,
        in_place: asyncio.Event,
        log: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Begin without requests.

        Args:
            mailbox: in front of the ranks.
            max_request_tokens: tokens that prompt and response may have together.
            in_place: set while the weights are not being changed.
            log: takes what callers are not told, such as where in our files a slice has failed.
            patience_s: see `PATIENCE_S`.
        """
        self.max_request_tokens = max_request_tokens
        self._mailbox, self._in_place, self._log, self._patience_s = mailbox, in_place, log, patience_s
        self._queue = mailbox.guests
        self._loop = asyncio.get_running_loop()
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._closed: GenerationError | None = None
        self.has_failed = False
        """Always False: a process that fails is training's to end, or to go on with."""
        # The rest belongs to the loop's thread.
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._has_work = asyncio.Event()

    @classmethod
    async def open(
        cls, mailbox: Mailbox, is_published: asyncio.Event, *, max_rows: int, log: Callable[[str], None]
    ) -> GuestRequests:
        """Get the ranks of a run ready.

        Args:
            mailbox: in front of the ranks.
            is_published: set while the ranks have the actor's current weights.
            max_rows: requests that run at once on each rank.
            log: see `GuestRequests`.
        """
        in_place = is_published
        if not mailbox.role.shares_actor:  # its own copy changes within one call, between two slices
            in_place = asyncio.Event()
            in_place.set()
        longest = await mailbox.role.open_guests(max_rows)
        return cls(mailbox, max_request_tokens=longest, in_place=in_place, log=log)

    @property
    def version(self) -> int:
        """Version of the weights that are sampled from; see `GenerationEngine.version`."""
        return self._mailbox.version

    def submit(self, request: Request, deliver: Callable[[Output], None]) -> int:
        """Queue a request; `deliver` is called with each of its outputs, in the loop's thread, and must not raise.

        Raises:
            GenerationError: the run has ended.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed
            number = next(self._numbers)
            self._loop.call_soon_threadsafe(self._take_in, number, request, deliver)
        return number

    def cancel(self, request_id: int) -> None:
        """Give a request up; one that has ended is left alone."""
        with self._lock:
            if self._closed is None:
                self._loop.call_soon_threadsafe(self._drop, request_id)

    def close(self) -> None:
        """Refuse everything from now on, and end what is under way."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = GenerationError("the run has ended, and with it this endpoint")
            self._loop.call_soon_threadsafe(self._fail_all, self._closed)

    async def run(self) -> None:
        """Have requests sampled, slice by slice, until cancelled."""
        while True:
            await self._has_work.wait()
            while not (self._mailbox.is_idle.is_set() and self._in_place.is_set()):
                await self._mailbox.is_idle.wait()
                await self._in_place.wait()
            if not any(map(self._queue.has_work, range(self._mailbox.role.num_ranks))):
                self._has_work.clear()
                continue
            served = self._queue.open
            try:
                await self._mailbox.advance_guests()
            except RallyError as error:
                # Training meets what is wrong by itself, if it is more than one of these requests.
                self._fail_all(GenerationError(f"these requests failed and are lost: {first_line(error)}"))
                with contextlib.suppress(Exception):  # such as a full disk: others wait for their answers
                    self._log(f"requests of persons failed: {error}")
                continue
            for number in set(served) & self._timers.keys():
                self._wait_for(number)

    def _take_in(self, number: int, request: Request, deliver: Callable[[Output], None]) -> None:
        def hand_over(output: Output) -> None:
            if output.finish_reason is not None:
                self._timers.pop(number).cancel()
            deliver(output)

        self._queue.submit(number, request, "person", deliver=hand_over)
        self._wait_for(number)
        self._has_work.set()

    def _wait_for(self, number: int) -> None:
        """Count the time without a slice from now on."""
        if number in self._timers:
            self._timers[number].cancel()
        self._timers[number] = self._loop.call_later(self._patience_s, self._expire, number)

    def _expire(self, number: int) -> None:
        message = f"the model is being trained and had no time for this request within {self._patience_s:g} s; "
        self._queue.fail(number, BusyError(f"{message}try again"))
        self._has_work.set()

    def _drop(self, number: int) -> None:
        """Forget a request, and have its rank forget it."""
        if number in self._timers:
            self._timers.pop(number).cancel()
            self._queue.cancel(number)
            self._has_work.set()

    def _fail_all(self, error: RallyError) -> None:
        for number in self._queue.open:
            self._queue.fail(number, error)
        self._has_work.set()
