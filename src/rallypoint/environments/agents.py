"""Agents of the user's: functions that call a model over HTTP, each rollout in a process that can be ended.

Owns: which function a name stands for, how it is called in its process, and what its end means. Must not know:
sessions, servers, torch, because configs are checked, and agents run, where that is not imported.

    async def run(base_url, api_key, example):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import ClassVar, TypeAlias

from rallypoint.data.dataset import Example
from rallypoint.environments.given import GIVEN, how_to_give, is_given
from rallypoint.environments.in_process import RolloutTask
from rallypoint.environments.reward import Wants
from rallypoint.errors import UserCodeError
from rallypoint.user_code import misfit, own_signature, split, written_signature

_EXPECTED = "expected a function of (base_url, api_key, example), async or not"

Agent: TypeAlias = Callable[[str, str, Example], object]
"""Makes one rollout over HTTP; what it returns, or what that comes to, is an episode's result."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentCall:
    """What an agent is called with for one rollout."""

    name: str
    """Name of the example, for messages."""
    base_url: str
    """Address of the rollout's session, with `/v1`."""
    api_key: str
    """Key of the session."""
    example: Example
    group: int = 0

    @property
    def key(self) -> str:
        """See `RolloutCall.key`."""
        return self.api_key


@dataclasses.dataclass(frozen=True)
class AgentTask(RolloutTask[AgentCall]):
    """An agent."""

    WHOSE: ClassVar[str] = "the agent"

    url: str = ""
    """Address of all sessions."""

    def load(self) -> tuple[Callable[..., object], Wants]:
        """See `Task.load`; a client that the file makes when it is imported must not reach anybody with a real key."""
        _set_environment(self.url, "made-at-import")
        return super().load()

    def misfit(self, function: object) -> str | None:
        """See `RolloutTask.misfit`."""
        return find_misfit(function)

    def begin(self, function: Callable[..., object], call: AgentCall) -> tuple[object, Callable[[], int | None]]:
        """See `RolloutTask.begin`; the environment names the session, too, as some programs read it there."""
        _set_environment(call.base_url.removesuffix("/v1"), call.api_key)
        return function(call.base_url, call.api_key, call.example), lambda: None


def _set_environment(url: str, key: str) -> None:
    os.environ.update(OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY=key, ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=key)


def is_agent(spec: str) -> bool:
    """Whether a name stands for an agent and not for an episode: its first argument says so, from the file's text."""
    try:
        if is_given(spec):
            signature = own_signature(GIVEN[spec].function) if spec in GIVEN else None
        else:
            signature = written_signature(*split(spec, usual_name="run"))
    except UserCodeError:  # which is told where the episode is checked
        return False
    return signature is not None and next(iter(signature.parameters), "") == "base_url"


def check_agent_spec(spec: str) -> str | None:
    """Return what is wrong with the name of an agent, from the file's text alone; None when nothing can be seen."""
    if is_given(spec):
        return find_misfit(GIVEN[spec].function) if spec in GIVEN else how_to_give(spec, "episode")
    try:
        signature = written_signature(*split(spec, usual_name="run"))
    except UserCodeError as error:
        return str(error)
    return None if signature is None else misfit(signature, 3, _EXPECTED)


def find_misfit(function: object) -> str | None:
    """Say why a function is not an agent.

    >>> def run(base_url, api_key, example): ...
    >>> def other(client): ...
    >>> find_misfit(run), find_misfit(other)[:65]
    (None, 'expected a function of (base_url, api_key, example), async or not')
    """
    if not callable(function) or isinstance(function, type):
        return f"{_EXPECTED}, found {getattr(function, '__name__', type(function).__name__)}"
    return misfit(own_signature(function), 3, _EXPECTED)
