"""Agents of a run: an episode whose calls come over HTTP, from a process of its own. Needs the extra `serve`.

Owns: the port, the processes, and that both end with the run. Must not know: what a call continues, how a process is
ended. To the rest of the run an agent is an episode: it has its deadlines, its kinds of failure, its place in a group.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rallypoint.data import Example
from rallypoint.environments.agents import AgentCall, AgentTask
from rallypoint.environments.client import Client
from rallypoint.environments.failures import EpisodeFailed
from rallypoint.environments.in_process import Returned
from rallypoint.errors import ConfigError, GenerationError, RowFullError, UserCodeError
from rallypoint.generation import Output
from rallypoint.recipes.in_processes import InProcesses
from rallypoint.sampling.client import EpisodeClient
from rallypoint.serving import Served, Server, Sessions, bind, make_sessions_app
from rallypoint.types import Turn

_HOST = "127.0.0.1"
_NAME = "policy"
"""Name of the model for agents, the same in every run."""
_MAX_BODY_BYTES = 64 * 2**20
_GRACE_S = 1.0
_NO_CALL = (
    "the agent ended without an answered call: it has to ask the model at base_url at least once, with a client made "
    "inside the function, as each rollout has a base_url and an api_key of its own"
)


class Agents:
    """Runs an agent for each rollout; called as an episode is."""

    def __init__(
        self,
        spec: str,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: tuple[int, ...],
        max_tokens: int,
        *,
        say: Callable[[str], None],
        log: Path | None = None,
        num_processes: int | None = None,
        strips_thinking: bool = False,
    ) -> None:
        """Take a port of this machine.

        Args:
            spec: name of the agent.
            tokenizer: of the model.
            stop_tokens: each of them ends a response.
            max_tokens: tokens of a row.
            say: given what the server has to say, from any thread.
            log: receives what agents print; None for standard error.
            num_processes: see `num_processes_of`.
            strips_thinking: see `rollout.thinking`.

        Raises:
            ConfigError: the agent's file cannot be read, or the agent cannot be sent to a process.
            ServingError: there is no port.
        """
        self._spec, listening = spec, bind(_HOST, 0)
        self._url = f"http://{_HOST}:{listening.getsockname()[1]}"
        try:
            task = dataclasses.replace(AgentTask.of(self._spec), url=self._url)
        except UserCodeError as error:
            listening.close()
            raise ConfigError((f"rollout.episode={self._spec!r}: {error}",)) from None
        self._processes = InProcesses(task, log, num_processes)
        tokenizer = copy.deepcopy(tokenizer)  # of its own, see `Endpoint`
        self._sessions = Sessions(
            Served(
                name=_NAME,
                tokenizer=tokenizer,
                stop_tokens=stop_tokens,
                max_tokens=max_tokens,
                strips_thinking=strips_thinking,
            )
        )
        app = make_sessions_app(self._sessions, max_body_bytes=_MAX_BODY_BYTES)
        self._server = Server(
            app, listening, grace_s=_GRACE_S, on_end=lambda: None, say=lambda line: say(f"sessions: {line}")
        )

    async def open(self) -> None:
        """Import the agent in a first process, and begin to answer.

        Raises:
            ConfigError: the agent cannot be imported, or is none.
        """
        await self._processes.load()
        await asyncio.to_thread(self._server.start)

    async def close(self) -> None:
        """End all processes, and the server."""
        self._processes.close()
        await asyncio.to_thread(self._server.stop, lambda: None)

    async def __call__(self, client: Client, example: Example) -> Any:
        """Run the agent for one rollout, and return what it returned, or how it failed."""
        assert isinstance(client, EpisodeClient), "agents run in runs"
        caller = functools.partial(_call, asyncio.get_running_loop(), client)
        session = self._sessions.open(caller, client.params, client.prompt, example.prompt, example.tools)
        client.chats = session.chat
        address = f"{self._url}/sessions/{session.key}/v1"
        try:
            ended = await self._processes.run(client, AgentCall(example.name, address, session.key, example))
        finally:
            self._sessions.close(session)
        if isinstance(ended, Returned):
            return ended.result if client.turns else EpisodeFailed("malformed", _NO_CALL)
        if isinstance(session.failure, RowFullError | GenerationError):
            raise session.failure  # which the agent did not catch
        return ended


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
