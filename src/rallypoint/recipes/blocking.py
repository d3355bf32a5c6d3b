"""Plain episodes of a run: each in a process, from which its client asks over a socket of this machine.

Owns: the socket, and which rollout a message on it is for. Must not know: what is sampled, how a process is ended.

Consumes: messages of clients, one on each connection. Produces: the answer to each. Waits for: what the rollout's own
client awaits. Unblocked by: the same, or the end of the rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rallypoint.data import Example, save_tokenizer
from rallypoint.environments.blocking import SIZE, EpisodeCall, EpisodeTask, SampledTurn
from rallypoint.environments.client import Client
from rallypoint.environments.failures import EpisodeFailed
from rallypoint.errors import ConfigError, EpisodeError, RallyError, UserCodeError, first_line
from rallypoint.recipes.in_processes import InProcesses
from rallypoint.sampling.client import EpisodeClient
from rallypoint.types import Turn

_MAX_FOLDER_BYTES = 80
"""Bytes of a folder's name, in which a socket's is not longer than systems take."""


class PlainEpisodes:
    """Runs a plain episode for each rollout; called as an episode is."""

    def __init__(
        self,
        spec: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        log: Path | None = None,
        num_processes: int | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            spec: name of the episode.
            tokenizer: of the model.
            log: receives what the episode prints; None for standard error.
            num_processes: see `num_processes_of`.

        Raises:
            ConfigError: its file cannot be read, or it cannot be sent to a process.
        """
        is_long = len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_BYTES
        # Nobody else may enter it.
        self._folder = tempfile.TemporaryDirectory(prefix="rally-", dir="/tmp" if is_long else None)
        self._address = str(Path(self._folder.name) / "socket")
        save_tokenizer(tokenizer, Path(self._folder.name))
        try:
            task = dataclasses.replace(EpisodeTask.of(spec), tokenizer=self._folder.name)
        except UserCodeError as error:
            raise ConfigError((f"rollout.episode={spec!r}: {error}",)) from None
        self._processes = InProcesses(task, log, num_processes)
        self._clients: dict[str, EpisodeClient] = {}
        """Those of the rollouts under way, by their keys."""
        self._keys = itertools.count(1)

    async def open(self) -> None:
        """Import the episode in a first process, and begin to answer.

        Raises:
            ConfigError: it cannot be imported, or is none.
        """
        await self._processes.load()
        self._server = await asyncio.start_unix_server(self._answer, self._address, backlog=1024)

    async def close(self) -> None:
        """End all processes, and the socket."""
        self._processes.close()
        self._folder.cleanup()

    async def __call__(self, client: Client, example: Example) -> Any:
        """Run the episode for one rollout, and return what it returned, or how it failed."""
        assert isinstance(client, EpisodeClient), "plain episodes run in runs"
        key = str(next(self._keys))
        self._clients[key] = client
        try:
            ended = await self._processes.run(
                client, EpisodeCall(example.name, self._address, key, client.prompt, example)
            )
        finally:
            del self._clients[key]
        if isinstance(ended, EpisodeFailed):
            return ended
        if ended.num_tool_errors is not None:
            client.num_tool_errors = ended.num_tool_errors
        return ended.result

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
            asked = json.loads(await reader.readexactly(size))
            try:
                if (client := self._clients.get(asked["key"])) is None:
                    raise EpisodeError("the rollout of this client has ended")
                said = {"answer": await _asked(client, asked["method"], asked["arguments"])}
            except RallyError as error:
                said = {"error": type(error).__name__, "text": str(error)}
            except (TypeError, ValueError) as error:  # of what the episode has given
                said = {"error": "EpisodeError", "text": f"client.{asked.get('method')}: {first_line(error)}"}
            answer = json.dumps(said).encode()
            writer.write(SIZE.pack(len(answer)) + answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            return  # the process was ended, or its rollout is over
        finally:
            writer.close()


async def _asked(client: EpisodeClient, method: str, arguments: Mapping[str, Any]) -> Mapping[str, object]:
    """Do what a process asks of its client."""
    match method:
        case "chat":
            return await client.chat(**arguments)
        case "call":
            return _fields(await client.call(**arguments))
        case _:
            return _fields(await client.sample(**arguments))


def _fields(turn: Turn) -> Mapping[str, object]:
    return {field.name: getattr(turn, field.name) for field in dataclasses.fields(SampledTurn)}
