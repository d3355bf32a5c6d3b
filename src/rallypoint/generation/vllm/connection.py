"""The thread in which a vLLM server is talked to, and when the server holds its memory.

Owns: the loop's thread, the folder that both processes see, and whether the server sleeps. Must not know: requests.
Several engines may share a connection; only one of them is awake at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from rallypoint.errors import PublishError, WeightsMismatchError
from rallypoint.generation.vllm.server import OwnFolder, ServerProcess
from rallypoint.generation.vllm.supervisor import ServerSupervisor

ResultT = TypeVar("ResultT")

_LOOK_S = 0.05
"""How long `is_ready` waits, so that callers that ask in a loop do not spin."""
_WARY_TURNS = 8
"""Times that a sleeping server keeps its weights on the CPU after it once dropped them and got no others, as after
validation. The actor then has to write them again, which takes as long as keeping them several times."""


class VllmConnection:
    """The way to a server. Every method but `run` is for the callers' thread."""

    def __init__(
        self,
        launch: Callable[[Path], ServerProcess],
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
        """Where the server's weights are: on its device, in CPU memory, or nowhere until it gets others."""
        self._num_wary = 0  # times that they are still kept, see `_WARY_TURNS`
        self._gets_weights = False  # whether it got some when it last slept, so that those it has may go
        self._keeps = False  # whether they are kept in any case
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

    def keeping(self) -> VllmConnection:
        """Have the server keep its weights whenever it sleeps, as guests may ask at any time; return this."""
        self._keeps = True
        return self

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
            WeightsMismatchError: they are not the model's, or did not arrive whole; it has the old ones, or none.
            GenerationError: the server died and could not be started again.
        """
        is_asleep, num_servers = self._is_asleep and self._gives_memory, self.supervisor.num_servers
        self._wake_weights(is_asleep=is_asleep)
        if self._reviving is not None:
            with contextlib.suppress(WeightsMismatchError):  # about the old weights, which do not matter any more
                self._until_ready()
        self.wait(self.run(self.supervisor.load(version, folder, is_asleep=is_asleep)))
        self.version, self._weights, self._gets_weights = version, "here", is_asleep
        if is_asleep and self.supervisor.num_servers != num_servers:  # a new one, which is awake
            self._call_if_it_sleeps("/sleep?level=1")
            self._weights = "kept"

    def join(self, invite: Callable[[], str], given_up: threading.Event | None = None) -> None:
        """Have the server's workers connect to ranks that send weights; see `ServerSupervisor.join`, and `receive`.

        Args:
            invite: returns an invitation, called once the server is ready: from then on senders wait for its workers.
            given_up: set by another thread to end this soon.

        Raises:
            PublishError: it was given up; see `ServerSupervisor.join`, too.
        """
        self._until_ready(given_up)
        self.wait(self.run(self.supervisor.join(invite())), given_up)

    def receive(self, version: int, given_up: threading.Event | None = None) -> str:
        """Have them take over what these send now; return a digest of its checksums. See `join`."""
        is_asleep = self._is_asleep and self._gives_memory
        self._until_ready(given_up)
        self._wake_weights(is_asleep=is_asleep, given_up=given_up)
        digest = self.wait(self.run(self.supervisor.receive(version, is_asleep=is_asleep)), given_up)
        self.version, self._weights, self._gets_weights = version, "here", is_asleep
        return digest

    def _wake_weights(self, *, is_asleep: bool, given_up: threading.Event | None = None) -> None:
        """Have a server that sleeps reserve memory for weights, which come next."""
        if is_asleep and self._weights != "here":
            self._call_if_it_sleeps("/wake_up?tags=weights", given_up=given_up)

    def sleep(self) -> None:
        """Have a server on an accelerator free its memory; it keeps its weights on the CPU unless others come then."""
        if not self._is_asleep:
            self._is_asleep = True
            may_go = self._gets_weights and not (self._keeps or self._takes_adapters or self._num_wary)
            self._weights = "gone" if may_go else "kept"
            self._gets_weights, self._num_wary = False, max(0, self._num_wary - 1)
            self._call_if_it_sleeps(f"/sleep?level={2 if self._weights == 'gone' else 1}")

    def wake(self) -> None:
        """Have it reserve its memory again."""
        if self._is_asleep:
            self._is_asleep = False
            if self._weights == "gone":
                self._num_wary = _WARY_TURNS
            self._call_if_it_sleeps("/wake_up", restores=self._weights == "gone")
            self._weights = "here"

    def run(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start work in the thread that talks to the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Future[ResultT], given_up: threading.Event | None = None) -> ResultT:
        """Return the result of such work, which has a deadline of its own; once it is given up, cancel it."""
        while True:
            with contextlib.suppress(TimeoutError):
                work.exception(1.0)
            if work.done():
                return work.result()
            self._tick()
            if given_up is not None and given_up.is_set():
                work.cancel()
                raise _given_up()

    def _until_ready(self, given_up: threading.Event | None = None) -> None:
        while not self.is_ready():
            self._tick()
            if given_up is not None and given_up.is_set():
                raise _given_up()

    def _call_if_it_sleeps(self, path: str, *, restores: bool = False, given_up: threading.Event | None = None) -> None:
        """Make a call about memory, if the server can free any; see `ServerSupervisor.change_memory`."""
        if self._gives_memory:
            self._until_ready(given_up)
            self.wait(self.run(self.supervisor.change_memory(path, restores=restores)), given_up)


def _given_up() -> PublishError:
    return PublishError("publishing weights to vllm was given up")
