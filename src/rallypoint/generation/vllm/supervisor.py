"""The life of a vLLM server.

Owns: which server there is, and which weights it has; all of it in an event loop. Must not know: requests, or when the
server sleeps. Every wait has a deadline and says what it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

from rallypoint.cluster.waiting import Wait
from rallypoint.errors import GenerationError, PublishError, WeightsMismatchError
from rallypoint.generation.vllm.client import Address, LostError, call, call_workers, is_well, load_workers, tell
from rallypoint.generation.vllm.server import ServerProcess

_LOOK_EVERY_S = 0.1
_ADAPTER = "rallypoint"
"""Name under which a server has the adapter that was published last."""


class ServerSupervisor:
    """Keeps one server with the weights that were loaded last."""

    def __init__(
        self,
        launch: Callable[[Path], ServerProcess],
        folder: Path,
        version: int,
        *,
        takes_adapters: bool,
        start_s: float,
        say: Callable[[str], None],
        voice_every_s: float = 10.0,
    ) -> None:
        self._launch, self._folder, self._start_s, self._say = launch, folder, start_s, say
        self._takes_adapters, self._voice_every_s = takes_adapters, voice_every_s
        self._server: ServerProcess | None = None
        self._knows_adapter: ServerProcess | None = None
        """The server whose HTTP process has been told that there is an adapter."""
        self.num_servers = 0
        """Servers that were started and became ready."""
        self.num_restarts = 0
        """Times that a server had to be started again, whether it became ready or not."""
        self._doubt: str | None = None
        self._held: tuple[int, Path | Literal["sent"] | None] = (version, None)
        """Version of the weights and their folder, or that ranks sent them; None for those that it begins with."""
        self._joined: ServerProcess | None = None
        """The server whose workers have connected to the ranks that send weights."""
        self.lacks_weights = False
        """Whether the server has lost what ranks sent it: it is not asked until it gets weights again."""

    @property
    def address(self) -> Address:
        """Address of the server; there is one after `revive`."""
        assert self._server is not None
        return self._server.address

    @property
    def model(self) -> str | None:
        """Name of the adapter that requests ask for; None if whole weights are served."""
        return _ADAPTER if self._takes_adapters and self._held[1] is not None else None

    @property
    def is_doubtful(self) -> bool:
        """Whether `revive` must be called before a request is sent."""
        return self._server is None or self._doubt is not None or self._server.ended() is not None

    def beat(self) -> int:
        """See `ServerProcess.beat`."""
        return self._server.beat() if self._server is not None else 0

    def doubt(self, why: str) -> None:
        """Have `revive` check whether the server is well."""
        self._doubt = self._doubt or why

    def give_up(self, why: str) -> None:
        """End the server, so that `revive` starts another one."""
        self._doubt = why
        if self._server is not None:
            self._server.stop()

    async def revive(self) -> None:
        """Wait until a healthy server holds the weights that were loaded last.

        Raises:
            GenerationError: it ended while it started, or did not start in time.
            WeightsMismatchError: it does not take the weights.
        """
        if (server := self._server) is not None:
            if server.ended() is None and await is_well(server.address):
                self._doubt = None
                return
            self.num_restarts += 1
            self._say(f"vllm is started again: {server.ended() or self._doubt or 'it does not answer'}")
            server.stop()
        self._server, self._doubt = None, None
        server = self._launch(self._folder)
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(server.stop)
            try:
                await self._make_ready(server)
            except LostError as error:
                raise GenerationError(f"vllm was lost while it started: {server.ended() or error}") from error
            otherwise.pop_all()
        self._server = server
        self.num_servers += 1

    async def _make_ready(self, server: ServerProcess) -> None:
        await self._started(server)
        await self._take_over(server)

    async def _take_over(self, server: ServerProcess) -> None:
        version, source = self._held
        if source == "sent":
            self.lacks_weights = True
            return
        if source is not None:
            await self._enter(server, version, source)
        await self._name(server)

    async def _name(self, server: ServerProcess) -> None:
        """Tell a server the version of its weights, which it has whole."""
        self.lacks_weights = False
        await call(server.address, "/update_weight_version", {"new_version": str(self._held[0])})

    async def join(self, invitation: str) -> None:
        """Have all workers of the server connect to the ranks that send weights; see `rallypoint.weights.served`.

        Raises:
            PublishError: one of them cannot, or the server was lost.
        """
        assert self._server is not None, "it is ready"
        try:
            results = await call_workers(self._server.address, "rallypoint_join", invitation)
        except LostError as error:
            self.give_up(str(error))
            raise PublishError(f"vllm was lost while it connected to the ranks that send weights: {error}") from error
        self._joined = self._server
        if wrong := [str(result["error"]) for result in results if result["error"] is not None]:
            raise PublishError(f"vllm cannot take weights from memory: {'; '.join(wrong)}")

    async def receive(self, version: int, *, is_asleep: bool = False) -> str:
        """Have the server take over weights that ranks send, as `load` does; return a digest of their checksums.

        Raises:
            WeightsMismatchError: they did not arrive whole; the server is given up, as it is when this is cancelled.
            PublishError: the server was lost.
        """
        if (server := self._server) is None or server is not self._joined:
            raise PublishError("vllm was started again since it connected to the ranks that send weights")
        self._held = version, "sent"
        self.lacks_weights = True
        try:
            async with self._paused(server, is_asleep=is_asleep):
                results = await load_workers(server.address, version, "rallypoint_receive", version)
                await self._name(server)
        except LostError as error:
            self.give_up(str(error))
            raise PublishError(f"vllm was lost while weights were sent to it: {error}") from error
        except WeightsMismatchError as error:
            self.give_up(str(error))
            raise
        except asyncio.CancelledError:
            self.give_up(f"version {version} was given up while it was sent")
            raise
        return "-".join(sorted({str(result["digest"]) for result in results}))

    @contextlib.asynccontextmanager
    async def _paused(self, server: ServerProcess, *, is_asleep: bool) -> AsyncIterator[None]:
        """Pause requests while weights change; a server that sleeps has none."""
        if is_asleep:
            yield
            return
        await call(server.address, "/pause?mode=keep")
        yield
        # Drop keys and values of the old weights; those of requests under way are computed again.
        await call(server.address, "/reset_prefix_cache?reset_running_requests=true", expect={"success": True})
        await call(server.address, "/resume")

    async def load(self, version: int, folder: Path, *, is_asleep: bool = False) -> None:
        """Load other weights; running requests pause and continue with them, of which a server that sleeps has none.

        Raises:
            WeightsMismatchError: it does not take them, and keeps the old ones.
            GenerationError: see `revive`.
        """
        before, self._held = self._held, (version, folder)
        num_servers = self.num_servers
        try:
            if self.is_doubtful:
                await self.revive()
            if self.num_servers > num_servers:
                return  # the new server began with them
            assert self._server is not None
            async with self._paused(self._server, is_asleep=is_asleep):
                await self._take_over(self._server)
        except LostError as error:
            self.give_up(str(error))
            await self.revive()
        except WeightsMismatchError:
            self._held = before
            self.give_up(f"it may hold a mixture of versions {before[0]} and {version}")
            await self.revive()
            raise

    async def change_memory(self, path: str, *, restores: bool = False) -> None:
        """Make a call whose answer does not matter, and have lost weights taken over again if it `restores` memory.

        A server that is lost is started again.

        Raises:
            GenerationError: see `revive`.
        """
        assert self._server is not None
        try:
            await call(self._server.address, path)
            if restores:
                await self._take_over(self._server)
        except LostError as error:
            self.give_up(str(error))
            await self.revive()

    def memory_bytes(self) -> int:
        """See `ServerProcess.memory_bytes`."""
        return self._server.memory_bytes() if self._server is not None else 0

    async def end(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()

    async def _started(self, server: ServerProcess) -> None:
        wait = Wait("vllm to load the model", self._start_s, self._say, every_s=self._voice_every_s)
        while not await is_well(server.address):
            wait.look()
            if (why := server.ended()) is not None:
                raise GenerationError(f"vllm did not start: {why}")
            if wait.is_over:
                raise GenerationError(f"vllm did not start in {self._start_s:g} s")
            if wait.is_due:
                said_last = server.last_said()
                wait.say_if_due(said_last and f"it said last: {said_last}")
            await asyncio.sleep(_LOOK_EVERY_S)
        if wait.has_spoken:
            self._say(f"vllm is ready after {wait.look():.0f} s")

    async def _enter(self, server: ServerProcess, version: int, folder: Path) -> None:
        """Have all workers of a server take weights over.

        Raises:
            WeightsMismatchError: one of them did not.
        """
        await load_workers(server.address, version, "rallypoint_load", str(folder))
        if self._takes_adapters and self._knows_adapter is not server:
            # The workers have it under the number 1, which vLLM gives to the first name.
            await tell(server.address, "/v1/load_lora_adapter", {"lora_name": _ADAPTER, "lora_path": str(folder)})
            self._knows_adapter = server


class SignsOfLife:
    """When a server that has work last made progress."""

    def __init__(self, supervisor: ServerSupervisor, silence_s: float) -> None:
        """Begin; `silence_s` is how long the server may have work and give no sign."""
        self._supervisor, self._silence_s = supervisor, silence_s
        self._last_beat, self._seen_at = 0, 0.0

    def note(self) -> None:
        """Count from now on."""
        self._last_beat, self._seen_at = self._supervisor.beat(), time.monotonic()

    def look(self) -> None:
        """Stop waiting for a server that makes no progress."""
        if self._supervisor.beat() != self._last_beat:
            self.note()
        elif time.monotonic() - self._seen_at > self._silence_s:
            self.note()
            self._supervisor.give_up(f"no token for {self._silence_s:g} s")
