"""What another staleness, window or split of the machine would give, by the times that a run has measured.

Owns: a model of a run in few rules, and its events. Must not know: files, texts for people. What decides which groups
are sampled and taken is not a model, but `Groups` itself. The rules:

- a rank takes a + b * rows seconds for a token of all its rows, where a and b are fitted to the times of the groups;
  more rows than fit into its batch take turns;
- a reward function takes as long as it did for each rollout, and so many at once as it has processes, first come first;
- the trainer takes as long as it did, from a batch to the next weights, and then to the next question for a batch;
- weights that are published wait for the end of the time slice in which ranks sample;
- more ranks are faster in proportion.

What no run in turns can tell is how much slower sampler and trainer are when both work at once, on the same cores.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rallypoint.roles.groups import Groups
from rallypoint.roles.requests import SLICE_S
from rallypoint.run.timeline import GroupTimes, StepTimes

_NUM_FITS, _NO_ROWS = 5, 1e-6


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
        return max(1e-9, self.step_s * self.turns(rows) + self.row_s * rows)

    def turns(self, rows: float) -> float:
        """Return how many steps it takes until each of these rows has had its turn."""
        return 1.0 if self.max_rows is None else max(1.0, rows / self.max_rows)

    @classmethod
    def fitted(cls, groups: Sequence[GroupTimes], max_rows: int | None) -> Self:
        """Fit it to the times of groups, by least squares.

        Where all groups had as many others beside them nothing says what fewer would take: then rows share it evenly.
        """
        speed = cls(row_s=1.0, max_rows=max_rows)
        for _ in range(_NUM_FITS):  # how many tokens were sampled beside how many rows depends on the speed
            speed = speed._nearer(groups)
        return speed

    def _nearer(self, groups: Sequence[GroupTimes]) -> Self:
        tokens, steps, others = (
            _over(groups, rate)
            for rate in (
                lambda rows: 1 / self.token_s(rows),
                lambda rows: self.turns(rows) / self.token_s(rows),
                lambda rows: rows / self.token_s(rows),
            )
        )
        share = [group.num_steps / max(1e-9, own) for group, own in zip(groups, tokens, strict=True)]
        took = [group.sampled_s - group.admitted_s for group in groups]
        a, b = ([one * own for one, own in zip(each, share, strict=True)] for each in (steps, others))
        aa, ab, bb, at, bt = _dot(a, a), _dot(a, b), _dot(b, b), _dot(a, took), _dot(b, took)
        left = aa * bb - ab * ab
        if left <= 0.01 * aa * bb or bb * at <= ab * bt:
            return dataclasses.replace(self, step_s=0.0, row_s=bt / (bb or 1.0))
        if aa * bt <= ab * at:
            return dataclasses.replace(self, step_s=at / aa, row_s=0.0)
        return dataclasses.replace(self, step_s=(bb * at - ab * bt) / left, row_s=(aa * bt - ab * at) / left)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _over(groups: Sequence[GroupTimes], rate: Callable[[float], float]) -> list[float]:
    """Integrate a rate that depends on the rows which a rank samples, while it samples each group.

    The first and the second have two rows each on rank 0, the second for 2 s of the first's 4:

    >>> def group(rank, begin, end):
    ...     return GroupTimes(index=0, rank=rank, admitted_s=begin, sampled_s=end, scored_s=end,
    ...                       num_rows=2, num_tokens=20, num_steps=10)
    >>> _over([group(0, 0.0, 4.0), group(0, 0.0, 2.0), group(1, 0.0, 4.0)], lambda rows: rows)
    [12.0, 8.0, 8.0]
    """
    found = [0.0] * len(groups)
    for rank in {group.rank for group in groups}:
        mine = [number for number, group in enumerate(groups) if group.rank == rank]
        changes = sorted(
            change
            for group in (groups[number] for number in mine)
            for change in ((group.admitted_s, _rows(group)), (group.sampled_s, -_rows(group)))
        )
        times, sums, rows = [changes[0][0]], [0.0], 0.0
        for time, change in changes:
            sums.append(sums[-1] + (rate(rows) * (time - times[-1]) if rows > _NO_ROWS else 0.0))
            times.append(time)
            rows += change
        for number in mine:
            ends = (groups[number].admitted_s, groups[number].sampled_s)
            first, last = (sums[bisect.bisect_right(times, end) - 1] for end in ends)
            found[number] = last - first
    return found


def _rows(group: GroupTimes) -> float:
    """Return how many of a group's rollouts were sampled at once, on average."""
    return group.num_tokens / max(1, group.num_steps)


class Servers:
    """Reward functions at work: so many calls at once, first come first served."""

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
        """Return how long each of some calls took if all take as long, by the end of the last."""
        if self._most is None or not num_calls:
            return end - arrival
        first = max(arrival, heapq.nsmallest(num_calls, self._free)[-1])
        return max(0.0, end - first) / -(-num_calls // self._most)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What there is to do for a group."""

    num_tokens: float
    """Of its longest rollout; more where it took longer than its tokens say."""
    num_rows: float
    """Rollouts that are sampled at once, on average."""
    num_calls: int = 1
    """Of the reward function."""
    call_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run has measured of its groups and steps, in seconds."""

    groups: tuple[Work, ...]
    """In the order of prompts."""
    speed: Speed
    train_s: tuple[float, ...]
    """For each step: from its batch to the next weights."""
    between_s: tuple[float, ...]
    """For each step: from its weights to the question for a batch; there validation is, and saving."""
    max_calls: int | None = None
    """Calls of the reward function at once; None for any number."""
    slice_s: float = 0.0
    """Seconds that weights wait at most while ranks sample; 0 where `train_s` has them already."""
    busy: float = 1.0
    """Share of a group's time in which its rank samples; the rest is the way of requests and answers."""

    @classmethod
    def of(cls, steps: Sequence[StepTimes], *, max_rows: int | None = None, max_calls: int | None = None) -> Self:
        """Read it off the times of at least two steps.

        Args:
            steps: of a run.
            max_rows: rows that a rank samples at once; None for any number.
            max_calls: calls of the reward function at once; None for any number.
        """
        starts = _starts(steps)
        kinds = [[group for step in start for group in step.groups] for start in starts]
        speed = Speed.fitted(max(kinds, key=len), max_rows)
        works = {index: work for groups in kinds for index, work in _works(groups, speed, max_calls).items()}
        in_turns = all(group.admitted_s >= step.asked_s for step in steps for group in step.groups)
        shares = [_dot([*map(_rows, groups)], _over(groups, lambda rows: 1 / rows)) for groups in kinds]
        return cls(
            groups=tuple(works[index] for index in sorted(works)),
            speed=speed,
            train_s=tuple(two.loaded_s - one.taken_s for start in starts for one, two in itertools.pairwise(start)),
            between_s=tuple(step.asked_s - step.loaded_s for step in steps),
            max_calls=max_calls,
            slice_s=SLICE_S if in_turns else 0.0,
            busy=min(1.0, sum(sum(step.busy_s) for step in steps) / max(1e-9, sum(shares))),
        )


def _starts(steps: Sequence[StepTimes]) -> list[list[StepTimes]]:
    """Cut steps where the run was started again, with times that begin anew."""
    starts: list[list[StepTimes]] = []
    for step in steps:
        if not starts or step.step != starts[-1][-1].step + 1 or step.loaded_s < starts[-1][-1].taken_s:
            starts.append([])
        starts[-1].append(step)
    return starts


def _works(groups: Sequence[GroupTimes], speed: Speed, max_calls: int | None) -> dict[int, Work]:
    """Return what there was to do for each group, by its index, if ranks have that speed."""
    servers, calls = Servers(max_calls), dict[int, float]()
    for group in sorted(groups, key=lambda group: group.sampled_s):
        calls[group.index] = servers.length(group.sampled_s, group.num_rows, group.scored_s)
        servers.call(group.sampled_s, group.num_rows, calls[group.index])
    return {
        group.index: Work(num_tokens=tokens, num_rows=_rows(group), num_calls=group.num_rows, call_s=calls[group.index])
        for group, tokens in zip(groups, _over(groups, lambda rows: 1 / speed.token_s(rows)), strict=True)
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run would be like."""

    num_prompts: int
    max_staleness: int = 0
    window: int = 1
    num_ranks: int = 1
    """Ranks that sample."""
    train_speed: float = 1.0
    """Of the trainer, where 1 is what was measured."""
    num_steps: int = 100
    num_warmup_steps: int = 0
    """Steps at the beginning that do not count."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run would take, and who would wait."""

    step_s: float
    """Seconds of a step."""
    rollout_idle: float
    """Share of the time in which a rank samples nothing."""
    actor_idle: float
    """Share of the time in which the trainer waits for a batch."""
    staleness_mean: float
    """Of groups, by the weights that were loaded when they were admitted."""
    staleness_max: int


def measured_outcome(steps: Sequence[StepTimes]) -> Outcome:
    """Return what a run that was measured took, without its staleness, which its metrics have."""
    first, last = steps[0], steps[-1]
    total = last.taken_s - first.loaded_s
    waited = sum(step.taken_s - step.asked_s for step in steps)
    busy = sum(sum(step.busy_s) for step in steps)
    return Outcome(
        step_s=total / len(steps),
        rollout_idle=max(0.0, 1 - busy / (total * len(first.busy_s))),
        actor_idle=waited / total,
        staleness_mean=0.0,
        staleness_max=0,
    )


def simulate(measured: Measured, setting: Setting) -> Outcome:
    """Run a setting with the measured times, again and again if they are of fewer groups or steps."""
    return _Run(measured, setting).run()


class _Run:
    """A simulated run."""

    def __init__(self, measured: Measured, setting: Setting) -> None:
        self._measured, self._setting = measured, setting
        self._groups = Groups(
            num_prompts=setting.num_prompts,
            max_staleness=setting.max_staleness,
            window=setting.window,
            limit=setting.num_steps * setting.num_prompts,
        )
        self._now = self._busy = self._waited = 0.0
        self._ranks: list[dict[int, float]] = [{} for _ in range(setting.num_ranks)]
        """Of each rank: the groups that it samples, and the tokens that are left of their longest rollouts."""
        self._began: float | None = None
        """When the first of the time slices began that have followed each other; None if no rank has work."""
        self._servers = Servers(measured.max_calls)
        self._rewards: list[tuple[float, int]] = []
        """A heap of ends of rewards, and their groups."""
        self._versions: dict[int, int] = {}
        self._complete: set[int] = set()
        self._ages: list[int] = []

    def run(self) -> Outcome:
        """Return what comes out."""
        setting, times = self._setting, self._measured
        began = 0.0
        for step in range(setting.num_steps):
            if step == setting.num_warmup_steps:
                began, self._busy, self._waited, self._ages = self._now, 0.0, 0.0, []
            self._groups.loaded(step)
            if setting.max_staleness:
                self._admit(step)
            self._until(self._now + times.between_s[step % len(times.between_s)])
            if not setting.max_staleness:
                self._admit(step)
            asked = self._now
            while (taken := self._groups.next()) is None or not self._complete.issuperset(taken):
                self._until(self._next_event())
            self._waited += self._now - asked
            self._ages += [step - self._versions[index] for index in taken]
            self._groups.take({index: self._versions[index] for index in taken})
            if step + 1 < setting.num_steps:
                self._until(self._now + times.train_s[step % len(times.train_s)] / setting.train_speed)
                if self._began is not None and times.slice_s:
                    self._until(self._now + times.slice_s - (self._now - self._began) % times.slice_s)
        total = self._now - began
        return Outcome(
            step_s=total / (setting.num_steps - setting.num_warmup_steps),
            rollout_idle=1 - times.busy * self._busy / (total * setting.num_ranks),
            actor_idle=self._waited / total,
            staleness_mean=sum(self._ages) / len(self._ages),
            staleness_max=max(self._ages),
        )

    def _work(self, index: int) -> Work:
        return self._measured.groups[index % len(self._measured.groups)]

    def _token_s(self, rank: Mapping[int, float]) -> float:
        """Return what a token of all groups takes a rank that samples them."""
        return self._measured.speed.token_s(sum(self._work(index).num_rows for index in rank))

    def _admit(self, version: int) -> None:
        admitted, num_prompts = self._groups.admit(), self._setting.num_prompts
        for number, index in enumerate(admitted):
            place, size = number % num_prompts, min(num_prompts, len(admitted) - number // num_prompts * num_prompts)
            rank = (self._setting.num_ranks * (place + 1) - 1) // size
            self._ranks[rank][index] = max(1e-9, self._work(index).num_tokens)
            self._versions[index] = version
        if admitted and self._began is None:
            self._began = self._now

    def _next_event(self) -> float:
        """Return when the next group is sampled or scored."""
        ends = [self._now + min(rank.values()) * self._token_s(rank) for rank in self._ranks if rank]
        return min([*ends, *(time for time, _ in self._rewards[:1])])

    def _until(self, time: float) -> None:
        """Let everything happen that does until then."""
        while (any(self._ranks) or self._rewards) and (event := self._next_event()) <= time:
            self._advance(event)
        self._advance(time)

    def _advance(self, time: float) -> None:
        passed, self._now = time - self._now, time
        for rank in self._ranks:
            token_s = self._token_s(rank)
            self._busy += passed if rank else 0.0
            for index in rank:
                rank[index] -= passed / token_s
            for index in [index for index, left in rank.items() if left * token_s <= 1e-9]:
                del rank[index]
                work = self._work(index)
                heapq.heappush(self._rewards, (self._servers.call(time, work.num_calls, work.call_s), index))
                self._began = time if len(self._ranks) == 1 else self._began  # one rank alone answers when a group ends
        self._began = self._began if any(self._ranks) else None
        while self._rewards and self._rewards[0][0] <= time:
            index = heapq.heappop(self._rewards)[1]
            self._complete.add(index)
            self._groups.complete(index)


def splits(num_rollout: int, num_actor: int) -> Mapping[tuple[int, int], float]:
    """Return how a machine could be split into ranks that sample and ranks that train, and how fast these train.

    >>> splits(1, 3)
    {(1, 3): 1.0, (2, 2): 0.6666666666666666, (3, 1): 0.3333333333333333}
    """
    total = num_rollout + num_actor
    return {(sampling, total - sampling): (total - sampling) / num_actor for sampling in range(1, total)}
