"""The life of a vLLM server, and the thread in which it is talked to.

Owns: which server there is, its weights, whether it holds its memory (`ServerSupervisor`, in an event loop);
the loop's thread and the folder that both processes see (`VllmConnection`, for callers). Must not know: requests.

Several engines may share a connection; only one of them is awake at a time. Every wait has a deadline and says what it
waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from rallypoint.cluster.waiting import Wait
from rallypoint.errors import GenerationError, WeightsMismatchError
from rallypoint.generation.vllm.client import Address, LostError, send
from rallypoint.generation.vllm.server import OwnFolder, VllmServer

ResultT = TypeVar("ResultT")

_LOOK_S = 0.05
"""How long `is_ready` waits, so that callers that ask in a loop do not spin."""
_LOOK_EVERY_S = 0.1
_HEALTH_S, _CALL_S = 10.0, 600.0
_ADAPTER = "rallypoint"
"""Name under which a server has the adapter that was published last."""


class ServerSupervisor:
    """Keeps one server with the weights that were loaded last."""

    def __init__(
        self,
        launch: Callable[[Path], VllmServer],
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
        self._server: VllmServer | None = None
        self._knows_adapter: VllmServer | None = None
        """The server whose HTTP process has been told that there is an adapter."""
        self.num_servers = 0
        """Servers that were started and became ready."""
        self.num_restarts = 0
        """Times that a server had to be started again, whether it became ready or not."""
        self._doubt: str | None = None
        self._held: tuple[int, Path | None] = (version, None)
        """Version of the weights and their folder; None for those that a server begins with."""

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
        """See `VllmServer.beat`."""
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

    async def _make_ready(self, server: VllmServer) -> None:
        await self._started(server)
        await self._take_over(server)

    async def _take_over(self, server: VllmServer) -> None:
        version, folder = self._held
        if folder is not None:
            await self._enter(server, version, folder)
        await self._call(server, "/update_weight_version", {"new_version": str(version)})

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
            if is_asleep:
                await self._take_over(self._server)
                return
            await self._call(self._server, "/pause?mode=keep")
            await self._take_over(self._server)
            # Drop keys and values of the old weights; those of requests under way are computed again.
            await self._call(self._server, "/reset_prefix_cache?reset_running_requests=true", expect={"success": True})
            await self._call(self._server, "/resume")
        except LostError as error:
            self.give_up(str(error))
            await self.revive()
        except WeightsMismatchError:
            self._held = before
            self.give_up(f"it may hold a mixture of versions {before[0]} and {version}")
            await self.revive()
            raise

    async def call(self, path: str, *, restores: bool = False) -> None:
        """Make a call whose answer does not matter, and have lost weights taken over again if it `restores` memory.

        A server that is lost is started again.

        Raises:
            GenerationError: see `revive`.
        """
        assert self._server is not None
        try:
            await self._call(self._server, path)
            if restores:
                await self._take_over(self._server)
        except LostError as error:
            self.give_up(str(error))
            await self.revive()

    def memory_bytes(self) -> int:
        """See `VllmServer.memory_bytes`."""
        return self._server.memory_bytes() if self._server is not None else 0

    async def end(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()

    async def _started(self, server: VllmServer) -> None:
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

    async def _is_well(self, server: VllmServer) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_S), send(server.address, "GET", "/health") as answer:
                return answer.status == 200
        except (LostError, TimeoutError):
            return False

    async def _enter(self, server: VllmServer, version: int, folder: Path) -> None:
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
            # The workers have it under the number 1, which vLLM gives to the first name.
            await self._tell(server, "/v1/load_lora_adapter", {"lora_name": _ADAPTER, "lora_path": str(folder)})
            self._knows_adapter = server

    async def _call(
        self, server: VllmServer, path: str, body: dict[str, Any] | None = None, expect: dict[str, Any] | None = None
    ) -> Any:
        """Return what a call answers, which is JSON or nothing.

        Raises:
            LostError: it failed, did not answer in time, or answered something else than expected.
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

    async def _tell(self, server: VllmServer, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the body of the answer to a call.

        Raises:
            LostError: it failed, or did not answer in time.
        """
        data = json.dumps(body).encode() if body is not None else b""
        try:
            async with asyncio.timeout(_CALL_S), send(server.address, "POST", path, data) as answer:
                whole = await answer.whole()
        except TimeoutError as error:
            raise LostError(f"{path} did not answer in {_CALL_S:g} s") from error
        if answer.status != 200:
            raise LostError(f"{path} answered with status {answer.status}: {whole[:500].decode(errors='replace')}")
        return whole


class VllmConnection:
    """The way to a server. Every method but `run` is for the callers' thread."""

    def __init__(
        self,
        launch: Callable[[Path], VllmServer],
        *,
        version: int = 0,
        takes_adapters: bool = False,
        gives_memory: bool = False,
        start_s: float = 600.0,
        tick: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = print,
        voice_every_s: float = 10.0,
    ) -> None:
        """Start a server; nothing waits for it here.

        Args:
            launch: starts one, given a folder in memory; called again when it died.
            version: of its first weights.
            takes_adapters: whether adapters are loaded, for the first weights, instead of whole models.
            gives_memory: whether the server can sleep, as on accelerators.
            start_s: how long a start may take.
            tick: called while this waits.
            say: called with one line about what happens to the server.
            voice_every_s: seconds between two lines about a start that takes long.
        """
        self.version = version
        """Version of the weights that the server holds."""
        self._gives_memory, self._is_asleep, self._tick = gives_memory, False, tick
        self._takes_adapters = takes_adapters
        self._weights: Literal["here", "kept", "gone"] = "here"
        """Whether the server has its weights, has them in CPU memory, or has none until it gets some."""
        self._gets_weights = False  # whether it got some when it slept last, so that those that it has need not be kept
        self._folder = OwnFolder()
        self.supervisor = ServerSupervisor(
            launch,
            self._folder.path,
            version,
            takes_adapters=takes_adapters,
            start_s=start_s,
            say=say,
            voice_every_s=voice_every_s,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._reviving: Future[None] | None = self.run(self.supervisor.revive())

    def close(self) -> None:
        """End the server."""
        with contextlib.suppress(Exception):
            if self._reviving is not None:
                self._reviving.cancel()
        self.wait(self.run(self.supervisor.end()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._folder.remove()

    @property
    def versions(self) -> Path:
        """Folder in memory for weights that are to be loaded."""
        return self._folder.path / "versions"

    def is_ready(self) -> bool:
        """Return whether the server can be asked, after a moment; if not, it is being started.

        Raises:
            GenerationError: it could not be started.
        """
        if self._reviving is None and self.supervisor.is_doubtful:
            self._reviving = self.run(self.supervisor.revive())
        if self._reviving is not None:
            with contextlib.suppress(TimeoutError):
                self._reviving.exception(_LOOK_S)
            if not self._reviving.done():
                return False
            reviving, self._reviving = self._reviving, None
            reviving.result()
        return True

    def load(self, version: int, folder: Path) -> None:
        """Have the server load weights that were published as a folder; no engine may be in the middle of a step.

        Raises:
            WeightsMismatchError: they are not the model's, or did not arrive whole; the old ones are still served.
            GenerationError: the server died and could not be started again.
        """
        is_asleep, num_servers = self._is_asleep and self._gives_memory, self.supervisor.num_servers
        if is_asleep and self._weights != "here":
            self._call_if_it_sleeps("/wake_up?tags=weights")
        if self._reviving is not None:
            with contextlib.suppress(WeightsMismatchError):  # about the old weights, which do not matter any more
                self._until_ready()
        self.wait(self.run(self.supervisor.load(version, folder, is_asleep=is_asleep)))
        self.version, self._weights, self._gets_weights = version, "here", is_asleep
        if is_asleep and self.supervisor.num_servers != num_servers:  # a new one, which is awake
            self._call_if_it_sleeps("/sleep?level=1")
            self._weights = "kept"

    def sleep(self) -> None:
        """Have a server on an accelerator free its memory; it keeps its weights on the CPU unless others come then."""
        if not self._is_asleep:
            self._is_asleep = True
            self._weights = "gone" if self._gets_weights and not self._takes_adapters else "kept"
            self._gets_weights = False
            self._call_if_it_sleeps(f"/sleep?level={2 if self._weights == 'gone' else 1}")

    def wake(self) -> None:
        """Have it reserve its memory again."""
        if self._is_asleep:
            self._is_asleep = False
            self._call_if_it_sleeps("/wake_up", restores=self._weights == "gone")
            self._weights = "here"

    def run(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start work in the thread that talks to the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Future[ResultT]) -> ResultT:
        """Return the result of such work, which has a deadline of its own."""
        while True:
            with contextlib.suppress(TimeoutError):
                work.exception(1.0)
            if work.done():
                return work.result()
            self._tick()

    def _until_ready(self) -> None:
        while not self.is_ready():
            self._tick()

    def _call_if_it_sleeps(self, path: str, *, restores: bool = False) -> None:
        """Make a call about memory, if the server can free any; see `ServerSupervisor.call`."""
        if self._gives_memory:
            self._until_ready()
            self.wait(self.run(self.supervisor.call(path, restores=restores)))
