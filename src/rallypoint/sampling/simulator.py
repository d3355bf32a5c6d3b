"""What another staleness or window would give, by the times in a run's journal.

Owns: what is read off the journal, and a model of a run in few rules. Must not know: texts for people. What decides
which groups are sampled and taken is not a model, but `Groups` itself. The rules:

- groups are spread evenly over the ranks, and a rank takes a + b * rows seconds for a token of all its rows, where a
  and b are fitted to the times of the groups; more rows than fit into its batch take turns;
- a group is scored as long after its last token as it was, whatever else is scored then;
- in turns, a group is admitted as long after the request for its batch as it was: it may have replaced another one;
- a batch is there as long after its last score as it was: a reward model scores whole batches;
- the trainer takes as long as it did, from a batch to the next weights, and then to the next request for a batch;
- published weights wait for the end of the time slice in which ranks sample, half a slice on average.

A run in turns cannot tell how much slower sampler and trainer are when both work at once, on the same cores, nor how
much longer rewards take when more of them are computed at once.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rallypoint.journal import BatchTaken, GroupScored, RolesRestarted, RunBegan, read_journal
from rallypoint.roles.rank_engine import SLICE_S
from rallypoint.sampling.groups import Groups

_NO_TIME, _ALIKE = 1e-9, 0.1
_Array: TypeAlias = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The batch of a step and its groups."""

    batch: BatchTaken
    groups: Sequence[GroupScored]


def read_steps(journal: Path) -> list[MeasuredStep]:
    """Return the steps of a run's longest part between starts and losses of processes, from the file of its journal.

    Raises:
        RunFolderError: it is damaged.
    """
    parts, groups = [list[MeasuredStep]()], dict[int, GroupScored]()
    for entry in read_journal(journal):
        match entry.event:
            case RunBegan() | RolesRestarted():
                parts.append([])
            case GroupScored(validation=None) as group:
                groups[group.prompt] = group
            case BatchTaken() as batch:
                parts[-1].append(MeasuredStep(batch, [groups.pop(prompt) for prompt in batch.prompts]))
    return max(parts, key=len)


def settled(steps: Sequence[MeasuredStep]) -> Sequence[MeasuredStep]:
    """Leave out the first steps, a quarter of them and five at most: processes start in them."""
    return steps[min(5, len(steps) // 4) :]


def _longest_and_rows(group: GroupScored) -> tuple[float, float]:
    """Return the tokens of a group's longest rollout, and how many rollouts were sampled at once, on average."""
    lengths: dict[int, int] = collections.Counter()
    for sample, _, spans, _ in group.turns:
        lengths[sample] += sum(length for _, length in spans)
    longest = max(_NO_TIME, *lengths.values())
    return longest, sum(lengths.values()) / longest


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a rank for a token of each of its rows."""

    step_s: float
    """a: whatever the rows."""
    row_s: float
    """b: for each row."""
    max_rows: float = math.inf
    """Rows that fit into a batch."""

    def token_s(self, rows: float | _Array) -> _Array:
        """Return the seconds until each of these rows has another token.

        >>> [float(Speed(1.0, 0.5, max_rows=4).token_s(rows)) for rows in (2, 8)]
        [2.0, 6.0]
        """
        return np.maximum(_NO_TIME, self.step_s * np.maximum(1.0, rows / self.max_rows) + self.row_s * rows)


class Measured:
    """What a run has measured of its ranks and groups."""

    def __init__(self, steps: Sequence[MeasuredStep], max_rows: float = math.inf) -> None:
        """Read it off at least two steps of one start; `max_rows` is that of `Speed`."""
        self.steps, groups = steps, [group for step in steps for group in step.groups]
        self._spans = np.array([(group.admitted_s, group.sampled_s) for group in groups])
        self._longest, self.rows = np.array([*map(_longest_and_rows, groups)]).T
        """Tokens of each group's longest rollout, and rollouts that are sampled at once, on average."""
        order = np.argsort(times := self._spans.T.ravel(), kind="stable")
        self._times, each_one = times[order], np.ones(len(groups))
        num_rows, num = (np.cumsum(np.concatenate([more, -more])[order])[:-1] for more in (self.rows, each_one))
        num_busy = np.minimum(num, len(steps[0].batch.busy_s))
        self._beside: _Array = num_rows / np.maximum(1, num_busy)
        """Rows of each rank that samples, from each time at which a group begins or ends to the next."""
        sampled_s = max(_NO_TIME, float(num_busy @ np.diff(self._times)))
        self.busy = min(1.0, sum(sum(step.batch.busy_s) for step in steps) / sampled_s)
        """Share of a group's time in which its rank samples; the rest is the way of requests and answers."""
        self.speed = Speed(0.0, 1.0, max_rows)
        for _ in range(5):  # how many tokens were sampled beside how many rows depends on the speed
            self.speed = self._fitted()
        self.tokens = self.over(1 / self.speed.token_s(self._beside)).tolist()
        """Tokens of each group's longest rollout; more where it took longer than its tokens say."""

    def over(self, rate: _Array) -> _Array:
        """Integrate a rate, given from each time to the next, over the seconds of each group."""
        total = np.cumsum([0.0, *(rate * np.diff(self._times))])
        return np.diff(np.interp(self._spans, self._times, total)).ravel()

    def _fitted(self) -> Speed:
        """Fit it by least squares; if all groups had as many others beside them, rows share a rank evenly."""
        each, took_s = 1 / self.speed.token_s(self._beside), np.diff(self._spans).ravel()
        rows = self.over(self._beside * each) / np.maximum(_NO_TIME, self.over(each))  # beside its mean token
        differ = rows.std() > _ALIKE * rows.mean()
        row_s, step_s = np.polyfit(rows, took_s / self._longest, 1, w=self._longest) if differ else (0.0, -1.0)
        if step_s < 0:
            row_s, step_s = took_s.sum() / (self._longest @ rows), 0.0
        elif row_s < 0:
            row_s, step_s = 0.0, took_s.sum() / self._longest.sum()
        return dataclasses.replace(self.speed, step_s=float(step_s), row_s=float(row_s))


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step, and shares of the time in which ranks sample nothing and the trainer waits for a batch."""

    step_s: float
    rollout_idle: float
    actor_idle: float
    ages: Sequence[int] = (0,)
    """Staleness of each group, by the weights that were loaded when it was admitted."""


def measured_outcome(steps: Sequence[MeasuredStep]) -> Timing:
    """Return what a run took from its first batch to its last, without its staleness, which its metrics have."""
    first, *batches = (step.batch for step in steps)
    total = max(_NO_TIME, batches[-1].taken_s - first.taken_s)
    idle = 1 - sum(sum(batch.busy_s) for batch in batches) / (total * len(first.busy_s))
    waited = sum(batch.taken_s - batch.asked_s for batch in batches)
    return Timing(total / len(batches), max(0.0, idle), waited / total)


class Simulation:
    """A run with the measured times, again and again if they are of fewer groups or steps."""

    def __init__(self, measured: Measured, *, num_prompts: int, max_staleness: int = 0, window: int = 1,
                 num_ranks: int = 1, train_speed: float = 1.0, num_steps: int = 100) -> None:  # fmt: skip
        """Begin; `train_speed` is that of the trainer, relative to what was measured."""
        self._measured, self._num_steps, self._num_ranks, self._train_speed = (
            measured,
            num_steps,
            num_ranks,
            train_speed,
        )
        self._groups = Groups(num_prompts=num_prompts, max_staleness=max_staleness, window=window,
                              limit=num_steps * num_prompts)  # fmt: skip
        late_s = [group.admitted_s - step.batch.asked_s for step in measured.steps for group in step.groups]
        self._score_s = [group.scored_s - group.sampled_s for step in measured.steps for group in step.groups]
        self._ahead, self._slice_s = max_staleness > 0, SLICE_S if min(late_s) >= 0 else 0.0
        self._late_s = [0.0 if self._ahead else max(0.0, late) for late in late_s]
        self._now = self._busy = self._tokens = 0.0
        self._ends, self._versions = dict[int, float](), dict[int, int]()
        """Groups that are sampled, and the token at which each ends; versions at the admission of all."""
        self._timed: list[tuple[float, int, bool]] = []
        """A heap of groups that are scored, or not yet sampled, and when that ends."""

    def run(self, num_warmup_steps: int = 0) -> Timing:
        """Return what it takes from the first batch after steps that do not count to the last one."""
        steps, began, waited, ages = self._measured.steps, 0.0, 0.0, list[int]()
        for number in range(self._num_steps):
            one, two = steps[place := number % (len(steps) - 1)], steps[place + 1]
            self._groups.loaded(number)
            between_s, last_s = one.batch.asked_s - one.batch.loaded_s, max(group.scored_s for group in one.groups)
            self._pass(0.0 if self._ahead else between_s)
            for index in self._groups.admit():
                self._versions[index] = number
                heapq.heappush(self._timed, (self._now + self._late_s[index % len(self._late_s)], index, False))
            self._pass(between_s if self._ahead else 0.0)
            asked = self._now
            while (taken := self._groups.next()) is None or not all(map(self._groups.is_complete, taken)):
                self._happens(math.inf)
            self._pass((one.batch.taken_s - max(last_s, one.batch.asked_s)) / self._train_speed)
            waited += self._now - asked
            ages += [number - self._versions[index] for index in taken]
            self._groups.take({index: self._versions[index] for index in taken})
            if number == num_warmup_steps:
                began, self._busy, waited, ages = self._now, 0.0, 0.0, []
            if number + 1 < self._num_steps:
                self._pass((two.batch.loaded_s - one.batch.taken_s) / self._train_speed)
                self._pass(self._slice_s / 2 if self._ends else 0.0)  # weights wait for the slice's end
        total = max(_NO_TIME, self._now - began)
        idle = 1 - self._measured.busy * self._busy / (total * self._num_ranks)
        return Timing(total / (self._num_steps - num_warmup_steps - 1), idle, waited / total, ages)

    def _pass(self, seconds: float) -> None:
        """Let everything happen that does in a finite time."""
        end = self._now + seconds
        while self._happens(end):
            pass

    def _happens(self, end: float) -> bool:
        """Go on to the next event of a group, or to the end; return whether there was one until then."""
        busy, num = min(len(self._ends), self._num_ranks), len(self._score_s)
        rows = sum(self._measured.rows[index % num] for index in self._ends)
        token_s = float(self._measured.speed.token_s(rows / max(1, busy)))
        left, first = min(((at - self._tokens, index) for index, at in self._ends.items()), default=(math.inf, -1))
        sampled_s, timed_s = self._now + max(0.0, left) * token_s, min(self._timed, default=(math.inf,))[0]
        now = min(end, sampled_s, timed_s)
        passed, self._now = now - self._now, now
        self._tokens, self._busy = self._tokens + passed / token_s, self._busy + busy * passed
        if now == sampled_s:
            del self._ends[first]
            heapq.heappush(self._timed, (now + self._score_s[first % num], first, True))
        elif now == timed_s:
            _, index, is_scored = heapq.heappop(self._timed)
            if is_scored:
                self._groups.complete(index)
            else:
                self._ends[index] = self._tokens + self._measured.tokens[index % num]
        return now in (sampled_s, timed_s)
