"""What another staleness, window or split of the machine would give, by the times in a run's journal.

Owns: what is read off the journal, and a model of a run in few rules. Must not know: texts for people. What decides
which groups are sampled and taken is not a model, but `Groups` itself. The rules:

- a rank takes a + b * rows seconds for a token of all its rows, where a and b are fitted to the times of the groups;
  more rows than fit into its batch take turns;
- a reward function takes as long as it did for each rollout, and has as many calls at once as processes;
- in turns, a group is admitted as long after the request for its batch as it was: it may have replaced another one;
- a batch is there as long after its last score as it was: a reward model scores whole batches;
- the trainer takes as long as it did, from a batch to the next weights, and then to the next request for a batch;
- published weights wait for the end of the time slice in which ranks sample, half a slice on average;
- more ranks are faster in proportion.

A run in turns cannot tell how much slower sampler and trainer are when both work at once, on the same cores.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from rallypoint.journal import BatchTaken, GroupScored, RunBegan, read_journal
from rallypoint.roles.rank_engine import SLICE_S
from rallypoint.sampling.groups import Groups

_NO_ROWS, _NO_TIME = 1e-6, 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The batch of a step and its groups."""

    batch: BatchTaken
    groups: tuple[GroupScored, ...]

    @property
    def last_s(self) -> float:
        """Time of the last of the request for the batch and its scores."""
        return max([self.batch.asked_s, *(group.scored_s for group in self.groups)])


def read_steps(journal: Path) -> list[Step]:
    """Return the steps that count, from the file of a run's journal.

    Raises:
        RunFolderError: it is damaged.
    """
    steps, groups = dict[int, Step](), dict[int, GroupScored]()
    for entry in read_journal(journal):
        match entry.event:
            case RunBegan(first=first):
                steps = {number: step for number, step in steps.items() if number <= first}
            case GroupScored(validation=None) as group:
                groups[group.prompt] = group
            case BatchTaken() as batch:
                steps[batch.step] = Step(batch, tuple(groups.pop(prompt) for prompt in batch.prompts))
            case _:
                pass
    return [*steps.values()]


def starts_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Split steps where the run was started again: its clock begins anew."""
    starts: list[list[Step]] = []
    for step in steps:
        before = starts[-1][-1].batch if starts else None
        if before is None or step.batch.step != before.step + 1 or step.batch.loaded_s < before.taken_s:
            starts.append([])
        starts[-1].append(step)
    return starts


def settled(steps: Sequence[Step]) -> list[Step]:
    """Leave out the first steps of each start, a quarter of them and five at most: processes start in them."""
    return [step for start in starts_of(steps) for step in start[min(5, len(start) // 4) :]]


def _lengths(group: GroupScored) -> Sequence[int]:
    """Return the sampled tokens of each rollout."""
    lengths: dict[int, int] = collections.Counter()
    for sample, _, spans, _ in group.turns:
        lengths[sample] += sum(length for _, length in spans)
    return [*lengths.values()] or [0]


def _rows(group: GroupScored) -> float:
    """Return how many of a group's rollouts were sampled at once, on average."""
    return sum(lengths := _lengths(group)) / max(1, *lengths)


def _over(groups: Sequence[GroupScored], rate: Callable[[float], float]) -> npt.NDArray[np.float64]:
    """Integrate a rate that depends on the rows which a rank samples, while it samples each group.

    The first and the second have two rows each on rank 0, the second for 2 s of the first's 4:

    >>> def group(rank, begin, end):
    ...     return GroupScored(prompt=0, rank=rank, admitted_s=begin, sampled_s=end, scored_s=end,
    ...                        turns=[(sample, 0, [(0, 10)], "") for sample in range(2)])
    >>> _over([group(0, 0.0, 4.0), group(0, 0.0, 2.0), group(1, 0.0, 4.0)], lambda rows: rows)
    array([12.,  8.,  8.])
    """
    ranks = np.array([group.rank for group in groups])
    spans = np.array([(group.admitted_s, group.sampled_s) for group in groups])
    rows, found = np.array([*map(_rows, groups)]), np.zeros(len(groups))
    for mine in (ranks == rank for rank in np.unique(ranks)):
        order = np.argsort(times := spans[mine].T.ravel(), kind="stable")
        beside = np.cumsum(np.concatenate([rows[mine], -rows[mine]])[order])[:-1]
        rates = [rate(float(each)) if each > _NO_ROWS else 0.0 for each in beside]
        total = np.concatenate([[0.0], np.cumsum(rates * np.diff(times[order]))])
        found[mine] = np.diff(np.interp(spans[mine], times[order], total)).ravel()
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of a rank for a token of each of its rows."""

    step_s: float = 0.0
    """a: whatever the rows."""
    row_s: float = 0.0
    """b: for each row."""
    max_rows: int | None = None
    """Rows that fit into a batch; None for any number."""

    def token_s(self, rows: float) -> float:
        """Return the seconds until each of these rows has another token.

        >>> Speed(step_s=1.0, row_s=0.5, max_rows=4).token_s(2), Speed(step_s=1.0, row_s=0.5, max_rows=4).token_s(8)
        (2.0, 6.0)
        """
        return max(_NO_TIME, self.step_s * self._turns(rows) + self.row_s * rows)

    def _turns(self, rows: float) -> float:
        return max(1.0, rows / (self.max_rows or math.inf))

    @classmethod
    def fitted(cls, groups: Sequence[GroupScored], max_rows: int | None) -> Self:
        """Fit it by least squares; if all groups had as many others beside them, rows share the rank evenly."""
        speed = cls(row_s=1.0, max_rows=max_rows)
        for _ in range(5):  # how many tokens were sampled beside how many rows depends on the speed
            speed = speed._nearer(groups)
        return speed

    def _nearer(self, groups: Sequence[GroupScored]) -> Self:
        longest = np.array([max(_lengths(group)) for group in groups])
        share = longest / np.maximum(_NO_TIME, _over(groups, lambda rows: 1 / self.token_s(rows)))
        steps = share * _over(groups, lambda rows: self._turns(rows) / self.token_s(rows))
        others = share * _over(groups, lambda rows: rows / self.token_s(rows))
        took = np.array([group.sampled_s - group.admitted_s for group in groups])
        aa, ab, bb = float(steps @ steps), float(steps @ others), float(others @ others)
        at, bt = float(steps @ took), float(others @ took)
        left, step_s, row_s = aa * bb - ab * ab, bb * at - ab * bt, aa * bt - ab * at
        if left <= 0.01 * aa * bb or step_s <= 0:
            return dataclasses.replace(self, step_s=0.0, row_s=bt / (bb or 1.0))
        fit = (step_s / left, row_s / left) if row_s > 0 else (at / aa, 0.0)
        return dataclasses.replace(self, step_s=fit[0], row_s=fit[1])


class Servers:
    """Reward functions at work: a number of calls at once, first come first served."""

    def __init__(self, most: int | None) -> None:
        """Begin with all free; None for as many as there are calls."""
        self._most, self._free = most, [0.0] * (most or 0)

    def call(self, arrival: float, num_calls: int, call_s: float) -> float:
        """Return when the last of some calls ends that arrive together.

        >>> servers = Servers(2)
        >>> servers.call(0.0, 3, 1.0), servers.call(0.0, 1, 1.0), servers.call(5.0, 1, 1.0)
        (2.0, 2.0, 6.0)
        """
        if self._most is None:
            return arrival + call_s
        ends = [arrival]
        for _ in range(num_calls):
            ends.append(max(arrival, self._free[0]) + call_s)
            heapq.heapreplace(self._free, ends[-1])
        return max(ends)

    def length(self, arrival: float, num_calls: int, end: float) -> float:
        """Return how long each of some calls took by the end of the last, if all take as long."""
        if self._most is None or not num_calls:
            return end - arrival
        first = max(arrival, heapq.nsmallest(num_calls, self._free)[-1])
        return max(0.0, end - first) / -(-num_calls // self._most)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupWork:
    """What there is to do for a group."""

    num_tokens: float
    """Tokens of its longest rollout; more where it took longer than its tokens say."""
    num_rows: float
    """Rollouts that are sampled at once, on average."""
    num_calls: int = 1
    """Number of calls of the reward function."""
    call_s: float = 0.0
    late_s: float = 0.0
    """Seconds from the request for its batch to its admission, where the run took turns: others came before it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run has measured of its groups and steps, in seconds."""

    groups: tuple[GroupWork, ...]
    """In the order of prompts."""
    speed: Speed
    train_s: tuple[float, ...]
    """For each step: from its batch to the next weights."""
    between_s: tuple[float, ...]
    """For each step: from its weights to the request for a batch; validation and saving happen there."""
    after_s: tuple[float, ...] = (0.0,)
    """For each step: from the request and its last score to its batch; a reward model scores there."""
    max_calls: int | None = None
    """Calls of the reward function at once; None for any number."""
    slice_s: float = 0.0
    """Seconds that weights wait at most while ranks sample; 0 if they are in `train_s`."""
    busy: float = 1.0
    """Share of a group's time in which its rank samples; the rest is the way of requests and answers."""

    @classmethod
    def of(cls, steps: Sequence[Step], *, max_rows: int | None = None, max_calls: int | None = None) -> Self:
        """Read it off at least two steps of a run; `max_rows` is that of `Speed`."""
        starts = starts_of(steps)
        groups_of = [[group for step in start for group in step.groups] for start in starts]
        speed = Speed.fitted(max(groups_of, key=len), max_rows)
        late_s = {group.prompt: group.admitted_s - step.batch.asked_s for step in steps for group in step.groups}
        in_turns = min(late_s.values(), default=0.0) >= 0.0
        works = dict[int, GroupWork]()
        for groups in groups_of:
            servers, tokens = Servers(max_calls), _over(groups, lambda rows: 1 / speed.token_s(rows))
            for group, num_tokens in sorted(zip(groups, tokens, strict=True), key=lambda pair: pair[0].sampled_s):
                arrives = group.sampled_s, len(_lengths(group))
                call_s = servers.length(*arrives, group.scored_s)
                servers.call(*arrives, call_s)
                late = late_s[group.prompt] * in_turns
                works[group.prompt] = GroupWork(float(num_tokens), _rows(group), arrives[1], call_s, late)
        sampled = sum(float(_over(groups, lambda rows: 1 / rows) @ [*map(_rows, groups)]) for groups in groups_of)
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, starts))
        return cls(
            groups=tuple(works[prompt] for prompt in sorted(works)),
            speed=speed,
            train_s=tuple(two.batch.loaded_s - one.batch.taken_s for one, two in pairs),
            between_s=tuple(step.batch.asked_s - step.batch.loaded_s for step in steps),
            after_s=tuple(max(0.0, step.batch.taken_s - step.last_s) for step in steps),
            max_calls=max_calls,
            slice_s=SLICE_S if in_turns else 0.0,
            busy=min(1.0, sum(sum(step.batch.busy_s) for step in steps) / max(_NO_TIME, sampled)),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run would be like."""

    num_prompts: int
    max_staleness: int = 0
    window: int = 1
    num_ranks: int = 1
    train_speed: float = 1.0
    """Speed of the trainer, relative to what was measured."""
    num_steps: int = 100
    num_warmup_steps: int = 0
    """Steps at the beginning that do not count; nor does what comes before the first batch after them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Seconds of a step, and shares of the time in which ranks sample nothing and the trainer waits for a batch."""

    step_s: float
    rollout_idle: float
    actor_idle: float
    staleness_mean: float = 0.0
    """Mean staleness of groups, by the weights that were loaded when they were admitted."""
    staleness_max: int = 0


def measured_outcome(steps: Sequence[Step]) -> Outcome:
    """Return what a run took from its first batch to its last, without its staleness, which its metrics have."""
    starts = [[step.batch for step in start] for start in starts_of(steps)]
    counted = [batch for start in starts for batch in start[1:]]
    total = max(_NO_TIME, sum(start[-1].taken_s - start[0].taken_s for start in starts))
    busy = sum(sum(batch.busy_s) for batch in counted)
    return Outcome(
        step_s=total / max(1, len(counted)),
        rollout_idle=max(0.0, 1 - busy / (total * len(starts[0][0].busy_s))),
        actor_idle=sum(batch.taken_s - batch.asked_s for batch in counted) / total,
    )


def simulate(measured: Measured, setting: Setting) -> Outcome:
    """Run a setting with the measured times, again and again if they are of fewer groups or steps."""
    return _Run(measured, setting).run()


class _Run:
    def __init__(self, measured: Measured, setting: Setting) -> None:
        self._measured, self._setting = measured, setting
        self._groups = Groups(num_prompts=setting.num_prompts, max_staleness=setting.max_staleness,
                              window=setting.window, limit=setting.num_steps * setting.num_prompts)  # fmt: skip
        self._now = self._busy = self._waited = 0.0
        self._ranks: list[dict[int, float]] = [{} for _ in range(setting.num_ranks)]
        """Groups that each rank samples, and the tokens that are left of their longest rollouts."""
        self._events: list[tuple[float, int, int]] = []
        """A heap of times, groups, and the rank that a group is given to then; -1 if it is scored."""
        self._servers = Servers(measured.max_calls)
        self._versions, self._complete, self._ages = dict[int, int](), set[int](), list[int]()

    def run(self) -> Outcome:
        """Return what the setting would take."""
        setting, times = self._setting, self._measured
        began, each_s = 0.0, (times.between_s, times.after_s, times.train_s)
        for step in range(setting.num_steps):
            between_s, after_s, train_s = (seconds[step % len(seconds)] for seconds in each_s)
            self._groups.loaded(step)
            if setting.max_staleness:
                self._admit(step)
            self._until(self._now + between_s)
            if not setting.max_staleness:
                self._admit(step)
            asked = self._now
            while (taken := self._groups.next()) is None or not self._complete.issuperset(taken):
                self._until(self._next_event())
            self._until(self._now + after_s / setting.train_speed)
            self._waited += self._now - asked
            self._ages += [step - self._versions[index] for index in taken]
            self._groups.take({index: self._versions[index] for index in taken})
            if step == setting.num_warmup_steps:
                began, self._busy, self._waited, self._ages = self._now, 0.0, 0.0, []
            if step + 1 < setting.num_steps:
                self._until(self._now + train_s / setting.train_speed)
                self._until(self._now + (times.slice_s / 2 if any(self._ranks) else 0.0))
        total = max(_NO_TIME, self._now - began)
        return Outcome(
            step_s=total / (setting.num_steps - setting.num_warmup_steps - 1),
            rollout_idle=1 - times.busy * self._busy / (total * setting.num_ranks),
            actor_idle=self._waited / total,
            staleness_mean=sum(self._ages) / len(self._ages),
            staleness_max=max(self._ages),
        )

    def _work(self, index: int) -> GroupWork:
        return self._measured.groups[index % len(self._measured.groups)]

    def _token_s(self, rank: Mapping[int, float]) -> float:
        return self._measured.speed.token_s(sum(self._work(index).num_rows for index in rank))

    def _admit(self, version: int) -> None:
        admitted, num_prompts = self._groups.admit(), self._setting.num_prompts
        for number, index in enumerate(admitted):
            place, size = number % num_prompts, min(num_prompts, len(admitted) - number // num_prompts * num_prompts)
            rank = (self._setting.num_ranks * (place + 1) - 1) // size
            late_s = 0.0 if self._setting.max_staleness else self._work(index).late_s
            heapq.heappush(self._events, (self._now + late_s, index, rank))
            self._versions[index] = version
        self._advance(self._now)

    def _next_event(self) -> float:
        """Return when the next group is admitted, sampled or scored; infinity if there is none."""
        ends = [self._now + min(rank.values()) * self._token_s(rank) for rank in self._ranks if rank]
        return min([*ends, *(time for time, *_ in self._events[:1])], default=math.inf)

    def _until(self, time: float) -> None:
        """Let everything happen that does until then; a finite time."""
        while (event := self._next_event()) <= time:
            self._advance(event)
        self._advance(time)

    def _advance(self, time: float) -> None:
        passed, self._now = time - self._now, time
        for rank in self._ranks:
            token_s = self._token_s(rank)
            self._busy += passed if rank else 0.0
            for index in rank:
                rank[index] -= passed / token_s
            for index in [index for index, left in rank.items() if left * token_s <= _NO_TIME]:
                del rank[index]
                work = self._work(index)
                heapq.heappush(self._events, (self._servers.call(time, work.num_calls, work.call_s), index, -1))
        while self._events and self._events[0][0] <= time:
            _, index, rank = heapq.heappop(self._events)
            if rank < 0:
                self._complete.add(index)
                self._groups.complete(index)
            else:
                self._ranks[rank][index] = max(_NO_TIME, self._work(index).num_tokens)
