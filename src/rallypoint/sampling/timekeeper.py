"""How long sampler and trainer wait for each other, and for whom.

Owns: what the journal has of groups and batches, the shares of time in which nobody worked, and the words for a group
that is much slower than others. Must not know: what a batch is made of, or what time it is.
"""

from __future__ import annotations

import collections
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from rallypoint.environments.failures import RolloutFailure
from rallypoint.journal import BatchTaken, GroupScored, RolloutFailed, TurnSampled
from rallypoint.types import Mean, Metrics, Trajectory

if TYPE_CHECKING:
    from rallypoint.sampling.in_flight import GroupInFlight

_MUCH_SLOWER = 10.0
"""Times as long as most others take."""
_STEPS_BEFORE = 8
"""Steps that tell how long a group usually takes, where too few of the newest have ended."""


class Timekeeper:
    """The times of a run's batches, in seconds of the run."""

    def __init__(self) -> None:
        self.loaded_s = self.asked_s = 0.0
        """When weights were last loaded, and the trainer last began to wait for a batch."""
        self._taken_s: float | None = None
        self._took_before: collections.deque[list[float]] = collections.deque(maxlen=_STEPS_BEFORE)

    def taken(
        self, step: int, groups: Sequence[GroupInFlight], busy_s: Sequence[float], now_s: float
    ) -> tuple[BatchTaken, Metrics]:
        """Return what is recorded of the batch of a step, which the trainer has now, and the shares of idle time.

        Args:
            step: counted from 1.
            groups: of the batch.
            busy_s: seconds that each rank has sampled since the batch before.
            now_s: the time.
        """
        before, self._taken_s = self.loaded_s if self._taken_s is None else self._taken_s, now_s
        taken = BatchTaken(
            step=step,
            prompts=[group.index for group in groups],
            asked_s=self.asked_s,
            taken_s=now_s,
            loaded_s=self.loaded_s,
            busy_s=[round(seconds, 4) for seconds in busy_s],
        )
        self._took_before.append(_seconds(groups))
        interval = max(1e-9, now_s - before)
        idle = Metrics(
            {
                "rollout/idle": Mean(max(0.0, 1 - sum(busy_s) / (len(busy_s) * interval)), 1),
                "actor/idle": Mean((now_s - max(self.asked_s, before)) / interval, 1),
            }
        )
        return taken, idle

    def slowest(self, groups: Sequence[GroupInFlight], now_s: float) -> str | None:
        """Say which group a step waits for; None unless others took a small part of its time.

        They are most groups of the step, or, while too few of it have ended, those of earlier steps. In the first step
        there are none, and then no group that has ended may have taken more.
        """
        left = [each for each in groups if each.scored_s is None]
        took, before = _seconds(groups), [seconds for step in self._took_before for seconds in step]
        if not left or not (took or before):
            return None
        if len(took) >= len(left):
            usual, of_whom = statistics.median(took), "most others took"
        elif before:
            usual, of_whom = statistics.median(before), "most of earlier steps took"
        else:
            usual, of_whom = max(took), "those that have ended took at most"
        oldest = min(left, key=lambda each: each.admitted_s)
        waited = now_s - oldest.admitted_s
        if waited <= _MUCH_SLOWER * usual:
            return None
        doing = f"sampled by rank {oldest.rank} of rollout" if oldest.sampled_s is None else "scored"
        return (
            f"the step waits for {len(left)} of {len(groups)} prompts: {oldest.name}, prompt {oldest.index} of the "
            f"run, has been under way for {waited:.0f} s and is being {doing}; {of_whom} {usual:.1f} s"
        )


def scored_event(group: GroupInFlight, validation: int | None) -> GroupScored:
    """Return what is recorded of a group that is scored, of training or of the validation after a step."""
    assert group.sampled_s is not None, "it is scored"
    assert group.scored_s is not None, "likewise"
    return GroupScored(
        prompt=group.index,
        validation=validation,
        rank=group.rank,
        admitted_s=group.admitted_s,
        sampled_s=group.sampled_s,
        scored_s=group.scored_s,
        turns=group.turns,
    )


def failed_event(failure: RolloutFailure, validation: int | None) -> RolloutFailed:
    """Return what is recorded of a rollout that is left out."""
    return RolloutFailed(
        prompt=failure.prompt,
        sample=failure.sample,
        validation=validation,
        num_turns=failure.num_turns,
        num_tokens=failure.num_tokens,
        why=failure.kind,
        reason=failure.reason,
    )


def turns_of(rollouts: Mapping[int, Trajectory]) -> Iterator[TurnSampled]:
    """Yield the responses of rollouts, by their samples."""
    for sample, rollout in rollouts.items():
        for number, turn in enumerate(rollout.turns):
            digest = xxhash.xxh3_64_hexdigest(array("q", turn.response).tobytes())
            yield sample, number, turn.spans or ((turn.version, len(turn.response)),), digest


def _seconds(groups: Sequence[GroupInFlight]) -> list[float]:
    """Return how long those groups took that are scored."""
    return [each.scored_s - each.admitted_s for each in groups if each.scored_s is not None]
