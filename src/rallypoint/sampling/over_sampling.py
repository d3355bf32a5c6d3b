"""Prompts that are sampled beside those of a step, so that it does not wait for the longest responses.

Owns: which prompts are sampled for a step, and which of them wait for a later one. Must not know: how a group is
sampled. Pure logic: nothing here waits.

A step samples N prompts and trains on the first P groups that end; the others are given up. Their prompts were
overtaken: they wait until there are P of them, which are then a step of their own, with nothing beside them (tail
batching, RollPacker, arXiv 2509.21009). So most steps have short responses, a few have all the long ones, and each
prompt is trained on exactly once. To sample the overtaken ones in the very next step would gain nothing: as many long
responses as come with new prompts would have to be trained on in every step.

A prompt is sampled again with the same random numbers. So it is not drawn until its responses happen to be short, and
is overtaken about once. What was overtaken follows from the prompts that are done, which is what a checkpoint has.

Two prompts a step of three that are sampled, of which the second is slow:

>>> groups = OverSampledGroups(num_prompts=2, num_sampled=3, done=PromptsDone())
>>> groups.loaded(0)
>>> groups.admit()
[0, 1, 2]
>>> groups.complete(2), groups.complete(0), groups.next()
(None, None, (0, 2))
>>> groups.abort((0, 2))
[1]
>>> groups.take({0: 0, 2: 0})
>>> groups.loaded(1)
>>> groups.overtaken, groups.admit()
([1], [3, 4, 5])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rallypoint.sampling.groups import Groups, PromptsDone


class OverSampledGroups(Groups):
    """Groups of which a step takes those that are complete first."""

    def __init__(self, *, num_prompts: int, num_sampled: int, done: PromptsDone, limit: int | None = None) -> None:
        """Begin without groups.

        Args:
            num_prompts: P, prompts of a step.
            num_sampled: N, prompts that are sampled for it.
            done: of a resumed run.
            limit: groups that the run will be trained on; None is no limit.
        """
        super().__init__(num_prompts=num_prompts, limit=limit, done=done)
        self._num_sampled, self._takes_overtaken = num_sampled, False

    @property
    def overtaken(self) -> list[int]:
        """Prompts before one that is done, which are neither done nor under way; oldest first."""
        return [index for index in range(self._oldest, self._newest_done) if not self._is_known(index)]

    @property
    def _newest_done(self) -> int:
        return max(self._ahead, default=self._oldest - 1)

    def _is_known(self, index: int) -> bool:
        return index in self._ahead or index in self._under_way

    def admit(self) -> list[int]:
        """Return the indices of the prompts that are sampled now: new ones, or those that were overtaken.

        At the end of a run overtaken ones are sampled beside new ones, so that none is left out.
        """
        overtaken, limit = self.overtaken, math.inf if self._limit is None else self._limit
        if not self._under_way:
            self._takes_overtaken = len(overtaken) >= self._num_prompts
            self._next = self._newest_done + 1
        num_sampled = self._num_prompts if self._takes_overtaken else self._num_sampled
        most = min(self._num_released + num_sampled, limit)
        admitted: list[int] = []
        while (count := self.num_taken + len(self._under_way)) < most:
            if overtaken and (self._takes_overtaken or limit - count <= len(overtaken)):
                index = overtaken.pop(0)
            else:
                index, self._next = self._next, self._next + 1
            self._under_way[index] = None
            admitted.append(index)
        return admitted

    def next(self) -> tuple[int, ...] | None:
        """Return the groups of the next step, those that were complete first; None while there are too few."""
        first = tuple(self._complete)[: self._num_prompts]
        return tuple(sorted(first)) if len(first) == self._num_prompts else None

    @property
    def replaced(self) -> list[int]:
        """All that were dropped since the step before: no other step has groups under way."""
        return sorted(self._not_counted)

    def abort(self, kept: Sequence[int]) -> list[int]:
        """Give up all groups under way but these, and return them; they are admitted again in a later step."""
        aborted = [index for index in self._under_way if index not in kept]
        for index in aborted:
            del self._under_way[index]
            self._complete.pop(index, None)
        return aborted
