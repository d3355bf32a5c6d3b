"""Agents of the user's: functions that call a model over HTTP, each rollout in a process that can be ended.

Owns: which function a name stands for, how it is called in its process, and what its end means. Must not know:
sessions, servers, torch, because configs are checked, and agents run, where that is not imported.

    async def run(base_url, api_key, example):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias, cast

from rallypoint.data.dataset import Example
from rallypoint.environments.failures import RolloutFailureKind
from rallypoint.environments.given import GIVEN, how_to_give, is_given, loaded, named, packed
from rallypoint.environments.outcome import is_ours, unwrapped
from rallypoint.environments.reward import Wants
from rallypoint.environments.worker import Task
from rallypoint.errors import EnvironmentFailedError, UserCodeError, first_line
from rallypoint.user_code import UserFunction, format_user_traceback, own_signature, split, written_signature

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


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """The end of an agent that did not fail."""

    result: object
    """What it returned, as JSON has it; `sampling/episode_end.py` says what that means."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentFailed:
    """Why an agent has no result."""

    kind: RolloutFailureKind
    reason: str
    """One line."""
    traceback: str = ""
    """The agent's own frames."""


@dataclasses.dataclass(frozen=True)
class AgentTask(Task[AgentCall, Returned | AgentFailed]):
    """An agent's function; the text of its file goes with it, so that all processes run the same."""

    WHOSE: ClassVar[str] = "the agent"

    function: UserFunction | None = None
    """None for one that Python gave, whose pickle is in `code`."""

    @classmethod
    def of(cls, spec: str) -> Self:
        """Return the task that a name stands for.

        Raises:
            UserCodeError: there is no such file, or the function cannot be sent to a process.
        """
        if not is_given(spec):
            return cls(spec, function=UserFunction.read(spec, {}))
        if spec not in GIVEN:
            raise UserCodeError(how_to_give(spec, "episode"))
        if (code := GIVEN[spec].code) is None:
            raise UserCodeError(
                f"an agent runs in a process, and this one cannot be sent there: {GIVEN[spec].why_here}"
            )
        return cls(spec, code=code)

    def load(self) -> tuple[Callable[..., object], Wants]:
        """See `Task.load`."""
        function = loaded(self.code, {}, self.WHOSE) if self.function is None else self.function.load()
        if (problem := find_misfit(function)) is not None:
            raise UserCodeError(problem)
        return function, Wants()

    def answer(
        self,
        function: Callable[..., object],
        wants: Wants,
        calls: Sequence[AgentCall],
        wait: Callable[[Awaitable[object]], object],
    ) -> Sequence[Mapping[str, Any]]:
        """See `Task.answer`; the environment names the session, too, as some programs read it there."""
        del wants
        (call,) = calls
        os.environ.update(OPENAI_BASE_URL=call.base_url, OPENAI_API_KEY=call.api_key)
        os.environ.update(ANTHROPIC_BASE_URL=call.base_url.removesuffix("/v1"), ANTHROPIC_API_KEY=call.api_key)
        value = function(call.base_url, call.api_key, call.example)
        value = unwrapped(wait(value) if inspect.isawaitable(value) else value)
        try:
            return [{"result": json.loads(json.dumps(value, default=_plain))}]
        except (TypeError, ValueError, RecursionError):
            reason = f"the agent returned {type(value).__name__} that is no JSON"
            return [dataclasses.asdict(AgentFailed("malformed", reason))]

    def read(self, answer: Mapping[str, Any]) -> Returned | AgentFailed:
        """See `Task.read`."""
        return AgentFailed(**answer) if "kind" in answer else Returned(answer["result"])

    def raised(self, error: BaseException) -> AgentFailed:
        """See `Task.raised`."""
        kind = "environment" if isinstance(error, OSError | EnvironmentFailedError) else "raised"
        reason = f"the agent raised {type(error).__name__}: {first_line(error)}"
        return AgentFailed(kind, reason, format_user_traceback(error, skip=is_ours))

    def ended(self, reason: str, where: str) -> AgentFailed:
        """See `Task.ended`."""
        return AgentFailed("raised", reason, where)

    def timed_out(self, where: str) -> AgentFailed:
        """See `Task.timed_out`."""
        return AgentFailed("timeout", f"the agent took longer than {self.timeout_s:g} s", where)


@contextlib.contextmanager
def giving_agent(agent: Callable[..., object]) -> Iterator[str]:
    """Yield the name under which a config may name an agent as long as the block lasts."""
    with named(agent, agent, *packed(agent)) as spec:
        yield spec


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
    """Say what is wrong with the name of an agent, from the file's text alone; None when nothing can be seen."""
    if is_given(spec):
        return find_misfit(GIVEN[spec].function) if spec in GIVEN else how_to_give(spec, "episode")
    try:
        signature = written_signature(*split(spec, usual_name="run"))
    except UserCodeError as error:
        return str(error)
    return None if signature is None else _find_misfit_of(signature)


def find_misfit(function: object) -> str | None:
    """Say why a function is no agent.

    >>> def run(base_url, api_key, example): ...
    >>> def other(client): ...
    >>> find_misfit(run), find_misfit(other)[:65]
    (None, 'expected a function of (base_url, api_key, example), async or not')
    """
    if not callable(function) or isinstance(function, type):
        return f"{_EXPECTED}, found {getattr(function, '__name__', type(function).__name__)}"
    return _find_misfit_of(own_signature(function))


def _find_misfit_of(signature: inspect.Signature) -> str | None:
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        return f"{_EXPECTED}; this one takes {signature}: {error}"
    return None


def _plain(value: object) -> object:
    """Return what JSON can hold in place of a number or vector of another library."""
    plain = unwrapped(value)
    if plain is value:
        raise TypeError(f"{type(value).__name__} is no JSON")
    return cast("object", plain)
