"""What another staleness, window or split of the machine would give, by the times that a run has measured.

Owns: a model of a run in few rules, and its events. Must not know: files, texts for people. What decides which groups
are sampled and taken is not a model, but `Groups` itself. The rules:

- a rank shares its speed evenly among the groups that it samples, so that n of them take n times as long as one;
- the reward of a group takes as long as it did, whatever else is scored;
- the trainer takes as long as it did, from a batch to the next weights, and then to the next question for a batch;
- more ranks are faster in proportion.

On accelerators a rank decodes several groups in hardly more time than one, so there sampling ahead is worth more.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import statistics
from collections.abc import Mapping, Sequence

from rallypoint.roles.groups import Groups
from rallypoint.run.timeline import StepTimes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run has measured of its groups and steps, in seconds."""

    work_s: tuple[float, ...]
    """For each group, in the order of prompts: what sampling it takes a rank that samples nothing else."""
    reward_s: tuple[float, ...]
    """For each group: what its reward takes."""
    train_s: tuple[float, ...]
    """For each step: from its batch to the next weights."""
    between_s: float
    """From new weights to the next question for a batch."""

    @classmethod
    def of(cls, steps: Sequence[StepTimes]) -> Measured:
        """Read it off the times of at least two steps."""
        groups = sorted((group for step in steps for group in step.groups), key=lambda group: group.index)
        work = _work([(group.rank, group.admitted_s, group.sampled_s) for group in groups])
        pairs = [(one, next_one) for one, next_one in itertools.pairwise(steps) if _follow(one, next_one)]
        return cls(
            work_s=tuple(work),
            reward_s=tuple(group.scored_s - group.sampled_s for group in groups),
            train_s=tuple(later.loaded_s - one.taken_s for one, later in pairs),
            between_s=statistics.median(later.asked_s - later.loaded_s for _, later in pairs),
        )


def _follow(one: StepTimes, later: StepTimes) -> bool:
    """Whether no restart of the run lies between two steps."""
    return later.step == one.step + 1 and later.loaded_s >= one.taken_s


def _work(intervals: Sequence[tuple[int, float, float]]) -> list[float]:
    """Return the seconds of a rank that groups had of it, which it shared evenly among those that it sampled.

    Of two groups that began together the first was alone with the other for 2 s, and the second then had 1 s more:

    >>> _work([(0, 0.0, 2.0), (0, 0.0, 3.0)])
    [1.0, 2.0]

    Args:
        intervals: rank, begin and end of each group.
    """
    work = [0.0] * len(intervals)
    for rank in {rank for rank, _, _ in intervals}:
        mine = [number for number, (own, _, _) in enumerate(intervals) if own == rank]
        edges = sorted({edge for number in mine for edge in intervals[number][1:]})
        begins = sorted(mine, key=lambda number: intervals[number][1])
        active: list[int] = []
        for start, end in itertools.pairwise(edges):
            while begins and intervals[begins[0]][1] <= start:
                active.append(begins.pop(0))
            active = [number for number in active if intervals[number][2] > start]
            for number in active:
                work[number] += (end - start) / len(active)
    return work


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
        """Of each rank: the groups that it samples, and the work that is left of them."""
        self._rewards: list[tuple[float, int]] = []
        """A heap of ends of rewards, and their groups."""
        self._versions: dict[int, int] = {}
        self._complete: set[int] = set()
        self._ages: list[int] = []

    def run(self) -> Outcome:
        """Return what comes out."""
        setting, times = self._setting, self._measured
        for step in range(setting.num_steps):
            self._groups.loaded(step)
            if setting.max_staleness:
                self._admit(step)
            if step:
                self._until(self._now + times.between_s)
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
        return Outcome(
            step_s=self._now / setting.num_steps,
            rollout_idle=1 - self._busy / (self._now * setting.num_ranks),
            actor_idle=self._waited / self._now,
            staleness_mean=statistics.mean(self._ages),
            staleness_max=max(self._ages),
        )

    def _admit(self, version: int) -> None:
        admitted, num_prompts = self._groups.admit(), self._setting.num_prompts
        for number, index in enumerate(admitted):
            place, size = number % num_prompts, min(num_prompts, len(admitted) - number // num_prompts * num_prompts)
            rank = (self._setting.num_ranks * (place + 1) - 1) // size
            self._ranks[rank][index] = max(1e-9, self._measured.work_s[index % len(self._measured.work_s)])
            self._versions[index] = version

    def _next_event(self) -> float:
        """Return when the next group is sampled or scored."""
        ends = [self._now + min(rank.values()) * len(rank) for rank in self._ranks if rank]
        return min([*ends, *(time for time, _ in self._rewards[:1])])

    def _until(self, time: float) -> None:
        """Let everything happen that does until then."""
        while self._ranks_or_rewards() and (event := self._next_event()) <= time:
            self._advance(event)
        self._advance(time)

    def _ranks_or_rewards(self) -> bool:
        return any(self._ranks) or bool(self._rewards)

    def _advance(self, time: float) -> None:
        passed, self._now = time - self._now, time
        for rank in self._ranks:
            self._busy += passed if rank else 0.0
            _share(rank, passed)
            for index in [index for index, left in rank.items() if left <= 1e-9]:
                del rank[index]
                reward_s = self._measured.reward_s[index % len(self._measured.reward_s)]
                heapq.heappush(self._rewards, (time + reward_s, index))
        while self._rewards and self._rewards[0][0] <= time:
            index = heapq.heappop(self._rewards)[1]
            self._complete.add(index)
            self._groups.complete(index)


def _share(rank: dict[int, float], passed: float) -> None:
    """Let a rank sample for some seconds."""
    part = passed / len(rank) if rank else 0.0
    for index in rank:
        rank[index] -= part


def splits(num_rollout: int, num_actor: int) -> Mapping[tuple[int, int], float]:
    """Return how a machine could be split into ranks that sample and ranks that train, and how fast these train.

    >>> splits(1, 3)
    {(1, 3): 1.0, (2, 2): 0.6666666666666666, (3, 1): 0.3333333333333333}
    """
    total = num_rollout + num_actor
    return {(sampling, total - sampling): (total - sampling) / num_actor for sampling in range(1, total)}
