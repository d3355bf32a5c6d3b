"""How long sampler and trainer wait for each other, and for whom.

Owns: the times of a run's groups and batches in its journal, the shares of time in which nobody worked, and the
words for a group that is much slower than others. Must not know: what a batch is made of. The clock is passed in.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from rallypoint.environments.failures import RolloutFailure
from rallypoint.journal import BatchTaken, GroupDropped, GroupScored, Journal, RolloutFailed, TurnSampled
from rallypoint.types import Mean, Metrics, Trajectory

if TYPE_CHECKING:
    from rallypoint.sampling.group import GroupInFlight

_MUCH_SLOWER = 10.0
"""Times as long as most others take."""
_STEPS_BEFORE = 8
"""Steps that tell how long a group usually takes, where too few of the newest have ended."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Times:
    """When what happened to a group, in seconds of one clock; None before it has."""

    admitted: float
    sampled: float | None = None
    scored: float | None = None
    turns: tuple[TurnSampled, ...] = ()
    """Its responses, when it is sampled."""


class Timekeeper:
    """Records when groups were scored, batches requested and taken, and weights loaded."""

    def __init__(self, clock: Callable[[], float], journal: Journal) -> None:
        """Begin at the start of a run.

        Args:
            clock: seconds.
            journal: of the run.
        """
        self._clock, self._journal = clock, journal
        self._began = self._loaded = self._asked = clock()
        self._taken: float | None = None
        self._took_before: collections.deque[list[float]] = collections.deque(maxlen=_STEPS_BEFORE)

    def now(self) -> float:
        """Return the time, in seconds of the clock."""
        return self._clock()

    def loaded(self) -> None:
        """Record that new weights were loaded."""
        self._loaded = self._clock()

    def asked(self) -> None:
        """Record that the trainer waits for a batch."""
        self._asked = self._clock()

    def scored(self, group: GroupInFlight, validation: int | None) -> None:
        """Record that a group is scored, of training or of the validation after a step."""
        times = group.times
        scored = GroupScored(
            prompt=group.index,
            validation=validation,
            rank=group.rank,
            admitted_s=self._since(times.admitted),
            sampled_s=self._since(times.sampled),
            scored_s=self._since(times.scored),
            turns=times.turns,
        )
        self._journal.append(scored)

    def dropped(self, prompt: int, why: str) -> None:
        """Record that no step will have a group."""
        self._journal.append(GroupDropped(prompt=prompt, why=why))

    def failed(self, failure: RolloutFailure, validation: int | None) -> None:
        """Record that a rollout is left out, of training or of the validation after a step."""
        failed = RolloutFailed(
            prompt=failure.prompt,
            sample=failure.sample,
            validation=validation,
            num_turns=failure.num_turns,
            num_tokens=failure.num_tokens,
            why=failure.kind,
            reason=failure.reason,
        )
        self._journal.append(failed)

    def _since(self, time: float | None) -> float:
        """Return the seconds from the start of the run to a time."""
        return 0.0 if time is None else round(time - self._began, 4)

    def taken(self, step: int, groups: Sequence[GroupInFlight], busy_s: Sequence[float]) -> Metrics:
        """Record that it has the batch of a step; return the shares of time since the one before.

        Args:
            step: counted from 1.
            groups: of the batch.
            busy_s: seconds that each rank has sampled since the batch before.
        """
        before = self._loaded if self._taken is None else self._taken
        self._taken = self._clock()
        taken = BatchTaken(
            step=step,
            prompts=[group.index for group in groups],
            asked_s=self._since(self._asked),
            taken_s=self._since(self._taken),
            loaded_s=self._since(self._loaded),
            busy_s=[round(seconds, 4) for seconds in busy_s],
        )
        self._journal.append(taken)
        self._took_before.append(_seconds(groups))
        interval = max(1e-9, self._taken - before)
        return Metrics(
            {
                "rollout/idle": Mean(max(0.0, 1 - sum(busy_s) / (len(busy_s) * interval)), 1),
                "actor/idle": Mean((self._taken - max(self._asked, before)) / interval, 1),
            }
        )

    def slowest(self, groups: Sequence[GroupInFlight]) -> str | None:
        """Say which group a step waits for; None unless others took a small part of its time.

        They are most groups of the step, or, while too few of it have ended, those of earlier steps. In the first step
        there are none, and then no group that has ended may have taken more.
        """
        left = [each for each in groups if each.times.scored is None]
        took, before = _seconds(groups), [seconds for step in self._took_before for seconds in step]
        if not left or not (took or before):
            return None
        if len(took) >= len(left):
            usual, of_whom = statistics.median(took), "most others took"
        elif before:
            usual, of_whom = statistics.median(before), "most of earlier steps took"
        else:
            usual, of_whom = max(took), "those that have ended took at most"
        oldest = min(left, key=lambda each: each.times.admitted)
        waited = self._clock() - oldest.times.admitted
        if waited <= _MUCH_SLOWER * usual:
            return None
        doing = f"sampled by rank {oldest.rank} of rollout" if oldest.times.sampled is None else "scored"
        return (
            f"the step waits for {len(left)} of {len(groups)} prompts: {oldest.name}, prompt {oldest.index} of the "
            f"run, has been under way for {waited:.0f} s and is being {doing}; {of_whom} {usual:.1f} s"
        )


def turns_of(rollouts: Mapping[int, Trajectory]) -> Iterator[TurnSampled]:
    """Yield the responses of rollouts, by their samples."""
    for sample, rollout in rollouts.items():
        for number, turn in enumerate(rollout.turns):
            digest = xxhash.xxh3_64_hexdigest(array("q", turn.response).tobytes())
            yield sample, number, turn.spans or ((turn.version, len(turn.response)),), digest


def _seconds(groups: Sequence[GroupInFlight]) -> list[float]:
    """Return how long those groups took that are scored."""
    return [each.times.scored - each.times.admitted for each in groups if each.times.scored is not None]
