"""A client of OpenEnv's environments for episodes: their WebSocket, without their package. Needs the extra `openenv`.

Owns: the wire, and that a full server is waited for. Must not know: what observations and actions say.

    async def episode(client, example):
        async with OpenEnv("ws://127.0.0.1:8000/ws") as environment:
            step = await environment.reset(seed=example.extra_info["seed"])
            while not step.done:
                said = await client.chat([{"role": "user", "content": step.observation["text"]}])
                step = await environment.step({"message": said["content"]})
        return step.reward
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rallypoint.errors import EnvironmentFailedError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_FULL = "CAPACITY_REACHED"
_MOST_BYTES = 64 * 2**20
_PAUSE_S = 0.25
"""Seconds before a full server is asked again."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnvError(EnvironmentFailedError):
    """An environment answered with an error, whose code says whose fault it is; `VALIDATION_ERROR` is the action's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the environment answered {code}: {message}")
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.code, ""), {"args": self.args})


class OpenEnv:
    """A session with an environment's server, for one episode at a time; as a context it ends with the block."""

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        """Connect later.

        Args:
            url: of its WebSocket, such as `ws://127.0.0.1:8000/ws`.
            timeout_s: seconds that one answer may take; a full server is waited for, as long as the episode may take.
        """
        self._url, self._timeout_s = url, timeout_s
        self._connection: ClientConnection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def reset(self, **fields: Any) -> StepResult:
        """Begin an episode, with `seed`, `episode_id` and what else the environment takes.

        Raises:
            OpenEnvError: the environment refuses, or failed.
            OSError: nobody listens, or the connection broke; TimeoutError is one.
        """
        while True:
            try:
                return await self._ask("reset", fields)
            except OpenEnvError as error:
                if error.code != _FULL:
                    raise
            assert self._connection is not None, "it has answered"
            await self._connection.close()
            self._connection = None
            await asyncio.sleep(_PAUSE_S)

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take an action; raises as `reset` does."""
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> StepResult:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            async with asyncio.timeout(self._timeout_s):
                if self._connection is None:
                    self._connection = await connect(self._url, max_size=_MOST_BYTES)
                with contextlib.suppress(ConnectionClosed):  # a full server closes it, and has said why before
                    await self._connection.send(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(await self._connection.recv())
        except WebSocketException as error:
            raise ConnectionError(f"the connection to {self._url} broke: {error}") from error
        said = answer["data"]
        if answer["type"] == "error":
            raise OpenEnvError(str(said.get("code")), str(said.get("message")))
        return StepResult(said["observation"], said.get("reward"), bool(said.get("done")))
