"""Rollouts that are left out, as they failed or have no score: which, how many there may be, and how a person is told.

Must not know: how a rollout or a score comes about. The fields of a class of failures say what its messages call it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias, get_args

from rallypoint.environments.outcome import FailureKind
from rallypoint.errors import (
    EnvironmentFailedError,
    EpisodeError,
    GenerationError,
    NotFiniteError,
    RequestError,
    RewardError,
    RowFullError,
    SandboxError,
)

RolloutFailureKind: TypeAlias = Literal[
    "timeout", "raised", "environment", "overlong", "malformed", "engine", "nonfinite"
]
"""`timeout`: the episode took longer than it may. `raised`: it raised an exception. `environment`: what it talks to
failed: it raised EnvironmentFailedError or an OSError. `overlong`: its row had no room for a turn, and it did not catch
the RowFullError. `malformed`: it broke a rule of its client, or returned no result. `engine`: the engine failed
on a turn. `nonfinite`: the logits of a token were NaN or infinite."""
ROLLOUT_FAILURE_KINDS: tuple[RolloutFailureKind, ...] = get_args(RolloutFailureKind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """A rollout that is not there, and why."""

    HAVE: ClassVar[tuple[str, str]] = ("rollout failed", "rollouts failed")
    WHOSE: ClassVar[str] = "the episode"

    name: str
    """Name of the example: `train.parquet:17`."""
    prompt: int
    """Index of the prompt in the run."""
    sample: int
    """Number of the rollout among the G of its prompt."""
    num_turns: int
    """Turns that it had."""
    num_tokens: int = 0
    """Tokens that were sampled for it."""
    kind: RolloutFailureKind
    reason: str
    """One line."""
    traceback: str = ""
    """The episode's own frames; empty where they say nothing."""

    def __str__(self) -> str:
        return f"{self.name}, sample {self.sample}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """Why an episode gives no rollout."""

    kind: RolloutFailureKind
    reason: str
    """One line."""
    traceback: str = ""
    """The episode's own frames."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
    """A rollout that has no score, and why."""

    HAVE: ClassVar[tuple[str, str]] = ("rollout has no score", "rollouts have no score")
    WHOSE: ClassVar[str] = "the reward function"

    name: str
    """Name of the example: `train.parquet:17`."""
    row: int
    """Row of the batch that was to be scored."""
    sample_index: int
    """Number of the rollout among the G of its prompt."""
    kind: FailureKind
    reason: str
    """One line."""
    traceback: str
    """The reward function's own frames; empty when it returned something that is not a score."""

    def __str__(self) -> str:
        return f"{self.name}, sample {self.sample_index}: {self.reason}"


Failures: TypeAlias = Sequence[RewardFailure | RolloutFailure]


class TooManyFailuresError(RewardError, GenerationError):
    """More rollouts failed, or have no score, than `rollout.max_failed` allows."""

    is_not_finite = False
    """Whether the logits of some were not finite, so that the weights may be to blame."""


def failure_kind_of(error: BaseException, *, is_of_engine: bool = False) -> RolloutFailureKind:
    """Return which failure an exception of an episode is.

    Args:
        error: that ended it.
        is_of_engine: whether its client raised it, as the engine failed.
    """
    match error:
        case RowFullError():
            return "overlong"
        case GenerationError() if is_of_engine:
            return "engine"
        case NotFiniteError() if is_of_engine:
            return "nonfinite"
        case EpisodeError() | RequestError():
            return "malformed"
        case EnvironmentFailedError() | GenerationError() | SandboxError() | OSError():
            return "environment"
        case _:
            return "raised"


def most_failures(max_failed: float, num_rows: int) -> int:
    """Return how many of so many rows may fail."""
    return math.floor(max_failed * num_rows + 1e-9)


def check_failures(failures: Failures, num_rows: int, max_failed: float) -> None:
    """Refuse a step of which too many rollouts failed or have no score, or of which all failed.

    Raises:
        TooManyFailuresError: more than may.
    """
    failed, unscored = (
        [each for each in failures if isinstance(each, kind)] for kind in (RolloutFailure, RewardFailure)
    )
    if len(failures) <= most_failures(max_failed, num_rows) and len(failed) < max(1, num_rows):
        return
    advice = "Mend what is said below."
    if failed:
        advice += " An episode in which the policy did badly returns a low reward instead of raising."
    if unscored:
        advice += (
            " A response that the reward function cannot read is usually a wrong one: return 0 for it instead of "
            "raising."
        )
    error = TooManyFailuresError(
        f"of {num_rows} rollouts more failed than rollout.max_failed={max_failed:g} allows, or all, so the rest says "
        f"little of the policy. {advice} If so many failures are right, raise rollout.max_failed.\n"
        + "\n".join(describe_failures(kind) for kind in (failed, unscored) if kind)
    )
    error.is_not_finite = any(one.kind == "nonfinite" for one in failed)
    raise error


def count_failures(failures: Failures) -> str:
    """Say how many rollouts are left out, and why, in a few words."""
    kinds = Counter(failure.kind for failure in failures)
    have = failures[0].HAVE[len(failures) > 1]
    return f"{len(failures)} {have} ({', '.join(f'{kinds[kind]} {kind}' for kind in kinds)})"


def describe_failures(failures: Failures, limit: int = 3) -> str:
    """Say in a few lines which rollouts are left out and why, with the first traceback."""
    lines = [f"{count_failures(failures)}, the first is {failures[0]}"]
    lines += [f"  - {failure}" for failure in failures[1:limit]]
    if len(failures) > limit:
        lines.append(f"  - and {len(failures) - limit} more")
    first = next((failure for failure in failures if failure.traceback), None)
    if first is not None:
        lines += [f"{first.WHOSE}'s traceback for {first.name}:", first.traceback]
    return "\n".join(lines)
