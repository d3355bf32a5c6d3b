"""A run in training that answers: OpenAI's API in front of its rollout role. Needs the extra `serve`.

Owns: the port, the key, that both end with the run, and that the run never ends with them: what becomes of the endpoint
once the run has begun is said, and training goes on. Must not know: how requests find their time beside training.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import secrets
from pathlib import Path

from rallypoint.disk import naming
from rallypoint.errors import DiskError, ServingError
from rallypoint.journal import Journal
from rallypoint.recipes.material import Material
from rallypoint.run.folder import RunFolder
from rallypoint.sampling.guests import GuestRequests
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
        self._socket = bind(_HOST, port)
        self._folder, self._journal = folder, journal
        self._server: Server | None = None
        self._guests: GuestRequests | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closing = False

    async def open(self, material: Material, mailbox: Mailbox, is_published: asyncio.Event) -> None:
        """Begin to answer; the weights were published."""
        guests = await GuestRequests.open(mailbox, is_published, max_rows=_MAX_CONCURRENCY, log=self._folder.log)
        self._guests, self._running = guests, asyncio.create_task(guests.run())
        self._running.add_done_callback(self._hear_guests)
        # Of its own: tokenizers change their settings while they encode, and training decodes meanwhile.
        tokenizer = copy.deepcopy(material.tokenizer)
        name, (_, port) = self._folder.path.name, self._socket.getsockname()
        served = Model(
            name=name,
            engine=guests,
            bridge=Bridge(guests, max_concurrency=_MAX_CONCURRENCY),
            codec=Codec(tokenizer),
            stop_tokens=material.stop_tokens,
        )
        key = secrets.token_urlsafe(24)
        access = Access(keys=(key,), hosts=(_HOST, "localhost"), max_body_bytes=_MAX_BODY_BYTES)
        server = Server(
            make_app(served, access), self._socket, grace_s=_GRACE_S, on_end=self._hear_end, say=self._write_down
        )
        try:
            _write_secret(self._folder.endpoint_key, key)
            await asyncio.to_thread(server.start)
        except (ServingError, DiskError) as error:
            self._journal.say(f"no endpoint, the run goes on without: {error}")
            return
        self._server = server
        self._journal.say(
            f"answering as {name!r} at http://{_HOST}:{port}/v1; the key is in {self._folder.endpoint_key}"
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
        """Log what happens to the endpoint; where that cannot be done, the run will meet the reason itself."""
        with contextlib.suppress(DiskError):
            self._folder.log(f"endpoint: {line}")


def _write_secret(path: Path, text: str) -> None:
    """Write a file that nobody else can read, not even for a moment."""
    with naming(path):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
