"""Agents of a run: an episode whose calls come over HTTP, from a process of its own. Needs the extra `serve`.

Owns: the port, the processes, and that both end with the run. Must not know: what a call continues, how a process is
ended. To the rest of the run an agent is an episode: it has its deadlines, its kinds of failure, its place in a group.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rallypoint.config import RunConfig
from rallypoint.data import Example
from rallypoint.environments.agents import AgentCall, AgentTask, Returned
from rallypoint.environments.client import Client
from rallypoint.environments.pool import Pool
from rallypoint.errors import ConfigError, DiskError, GenerationError, RewardError, RowFullError, UserCodeError
from rallypoint.generation import Output
from rallypoint.prepare.material import Material
from rallypoint.run.folder import RunFolder
from rallypoint.sampling.client import EpisodeClient
from rallypoint.sampling.episode_end import EpisodeFailed
from rallypoint.serving import Served, Server, Sessions, bind, make_sessions_app
from rallypoint.types import Turn

_HOST = "127.0.0.1"
_NAME = "policy"
"""Name of the model for agents, the same in every run."""
_MAX_BODY_BYTES = 64 * 2**20
_GRACE_S = 1.0


class Agents:
    """Runs an agent for each rollout; called as an episode is."""

    def __init__(self, config: RunConfig, folder: RunFolder, material: Material) -> None:
        """Take a port of this machine.

        Raises:
            ConfigError: the agent's file cannot be read, or the agent cannot be sent to a process.
            ServingError: there is no port.
        """
        assert config.rollout.own_episode is not None, "who has none makes no agents"
        self._spec, self._folder = config.rollout.own_episode, folder
        try:
            task = AgentTask.of(self._spec)
        except UserCodeError as error:
            raise ConfigError((f"rollout.episode={self._spec!r}: {error}",)) from None
        self._pool = Pool(task, log=folder.logs / "agents.log", on_begin=self._hear)
        self._begun: dict[str, Callable[[], object]] = {}
        """Called when a process has begun to work for a session, by the session's key."""
        tokenizer = copy.deepcopy(material.tokenizer)  # of its own, see `Endpoint`
        self._sessions = Sessions(
            Served(
                name=_NAME,
                tokenizer=tokenizer,
                stop_tokens=material.stop_tokens,
                max_tokens=config.max_row_tokens,
                strips_thinking=config.rollout.thinking == "strip",
            )
        )
        listening = bind(_HOST, 0)
        self._url = f"http://{_HOST}:{listening.getsockname()[1]}"
        app = make_sessions_app(self._sessions, max_body_bytes=_MAX_BODY_BYTES)
        self._server = Server(app, listening, grace_s=_GRACE_S, on_end=lambda: None, say=self._write_down)

    async def open(self) -> None:
        """Import the agent in a first process, and begin to answer.

        Raises:
            ConfigError: the agent cannot be imported, or is none.
        """
        try:
            await asyncio.to_thread(self._pool.load)
        except RewardError as error:
            raise ConfigError((f"rollout.episode={self._spec!r}: {error}",)) from None
        await asyncio.to_thread(self._server.start)

    async def close(self) -> None:
        """End all processes, and the server."""
        self._pool.close()
        await asyncio.to_thread(self._server.stop, lambda: None)

    async def __call__(self, client: Client, example: Example) -> Any:
        """Run the agent for one rollout, and return what it returned, or how it failed."""
        assert isinstance(client, EpisodeClient), "agents run in runs"
        assert client.own_time is not None, "it has just begun"
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()
        caller = functools.partial(_call, loop, client)
        session = self._sessions.open(caller, client.params, client.prompt, example.prompt, example.tools)
        client.chats = session.chat
        self._begun[session.key] = functools.partial(loop.call_soon_threadsafe, has_begun.set)
        address = f"{self._url}/sessions/{session.key}/v1"
        running = asyncio.wrap_future(self._pool.begin(AgentCall(example.name, address, session.key, example)))
        try:
            with client.own_time.paused():  # until there is a process for it
                begun = asyncio.create_task(has_begun.wait())
                await asyncio.wait({running, begun}, return_when=asyncio.FIRST_COMPLETED)
                begun.cancel()
            ended = await running
        finally:
            self._sessions.close(session)
            self._begun.pop(session.key, None)
            running.cancel()  # which ends the process, if it still works
        if isinstance(ended, Returned):
            return ended.result
        if isinstance(session.failure, RowFullError | GenerationError):
            raise session.failure  # which the agent did not catch
        return EpisodeFailed(ended.kind, ended.reason, ended.traceback)

    def _hear(self, calls: Sequence[AgentCall]) -> None:
        for call in calls:
            if (begun := self._begun.get(call.api_key)) is not None:
                begun()

    def _write_down(self, line: str) -> None:
        try:
            self._folder.log(f"sessions: {line}")
        except DiskError:  # the run will meet the reason itself
            return


def _call(
    loop: asyncio.AbstractEventLoop,
    client: EpisodeClient,
    tokens: Sequence[int],
    said: tuple[tuple[str, str], ...],
    *,
    max_tokens: int | None,
    stop: Sequence[str],
    temperature: float | None,
    deliver: Callable[[Output], None] | None,
) -> Future[Turn]:
    """Have the run's own loop sample for a session; see `Caller`."""
    sampling = client.answer(tokens, said, max_tokens=max_tokens, stop=stop, temperature=temperature, deliver=deliver)
    return asyncio.run_coroutine_threadsafe(sampling, loop)
