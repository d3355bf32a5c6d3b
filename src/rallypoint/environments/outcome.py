"""Calls of a reward function, and what became of each: scores, or a failure of one of six kinds.

Owns: what a result of a reward function means. Must not know: batches, processes. Every process that scores imports
this, so it needs the standard library only.

What a result means, for a response of the three tokens 7 8 <eos>:

    0.5                        0     0     0.5      a number: on the last token
    {"score": 0.5, "len": 2}   0     0     0.5      and the metric `reward/len`
    {"score": 0, "feedback": "Line 3 is wrong."}    text for a teacher that reads it (recipe opd)
    [0.1, 0.2, 0.3]            0.1   0.2   0.3      a score a token
    [0.1, 0.2]                 0.1   0.2   0        `<eos>` may be left out where the row ended by itself
    None                       it does not apply: without a part in the sum of several, and no score where it is alone
    "0.5", nan, [0.1]          a failure
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import traceback
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, TypedDict, cast, get_args

from rallypoint.environments.reward import PARAMETERS, PLURAL_PARAMETERS, Wants
from rallypoint.user_code import format_user_traceback

FailureKind = Literal["timeout", "crashed", "raised", "nonfinite", "malformed", "not_applicable"]
"""`timeout`: no result before its deadline. `crashed`: the process ended during the call. `raised`: an exception of any
kind. `nonfinite`: a score is NaN or infinite. `malformed`: what came back is not a score, or not one for each token.
`not_applicable`: the function returned None, which is a failure of the response only if no other reward applies."""
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)

LARGEST_REWARD = 1e15
"""The sum of the sizes of a response's scores may not be larger: advantages and values are squared and added up in
float32, which ends at 3e38."""

TAKEN = frozenset(
    {"mean", "std", "num_scored", "failed", *(f"failed_{kind}" for kind in FAILURE_KINDS)}
    | {"memory_gib", "model_mean", "model_std", "model_min", "model_max"}
)
"""Metrics of every run under `reward/`, or of a run with a reward model."""
NONE = "the reward function returned None, so it does not apply (without `return` a function returns None, too)"
NO_TOKEN = "the response has no token that a score could be placed on"


class TurnSaid(TypedDict):
    """One turn of a rollout, as a function gets it."""

    prompt: str
    """Text before this response: the prompt, or what the episode added after the response before it."""
    prompt_ids: list[int]
    response: str
    response_ids: list[int]
    finish_reason: Literal["stop", "length"]
    limit: Literal["turn", "row", "engine"] | None
    """The limit at which it was cut off."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """What a reward function is asked about one response."""

    name: str
    """Example and sample, for messages: `train.parquet:17, sample 3`."""
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any
    token_ids: tuple[int, ...]
    """Tokens of the whole response, special tokens and the one that ended it included."""
    ended: bool
    """Whether the last token is the one that ended the response by itself."""
    group: int = 0
    """The prompt's index in the run."""
    tokens: tuple[str, ...] = ()
    """The text of each token; this and what follows is left out if the function does not want it."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token, as sampled."""
    messages: tuple[dict[str, Any], ...] = ()
    """The prompt: role, content and what else each message has."""
    turns: tuple[TurnSaid, ...] = ()
    """The rollout turn by turn."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Numbers that its episode returned."""
    sample: int = 0
    """Number of the rollout among those of its prompt."""

    def arguments(self, more: Sequence[str]) -> dict[str, Any]:
        """Return the arguments by name, further ones only where they are wanted."""
        usual = {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }
        further = {
            "token_ids": list(self.token_ids),
            "tokens": list(self.tokens),
            "logprobs": list(self.logprobs),
            "messages": list(self.messages),
            "finish_reason": "stop" if self.ended else "length",
            "groups": self.group,
            "prompt_index": self.group,
            "sample_index": self.sample,
            "turns": [dict(each) for each in self.turns],
            "metrics": dict(self.metrics),
        }
        return usual | {name: further[name] for name in more}


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """What the function said of one response."""

    token_scores: tuple[float, ...]
    """One for each token."""
    extras: dict[str, float]
    """Other finite numbers that it returned, by name."""
    parts: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Sum of the scores by each of several rewards, by its name, before they are weighed; NaN of one that does not
    apply. Empty where there is one reward."""
    feedback: str = ""
    """What the function says of the response in words; empty if it says nothing."""
    answer: str | None = None
    """The answer that it read in the response, if it returned it as `pred`; for majority@n."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a response has no scores."""

    kind: FailureKind
    reason: str
    """One line."""
    traceback: str = ""
    """The function's own frames; empty when it returned something that is not a score."""


Outcome = Scores | Failure


def call_reward(
    function: Callable[..., object],
    calls: Sequence[RewardCall],
    wants: Wants,
    wait: Callable[[Awaitable[object]], object] | None = None,
) -> list[Outcome]:
    """Call a function once and read its result for each response; an exception becomes a failure.

    Args:
        function: of the user's.
        calls: what it is asked, one response or several as its scope says.
        wants: what it is called with.
        wait: what awaits the result of an async function; None if the function cannot be async.
    """
    arguments = [call.arguments(wants.more) for call in calls]
    try:
        value = function(**(arguments[0] if wants.scope == "response" else _plural(arguments, wants.more)))
        if wait is not None and inspect.isawaitable(value):
            value = wait(value)
    except DeadlineError as error:
        return [timed_out(error.timeout_s, error.where)] * len(calls)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything: a counted value
        return [raised(error)] * len(calls)
    if wants.scope == "response":
        return [read_result(value, len(calls[0].token_ids), calls[0].ended)]
    values = unwrapped(value)
    if not isinstance(values, list | tuple) or len(cast("Sequence[object]", values)) != len(calls):
        found = f"{len(cast('list[object]', values))}" if isinstance(values, list | tuple) else type(values).__name__
        reason = f"expected a list of {len(calls)} results, one for each response, found {found}"
        return [Failure("malformed", reason)] * len(calls)
    pairs = zip(cast("Sequence[object]", values), calls, strict=True)
    return [read_result(each, len(call.token_ids), call.ended) for each, call in pairs]


def _plural(arguments: Sequence[dict[str, Any]], more: Sequence[str]) -> dict[str, Any]:
    """Return one argument of each name, a list with an entry for each response."""
    named = dict(zip(PARAMETERS, PLURAL_PARAMETERS, strict=True)) | {name: name for name in more}
    return {name: [each[own] for each in arguments] for own, name in named.items()}


class DeadlineError(Exception):
    """An async function was cancelled at its deadline."""

    def __init__(self, timeout_s: float, where: str) -> None:
        super().__init__(timeout_s, where)
        self.timeout_s, self.where = timeout_s, where
        """Seconds, and the traceback of where it waited."""


def timed_out(timeout_s: float, where: str) -> Failure:
    """Return the failure of a call that was ended at its deadline."""
    return Failure("timeout", f"the reward function took longer than reward.timeout_s={timeout_s:g} s", where)


def raised(error: BaseException) -> Failure:
    """Return the failure that an exception of a reward function is."""
    shown = format_user_traceback(error, skip=is_ours)
    return Failure("raised", f"the reward function raised {_first_line(error)}", shown)


_OURS = (os.path.join(os.path.dirname(__file__), ""), os.path.join(os.path.dirname(os.__file__), "asyncio", ""), "<")


def is_ours(file: str) -> bool:
    """Whether a frame of that file is part of how the function is called, and not of the function."""
    return file.startswith(_OURS)


def read_result(value: object, num_tokens: int, ended: bool) -> Outcome:
    """Return what a result of the function means for a response of so many tokens."""
    try:
        return _read_result(value, num_tokens, ended)
    except _NotAScoreError as error:
        return error.failure


class _NotAScoreError(ValueError):
    def __init__(self, reason: str, kind: FailureKind = "malformed") -> None:
        super().__init__(reason)
        self.failure = Failure(kind, reason)


def _first_line(error: BaseException) -> str:
    """Return type and message; the message may itself be code of the user's, so traceback is asked for it."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((line for line in lines if not line.startswith(" ")), lines[0])


def _read_result(value: object, num_tokens: int, ended: bool) -> Scores:
    extras, feedback = dict[str, float](), ""
    answer: str | None = None
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        if "score" not in entries:
            raise _NotAScoreError(f"expected the key 'score', found {', '.join(map(repr, entries)) or 'no key'}")
        value, said = entries["score"], entries.get("feedback")
        feedback = said if isinstance(said, str) else ""
        if taken := sorted(TAKEN.intersection(map(str, entries))):
            raise _NotAScoreError(
                f"found the key {taken[0]!r}, but reward/{taken[0]} is a metric of every run; call it something else"
            )
        numbers = {str(key): as_number(entry) for key, entry in entries.items() if key != "score"}
        extras = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
        predicted = entries.get("pred")
        answer = str(predicted) if isinstance(predicted, str | int | float) else None
    if value is None:
        raise _NotAScoreError(NONE, "not_applicable")
    value = unwrapped(value)
    if isinstance(value, list | tuple):
        return Scores(
            _read_list(cast("Sequence[object]", value), num_tokens, ended), extras, feedback=feedback, answer=answer
        )
    score = _read_score(value, "the score")
    if num_tokens == 0:
        raise _NotAScoreError(NO_TOKEN)
    return Scores((*[0.0] * (num_tokens - 1), score), extras, feedback=feedback, answer=answer)


def _read_list(entries: Sequence[object], num_tokens: int, ended: bool) -> tuple[float, ...]:
    scores = [_read_score(entry, f"score {index} of the list") for index, entry in enumerate(entries)]
    if ended and len(scores) == num_tokens - 1:
        scores.append(0.0)
    if len(scores) != num_tokens:
        without_end = f" ({num_tokens - 1} without the end-of-sequence token)" if ended and num_tokens else ""
        raise _NotAScoreError(
            f"expected one score for each of {num_tokens} tokens{without_end}, found {len(scores)}; the list covers "
            "every token of the response, also special ones, which solution_str does not show: name an argument "
            "token_ids (or tokens) in the function and it is given the ids (or the texts) of all of them"
        )
    if problem := too_large(scores):
        raise _NotAScoreError(f"the list {problem}")
    return tuple(scores)


def too_large(scores: Sequence[float]) -> str | None:
    """Say why the scores of one response are too large to be computed with; None if they are not."""
    size = math.fsum(map(abs, scores))
    if size <= LARGEST_REWARD:
        return None
    what = f"adds up to {size:g} in size" if len(scores) > 1 else f"is {scores[0]:g}"
    return f"{what}, expected at most {LARGEST_REWARD:g}: float32 cannot hold the squares of more; scale rewards down"


def unwrapped(value: object) -> object:
    """Return numpy's and torch's numbers and vectors as Python's own."""
    tolist = getattr(value, "tolist", None)  # of many rollouts: to ask for a protocol takes twenty times as long
    return tolist() if callable(tolist) and not isinstance(value, type) else value


def as_number(value: object) -> float | None:
    """Return a number of any kind as a float; None for what is not a number."""
    value = unwrapped(value)
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:  # of a signalling NaN
        return math.nan


def _read_score(value: object, what: str) -> float:
    number = as_number(value)
    if number is None:
        shown = repr(value)[:60] if isinstance(value, str | None) else type(value).__name__
        raise _NotAScoreError(f"{what} is {shown}, expected a number")
    if not math.isfinite(number):
        raise _NotAScoreError(f"{what} is {number}, expected a finite number", "nonfinite")
    if problem := too_large([number]):
        raise _NotAScoreError(f"{what} {problem}")
    return number
