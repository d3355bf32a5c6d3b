"""The life of a server: started, made to hold the right weights, looked after, started again.

Owns: which server there is and what it holds. Must not know: requests. All coroutines are for one event loop, and only
one of them runs at a time. Every wait has a deadline and says what it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rallypoint.cluster.waiting import Wait
from rallypoint.errors import GenerationError, WeightsMismatchError
from rallypoint.generation.vllm.client import Address, LostError, ask
from rallypoint.generation.vllm.server import Server

_LOOK_EVERY_S = 0.1
_HEALTH_S, _CALL_S = 10.0, 600.0
_ADAPTER = "rallypoint"
"""Name under which a server has the adapter that was published last."""


class Control:
    """Keeps one server with the weights that were loaded last."""

    def __init__(
        self,
        launch: Callable[[Path], Server],
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
        self._server: Server | None = None
        self._knows_adapter: Server | None = None
        """The server whose front knows that there is an adapter."""
        self.num_servers = 0
        """That were started, so far as they came to be ready."""
        self.num_restarts = 0
        """How often another one had to be started, whether it came to be ready or not."""
        self._doubt: str | None = None
        self._held: tuple[int, Path | None] = (version, None)
        """Version of the weights and their folder; None for those that a server begins with."""

    @property
    def address(self) -> Address:
        """Of the server; there is one after `revive`."""
        assert self._server is not None
        return self._server.address

    @property
    def model(self) -> str | None:
        """What requests have to ask for by name; None for what the server began with, or whole weights in its place."""
        return _ADAPTER if self._takes_adapters and self._held[1] is not None else None

    @property
    def is_doubtful(self) -> bool:
        """Whether `revive` has to be called before anything is asked."""
        return self._server is None or self._doubt is not None or self._server.ended() is not None

    def beat(self) -> int:
        """See `Server.beat`."""
        return self._server.beat() if self._server is not None else 0

    def doubt(self, why: str) -> None:
        """Have `revive` look whether the server is well."""
        self._doubt = self._doubt or why

    def give_up(self, why: str) -> None:
        """End the server, so that `revive` starts another one."""
        self._doubt = why
        if self._server is not None:
            self._server.stop()

    async def revive(self) -> None:
        """Return when a server is well and holds the weights that were loaded last.

        Raises:
            GenerationError: it ended while it started, or did not start in time.
            WeightsMismatchError: it does not take the weights.
        """
        if (server := self._server) is not None:
            if server.ended() is None and await self._is_well(server):
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

    async def _make_ready(self, server: Server) -> None:
        await self._started(server)
        version, folder = self._held
        if folder is not None:
            await self._enter(server, version, folder)
        await self._call(server, "/update_weight_version", {"new_version": str(version)})

    async def load(self, version: int, folder: Path) -> None:
        """Have the server hold other weights; requests under way wait and go on with them.

        Raises:
            WeightsMismatchError: it does not take them; it holds those of before.
            GenerationError: see `revive`.
        """
        before, self._held = self._held, (version, folder)
        num_servers = self.num_servers
        try:
            if self.is_doubtful:
                await self.revive()
            if self.num_servers > num_servers:
                return  # it began with them
            assert self._server is not None
            await self._call(self._server, "/pause?mode=keep")
            await self._enter(self._server, version, folder)
            # Keys and values of the weights before go, also those of requests under way, which are computed again.
            await self._call(self._server, "/reset_prefix_cache?reset_running_requests=true", expect={"success": True})
            await self._call(self._server, "/update_weight_version", {"new_version": str(version)})
            await self._call(self._server, "/resume")
        except LostError as error:
            self.give_up(str(error))
            await self.revive()
        except WeightsMismatchError:
            self._held = before
            self.give_up(f"it may hold a mixture of versions {before[0]} and {version}")
            await self.revive()
            raise

    async def call(self, path: str) -> None:
        """Have the server do something that has no answer; a server that is lost is started again.

        Raises:
            GenerationError: see `revive`.
        """
        assert self._server is not None
        try:
            await self._call(self._server, path)
        except LostError as error:
            self.give_up(str(error))
            await self.revive()

    def memory_bytes(self) -> int:
        """See `Server.memory_bytes`."""
        return self._server.memory_bytes() if self._server is not None else 0

    async def end(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()

    async def _started(self, server: Server) -> None:
        wait = Wait("vllm to load the model", self._start_s, self._say, every_s=self._voice_every_s)
        while not await self._is_well(server):
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

    async def _is_well(self, server: Server) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_S), ask(server.address, "GET", "/health") as answer:
                return answer.status == 200
        except (LostError, TimeoutError):
            return False

    async def _enter(self, server: Server, version: int, folder: Path) -> None:
        """Have all workers of a server take weights over.

        Raises:
            WeightsMismatchError: one of them did not.
        """
        asked = {"method": "rallypoint_load", "args": [str(folder)]}
        results = (await self._call(server, "/collective_rpc", asked))["results"]
        wrong = [
            str(result["error"] or f"it holds version {result['version']}")
            for result in results
            if result["error"] is not None or result["version"] != version
        ]
        if wrong or not results:
            raise WeightsMismatchError(f"version {version} was not loaded by vllm: {'; '.join(wrong) or 'no worker'}")
        if self._takes_adapters and self._knows_adapter is not server:
            # The workers have it under the number 1, which is the one that the first name is given.
            await self._tell(server, "/v1/load_lora_adapter", {"lora_name": _ADAPTER, "lora_path": str(folder)})
            self._knows_adapter = server

    async def _call(
        self, server: Server, path: str, body: dict[str, Any] | None = None, expect: dict[str, Any] | None = None
    ) -> Any:
        """Return what a call answers, which is JSON or nothing.

        Raises:
            LostError: it failed, did not answer in time, or another thing than what is expected.
        """
        whole = await self._tell(server, path, body)
        shown = whole[:500].decode(errors="replace")
        try:
            said = json.loads(whole) if whole else None
        except ValueError as error:
            raise LostError(f"{path} answered nonsense: {shown}") from error
        if expect is not None and said != expect:
            raise LostError(f"{path} answered {shown}")
        return said

    async def _tell(self, server: Server, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return what a call answers, as it came.

        Raises:
            LostError: it failed, or did not answer in time.
        """
        data = json.dumps(body).encode() if body is not None else b""
        try:
            async with asyncio.timeout(_CALL_S), ask(server.address, "POST", path, data) as answer:
                whole = await answer.whole()
        except TimeoutError as error:
            raise LostError(f"{path} did not answer in {_CALL_S:g} s") from error
        if answer.status != 200:
            raise LostError(f"{path} answered with status {answer.status}: {whole[:500].decode(errors='replace')}")
        return whole
