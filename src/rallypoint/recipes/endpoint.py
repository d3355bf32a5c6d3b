"""A run in training that answers: OpenAI's API in front of its rollout role. Needs the extra `serve`.

Owns: the port, the key, that both end with the run, and that the run never ends with them: what becomes of the endpoint
once the run has begun is said, and training goes on. Requests are sampled by the rollout role while training
samples nothing: how long one may wait, and that each one ends, is owned here, too. Must not know: texts. Invariant:
what training samples does not depend on them (`RolloutWorker.advance_guests`).

Guests consume requests, from any thread, and produce outputs, as they are sampled. They wait for training to sample
nothing, and for weights that are being changed where they are the actor's own. Unblocked by: `submit`, a publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from rallypoint.disk import naming
from rallypoint.errors import BusyError, DiskError, GenerationError, RallyError, ServingError, first_line
from rallypoint.generation import Output, Request
from rallypoint.journal import Entry, Journal, RolesStarted, StepDone, Validated
from rallypoint.observability.exposition import exposition
from rallypoint.prepare.material import Material
from rallypoint.run.folder import RunFolder
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.serving import Access, Bridge, Codec, Model, Server, bind, make_app

_HOST = "127.0.0.1"
_MAX_CONCURRENCY, _MAX_BODY_BYTES = 64, 4 * 2**20
_GRACE_S = 5.0


class Endpoint:
    """Takes the port at once, and answers once it was opened."""

    def __init__(self, port: int, folder: RunFolder, journal: Journal) -> None:
        """Take a port of this machine.

        Raises:
            ServingError: it is taken.
        """
        self._socket, self._key = bind(_HOST, port), secrets.token_urlsafe(24)
        self._port = self._socket.getsockname()[1]
        self._folder, self._journal = folder, journal
        self._server: Server | None = None
        self._guests: GuestRequests | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closing = False
        self._step, self._metrics = 0, dict[str, float]()
        journal.subscribe(self._hear)

    async def open(self, material: Material, mailbox: Mailbox, is_published: asyncio.Event) -> None:
        """Begin to answer; the weights were published."""
        if self._is_closing:  # `reopen` has said why
            return
        guests = await GuestRequests.open(mailbox, is_published, max_rows=_MAX_CONCURRENCY, log=self._folder.log)
        self._guests, self._running = guests, asyncio.create_task(guests.run())
        self._running.add_done_callback(self._hear_guests)
        # Of its own: tokenizers change their settings while they encode, and training decodes meanwhile.
        tokenizer = copy.deepcopy(material.tokenizer)
        name = self._folder.path.name
        served = Model(
            name=name,
            engine=guests,
            bridge=Bridge(guests, max_concurrency=_MAX_CONCURRENCY),
            codec=Codec(tokenizer),
            stop_tokens=material.stop_tokens,
        )
        access = Access(keys=(self._key,), hosts=(_HOST, "localhost"), max_body_bytes=_MAX_BODY_BYTES)
        server = Server(
            make_app(served, access, self.measured),
            self._socket,
            grace_s=_GRACE_S,
            on_end=self._hear_end,
            say=self._write_down,
        )
        try:
            _write_secret(self._folder.endpoint_key, self._key)
            await asyncio.to_thread(server.start)
        except (ServingError, DiskError) as error:
            self._journal.say(f"no endpoint, the run goes on without: {error}")
            return
        self._server = server
        self._journal.say(
            f"answering as {name!r} at http://{_HOST}:{self._port}/v1; the key is in {self._folder.endpoint_key}"
        )

    async def close(self) -> None:
        """Accept no more, let what is under way end for some seconds, and give the rest up."""
        self._is_closing = True
        if self._server is not None and self._guests is not None:
            # Slices are taken in this loop meanwhile.
            await asyncio.to_thread(self._server.stop, self._guests.close)
        elif self._guests is not None:
            self._guests.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        with contextlib.suppress(OSError):
            self._folder.endpoint_key.unlink(missing_ok=True)
        self._socket.close()

    async def reopen(self) -> None:
        """Close, and take the port again, for roles that are started anew; if it is taken, the run goes on without."""
        await self.close()
        self._server = self._guests = self._running = None
        try:
            self._socket, self._is_closing = bind(_HOST, self._port), False
        except ServingError as error:
            self._journal.say(f"no endpoint, the run goes on without: {error}")

    def _hear(self, entry: Entry) -> None:
        """Remember the newest numbers."""
        match entry.event:
            case RolesStarted(step=step, metrics=metrics) | StepDone(step=step, metrics=metrics):
                self._step, self._metrics = step, {**self._metrics, **metrics}
            case Validated(metrics=metrics):
                self._metrics = {**self._metrics, **metrics}
            case _:
                pass

    def measured(self) -> str:
        """Return the newest numbers as Prometheus reads them."""
        return exposition({self._folder.path.name: (self._step, self._metrics)})

    def _hear_end(self) -> None:
        """Say so if the server has ended by itself; called in its thread."""
        if not self._is_closing and self._server is not None:
            self._write_down("the endpoint has ended by itself; the run goes on without")

    def _hear_guests(self, running: asyncio.Task[None]) -> None:
        """Refuse requests if what answers them has failed."""
        if self._guests is not None and not running.cancelled() and (error := running.exception()):
            self._write_down(f"requests are not answered any more: {error!r}")
            self._guests.close()

    def _write_down(self, line: str) -> None:
        """Log what happens to the endpoint."""
        self._folder.try_log(f"endpoint: {line}")


def _write_secret(path: Path, text: str) -> None:
    """Write a file that nobody else can read, not even for a moment."""
    with naming(path):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)


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
                    self._log(f"requests to the endpoint failed: {error}")
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
