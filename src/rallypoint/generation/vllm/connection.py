"""What ties this process to one vLLM server, whichever engine asks it.

Owns: the thread in which the server is talked to, the folder that both see, when the server can be asked, and whether
it holds its memory. Must not know: requests. Several engines may share one; only one of them is awake at a time.

Every method but `run` is for the callers' thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rallypoint.errors import WeightsMismatchError
from rallypoint.generation.vllm.server import OwnFolder, Server
from rallypoint.generation.vllm.supervisor import Control

ResultT = TypeVar("ResultT")

_LOOK_S = 0.05
"""How long `is_ready` looks, so that whoever calls it in a loop does not spin."""


class Connection:
    """A server, and the way to it."""

    def __init__(
        self,
        launch: Callable[[Path], Server],
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
            version: of the weights that it begins with.
            takes_adapters: whether folders of adapters are loaded, for the model that it began with.
            gives_memory: whether it has a sleep of its own, as on accelerators.
            start_s: how long a start may take.
            tick: called while something is waited for.
            say: called with one line about what happens to the server.
            voice_every_s: how often that a start takes long is said.
        """
        self.version = version
        """Of the weights that it holds."""
        self._gives_memory, self._is_asleep, self._tick = gives_memory, False, tick
        self._folder = OwnFolder()
        self.control = Control(
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
        self._reviving: Future[None] | None = self.run(self.control.revive())

    def close(self) -> None:
        """End the server."""
        with contextlib.suppress(Exception):
            if self._reviving is not None:
                self._reviving.cancel()
        self.wait(self.run(self.control.end()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._folder.remove()

    @property
    def versions(self) -> Path:
        """Folder in memory for weights that are to be loaded."""
        return self._folder.path / "versions"

    def is_ready(self) -> bool:
        """Look for a moment whether the server can be asked, and see to it that it can.

        Raises:
            GenerationError: it could not be started.
        """
        if self._reviving is None and self.control.is_doubtful:
            self._reviving = self.run(self.control.revive())
        if self._reviving is not None:
            with contextlib.suppress(TimeoutError):
                self._reviving.exception(_LOOK_S)
            if not self._reviving.done():
                return False
            reviving, self._reviving = self._reviving, None
            reviving.result()
        return True

    def load(self, version: int, folder: Path) -> None:
        """Have the server take over weights that were published as a folder; no engine may be in the middle of a token.

        Raises:
            WeightsMismatchError: they are not the model's, or did not arrive whole; those of before are served then.
            GenerationError: the server died and could not be started again.
        """
        if self._is_asleep:
            self._let("/wake_up")
        if self._reviving is not None:
            with contextlib.suppress(WeightsMismatchError):  # of the weights before, which are not wanted any more
                self._until_ready()
        self.wait(self.run(self.control.load(version, folder)))
        self.version = version
        if self._is_asleep:
            self._let("/sleep?level=1")

    def sleep(self) -> None:
        """Have a server on an accelerator give its memory back."""
        if not self._is_asleep:
            self._is_asleep = True
            self._let("/sleep?level=1")

    def wake(self) -> None:
        """Have it take its memory again."""
        if self._is_asleep:
            self._is_asleep = False
            self._let("/wake_up")

    def run(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Begin work in the thread that talks to the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Future[ResultT]) -> ResultT:
        """Return what such work returns; it has a deadline of its own."""
        while True:
            with contextlib.suppress(TimeoutError):
                work.exception(1.0)
            if work.done():
                return work.result()
            self._tick()

    def _until_ready(self) -> None:
        while not self.is_ready():
            self._tick()

    def _let(self, path: str) -> None:
        """Tell a server on an accelerator something; one on a CPU has no memory that it could give."""
        if self._gives_memory:
            self._until_ready()
            self.wait(self.run(self.control.call(path)))
