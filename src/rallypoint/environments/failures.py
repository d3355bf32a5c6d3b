"""Rollouts without a score: which they are, how many there may be, and how a person is told.

Must not know: how a score comes about.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from rallypoint.environments.outcome import FailureKind
from rallypoint.errors import RewardError


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
    """A rollout that has no score, and why."""

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
    """The reward function's own frames; empty when it returned something that is no score."""

    def __str__(self) -> str:
        return f"{self.name}, sample {self.sample_index}: {self.reason}"


class TooManyFailuresError(RewardError):
    """More rollouts have no score than `reward.max_failed` allows."""


def most_failures(max_failed: float, num_rows: int) -> int:
    """Return how many of so many rows may fail."""
    return math.floor(max_failed * num_rows + 1e-9)


def check_failures(failures: Sequence[RewardFailure], num_rows: int, max_failed: float) -> None:
    """Refuse a step of which too many rows failed.

    Raises:
        TooManyFailuresError: more than may.
    """
    if len(failures) > most_failures(max_failed, num_rows):
        raise TooManyFailuresError(_advise(failures, num_rows, max_failed))


def count_failures(failures: Sequence[RewardFailure]) -> str:
    """Say how many rollouts have no score, and why, in a few words."""
    kinds = Counter(failure.kind for failure in failures)
    noun = "rollout has" if len(failures) == 1 else "rollouts have"
    return f"{len(failures)} {noun} no score ({', '.join(f'{kinds[kind]} {kind}' for kind in kinds)})"


def describe_failures(failures: Sequence[RewardFailure], limit: int = 3) -> str:
    """Say in a few lines which rollouts have no score and why, with the first traceback."""
    lines = [f"{count_failures(failures)}, the first is {failures[0]}"]
    lines += [f"  - {failure}" for failure in failures[1:limit]]
    if len(failures) > limit:
        lines.append(f"  - and {len(failures) - limit} more")
    first = next((failure for failure in failures if failure.traceback), None)
    if first is not None:
        lines += [f"the reward function's traceback for {first.name}:", first.traceback]
    return "\n".join(lines)


def _advise(failures: Sequence[RewardFailure], num_rows: int, max_failed: float) -> str:
    """Say why a step that has so few scores is not trained on, and what to do."""
    return (
        f"of {num_rows} rollouts more than reward.max_failed={max_failed:g} have no score, so the rest says little of "
        "the policy. Mend what is said below. A response that the function cannot read is usually a wrong one: "
        "return 0 for it instead of raising. If so many failures are right, raise reward.max_failed.\n"
        f"{describe_failures(failures)}"
    )
