"""Which prompts may be sampled now, and which groups are trained on next.

Owns: the order of prompts, the bound on staleness, the state to be saved. Must not know: how a group is sampled, or
from where. Pure logic: nothing here waits.

Consumes: `complete`, `loaded`. Produces: prompts to admit, and the groups of a step. Waits for: a slot. A group has one
from its admission until weights have been loaded that were trained on it. Unblocked by: `loaded`.

With P prompts a step, max_staleness S and a window of W there are N = (S+1) * P - (W-1) slots. A step takes P groups,
one after another: each time the oldest complete one of those at most W-1 places after the oldest group that was not
taken. With W = 1 that is the order of admission. Group i, the i-th of the run, is then never more than S steps old:

    admitted after v steps:   i + 1 <= v * P + N            as v * P groups had been trained on, and N have slots
    taken in step k:          k * P <= i + W - 1            as only groups before i, and W-1 after it, come first
    so k - v <= floor((i + W - 1) / P) - ceil((i + 1 - N) / P) <= floor((N + W - 2) / P) = floor((S*P + P - 1) / P) = S

whatever the latencies. It is checked all the same when groups are taken, by the versions of their tokens. A group that
is dropped counts as if it had never been: the one that refills its slot has its place. In i it only makes later groups
younger.

>>> groups = Groups(num_prompts=2, max_staleness=1)
>>> groups.loaded(0)
>>> groups.admit(), groups.admit()
([0, 1, 2, 3], [])
>>> groups.next()
(0, 1)
>>> groups.take({0: 0, 1: 0})
>>> groups.admit()
[]
>>> groups.loaded(1)
>>> groups.admit()
[4, 5]

In a window of 2 one group may overtake another, for a slot less:

>>> groups = Groups(num_prompts=2, max_staleness=1, window=2)
>>> groups.loaded(0)
>>> groups.admit()
[0, 1, 2]
>>> groups.complete(2)  # two places after 0, so it has to wait for it
>>> groups.complete(1)
>>> groups.next() is None
True
>>> groups.complete(0)
>>> groups.next()
(0, 1)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rallypoint.config import RunConfig
from rallypoint.errors import StalenessError


@dataclasses.dataclass(frozen=True, slots=True)
class PromptsDone:
    """The prompts of the run that are done: all before `oldest`, and some after it. This is what a checkpoint keeps."""

    num_taken: int = 0
    """Groups that were trained on."""
    oldest: int = 0
    """Index of the oldest prompt that is not done."""
    ahead: tuple[int, ...] = ()
    """Those after it that are, in order."""

    @property
    def num(self) -> int:
        """Number of them, with those of groups that others replaced."""
        return self.oldest + len(self.ahead)

    @classmethod
    def read(cls, done: Mapping[str, Any]) -> Self:
        """Return them from what JSON has of them."""
        return cls(done["num_taken"], done["oldest"], tuple(done["ahead"]))


class Groups:
    """Groups, by the index of their prompt in the run, from their admission to the step that is trained on them."""

    def __init__(
        self,
        *,
        num_prompts: int,
        max_staleness: int = 0,
        window: int = 1,
        limit: int | None = None,
        drops_ahead: bool = False,
        done: PromptsDone = PromptsDone(),
    ) -> None:
        """Begin without groups.

        Args:
            num_prompts: P, prompts of a step.
            max_staleness: S, how many loads the oldest token of a group may be behind the newest one.
            window: W, see the module.
            limit: groups that the run will be trained on; None is no limit.
            drops_ahead: whether groups may be dropped at any time, so that a step has to wait until its groups are
                complete.
            done: of a resumed run; groups that were running when it ended are admitted again.
        """
        self._num_prompts, self._max_staleness, self._window, self._limit = num_prompts, max_staleness, window, limit
        self.drops_ahead = drops_ahead
        """Whether a group without signal is replaced as soon as it is scored, and not when a step wants it."""
        self._num_slots = (max_staleness + 1) * num_prompts - (window - 1)
        self.num_taken = self._num_released = done.num_taken
        self._oldest, self._ahead = done.oldest, set(done.ahead)
        self._dropped: set[int] = set()
        self._not_counted: set[int] = set()
        """Those of the dropped that no step has counted yet."""
        self._next = done.oldest
        self._in_flight: dict[int, None] = {}  # an ordered set, as the next one
        self._complete: dict[int, None] = {}
        self._picked: list[int] = []
        self.loads: list[int] = []
        """Version of each of the newest S+1 loads; a token may be as old as the first of them."""

    @property
    def done(self) -> PromptsDone:
        """What is done."""
        return PromptsDone(self.num_taken, self._oldest, tuple(sorted(self._ahead)))

    @property
    def replaced(self) -> list[int]:
        """Groups that were dropped for the next step, in order; those behind its groups count for later ones."""
        last = max([*self._in_flight][: self._num_prompts], default=-1)
        return sorted(index for index in self._not_counted if index < last)

    def count_replaced(self) -> list[int]:
        """Return them for the step that is chosen; no later one counts them again."""
        found = self.replaced
        self._not_counted.difference_update(found)
        return found

    @property
    def all_are_complete(self) -> bool:
        """Whether `complete` was called of all groups under way."""
        return len(self._complete) == len(self._in_flight)

    def loaded(self, version: int) -> None:
        """Note that the ranks have new weights, which were trained on all groups taken so far."""
        self.loads = [*self.loads, version][-1 - self._max_staleness :]
        self._num_released = self.num_taken

    def admit(self) -> list[int]:
        """Return the indices of the prompts that get the free slots; index i is the i-th prompt of the run."""
        most = self._num_released + self._num_slots
        most = most if self._limit is None else min(most, self._limit)
        admitted: list[int] = []
        while self.num_taken + len(self._in_flight) < most:
            if self._next not in self._ahead:
                self._in_flight[self._next] = None
                admitted.append(self._next)
            self._next += 1
        return admitted

    def drop(self, index: int) -> None:
        """Drop a running group and free its slot; the next prompt of the run is admitted in its place."""
        self._dropped.add(index)
        self._not_counted.add(index)
        self._picked = [one for one in self._picked if one != index]
        self._end([index])

    def complete(self, index: int) -> None:
        """Note that a group can be trained on."""
        assert index in self._in_flight, "a group that was admitted, and neither taken nor dropped"
        self._complete[index] = None

    def is_complete(self, index: int) -> bool:
        """Whether `complete` was called of a group under way."""
        return index in self._complete

    def next(self) -> tuple[int, ...] | None:
        """Return the groups of the next step, in order; None if these cannot be known yet.

        In order of admission they are known before they are complete, unless one may still be dropped.
        """
        if self._window == 1 and not self.drops_ahead:
            first = tuple(self._in_flight)[: self._num_prompts]
            return first if len(first) == self._num_prompts else None
        while len(self._picked) < self._num_prompts and (found := self._pick()) is not None:
            self._picked.append(found)
        return tuple(sorted(self._picked)) if len(self._picked) == self._num_prompts else None

    def _pick(self) -> int | None:
        """Return the oldest complete group in the window, which is anchored at the oldest group not taken."""
        left = sorted(self._in_flight.keys() - set(self._picked))
        places = range(left[0], left[0] + self._window) if left else range(0)
        num_dropped = sum(index in self._dropped for index in places)  # they have no place
        return next((one for one in left if one in self._complete and one < places.stop + num_dropped), None)

    def take(self, oldest_versions: Mapping[int, int | None]) -> None:
        """Note that a step trains on groups, and check how old they are.

        Args:
            oldest_versions: index -> version of its oldest token; None for a group without a rollout.

        Raises:
            StalenessError: a token is older than allowed.
        """
        for index, oldest in oldest_versions.items():
            self._check(index, oldest)
        self.num_taken += len(oldest_versions)
        self._picked = []
        self._end(list(oldest_versions))

    def age(self, version: int) -> int:
        """Return how many loads there were after these weights; 0 for the newest."""
        return sum(loaded > version for loaded in self.loads)

    def _end(self, indices: Sequence[int]) -> None:
        for index in indices:
            del self._in_flight[index]
            self._complete.pop(index, None)
            self._ahead.add(index)
        while self._oldest in self._ahead:
            self._ahead.remove(self._oldest)
            self._dropped.discard(self._oldest)
            self._oldest += 1

    def _check(self, index: int, oldest: int | None) -> None:
        if oldest is not None and oldest < self.loads[0]:
            raise StalenessError(
                f"prompt {index} was sampled from version {oldest}; the newest is {self.loads[-1]}, and with "
                f"max_staleness {self._max_staleness} the oldest allowed is {self.loads[0]}"
            )


class OverSampledGroups(Groups):
    """Groups of which a step takes those that are complete first, so that it does not wait for the longest responses.

    A step samples N prompts and trains on the first P groups that end; the others are cancelled. Their prompts were
    overtaken: they wait until there are P of them, which are then a step of their own, with no others (tail
    batching, RollPacker, arXiv 2509.21009). So most steps have short responses, a few have all the long ones, and each
    prompt is trained on exactly once. To sample the overtaken ones in the very next step would gain nothing: as many
    long responses as come with new prompts would have to be trained on in every step.

    A prompt is sampled again with the same random numbers. So it is not drawn until its responses happen to be short,
    and is overtaken about once. What was overtaken follows from the prompts that are done, which is what a checkpoint
    has.

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
        known = self._ahead | self._in_flight.keys()
        return [index for index in range(self._oldest, self._newest_done) if index not in known]

    @property
    def _newest_done(self) -> int:
        return max(self._ahead, default=self._oldest - 1)

    def admit(self) -> list[int]:
        """Return the indices of the prompts that are sampled now: new ones, or those that were overtaken.

        At the end of a run overtaken ones are sampled together with new ones, so that none is left out.
        """
        overtaken, limit = self.overtaken, math.inf if self._limit is None else self._limit
        if not self._in_flight:
            self._takes_overtaken = len(overtaken) >= self._num_prompts
            self._next = self._newest_done + 1
        num_sampled = self._num_prompts if self._takes_overtaken else self._num_sampled
        most = min(self._num_released + num_sampled, limit)
        admitted: list[int] = []
        while (count := self.num_taken + len(self._in_flight)) < most:
            if overtaken and (self._takes_overtaken or limit - count <= len(overtaken)):
                index = overtaken.pop(0)
            else:
                index, self._next = self._next, self._next + 1
            self._in_flight[index] = None
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
        aborted = [index for index in self._in_flight if index not in kept]
        for index in aborted:
            del self._in_flight[index]
            self._complete.pop(index, None)
        return aborted


def groups_of(config: RunConfig, done: PromptsDone) -> Groups:
    """Return the groups of a run, behind those that are done."""
    rollout, num_prompts = config.rollout, config.rollout.num_prompts
    limit = config.trainer.num_steps * num_prompts
    if rollout.over_sampling is not None:
        return OverSampledGroups(num_prompts=num_prompts, num_sampled=rollout.over_sampling, limit=limit, done=done)
    return Groups(
        num_prompts=num_prompts,
        max_staleness=rollout.max_staleness,
        window=rollout.window,
        limit=limit,
        drops_ahead=bool(rollout.dynamic_sampling and rollout.max_staleness),
        done=done,
    )
