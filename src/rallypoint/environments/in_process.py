"""Rollouts that a function of the user's makes in a process that can be ended: what it is called with, and its end.

Owns: what all such functions have in common. Must not know: how they sample, or torch, because configs are checked, and
such functions run, where that is not imported.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from rallypoint.environments.failures import EpisodeFailed, failure_kind_of
from rallypoint.environments.given import GIVEN, how_to_give, is_given, loaded
from rallypoint.environments.outcome import is_ours, unwrapped
from rallypoint.environments.reward import Wants
from rallypoint.environments.worker import FunctionCall, WorkerTask
from rallypoint.errors import UserCodeError, first_line
from rallypoint.user_code import UserFunction, format_user_traceback


class RolloutCall(FunctionCall, Protocol):
    """What such a function is called with for one rollout."""

    @property
    def key(self) -> str:
        """Says which rollout it is."""
        ...


RolloutCallT = TypeVar("RolloutCallT", bound=RolloutCall)


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """The end of a function that did not fail."""

    result: object
    """What it returned, as JSON has it; `sampling/episode_end.py` says what that means."""
    num_tool_errors: int | None = None
    """Calls of its own tools that failed; None if it had none."""


@dataclasses.dataclass(frozen=True)
class RolloutTask(WorkerTask[RolloutCallT, Returned | EpisodeFailed], Generic[RolloutCallT]):
    """Such a function; the text of its file goes with it, so that all processes run the same."""

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
            why = GIVEN[spec].why_here
            raise UserCodeError(f"{cls.WHOSE} runs in a process, and this one cannot be sent there: {why}")
        return cls(spec, code=code)

    @abc.abstractmethod
    def misfit(self, function: object) -> str | None:
        """Say why a function is none of these."""

    @abc.abstractmethod
    def begin(self, function: Callable[..., object], call: RolloutCallT) -> tuple[object, Callable[[], int | None]]:
        """Call the function; return what it returns, and what says how many calls of its tools failed."""

    def load(self) -> tuple[Callable[..., object], Wants]:
        """See `WorkerTask.load`."""
        function = loaded(self.code, {}, self.WHOSE) if self.function is None else self.function.load()
        if (problem := self.misfit(function)) is not None:
            raise UserCodeError(problem)
        return function, Wants()

    def answer(
        self,
        function: Callable[..., object],
        wants: Wants,
        calls: Sequence[RolloutCallT],
        wait: Callable[[Awaitable[object]], object],
    ) -> Sequence[Mapping[str, Any]]:
        """See `WorkerTask.answer`."""
        del wants
        (call,) = calls
        value, num_tool_errors = self.begin(function, call)
        value = unwrapped(wait(value) if inspect.isawaitable(value) else value)
        returned = {"result": value, "num_tool_errors": num_tool_errors()}
        try:
            return [json.loads(json.dumps(returned, default=_plain))]
        except (TypeError, ValueError, RecursionError):
            reason = f"{self.WHOSE} returned {type(value).__name__} that is not JSON"
            return [dataclasses.asdict(EpisodeFailed("malformed", reason))]

    def read(self, answer: Mapping[str, Any]) -> Returned | EpisodeFailed:
        """See `WorkerTask.read`."""
        return EpisodeFailed(**answer) if "kind" in answer else Returned(**answer)

    def raised(self, error: BaseException) -> EpisodeFailed:
        """See `WorkerTask.raised`."""
        kind, said = failure_kind_of(error), first_line(error)
        if kind == "overlong":
            return EpisodeFailed(kind, str(error))
        reason = said if kind == "malformed" else f"{self.WHOSE} raised {type(error).__name__}: {said}"
        return EpisodeFailed(kind, reason, format_user_traceback(error, skip=is_ours))

    def ended(self, reason: str, where: str) -> EpisodeFailed:
        """See `WorkerTask.ended`."""
        return EpisodeFailed("raised", reason, where)

    def timed_out(self, where: str) -> EpisodeFailed:
        """See `WorkerTask.timed_out`."""
        return EpisodeFailed("timeout", f"{self.WHOSE} took longer than {self.timeout_s:g} s", where)


def _plain(value: object) -> object:
    """Return what JSON can hold in place of a number or vector of another library."""
    plain = unwrapped(value)
    if plain is value:
        raise TypeError(f"{type(value).__name__} is not JSON")
    return cast("object", plain)
