"""What a run has measured of its ranks, groups and steps, so that others can be simulated.

Owns: what is read off the journal: the times of groups and steps, the speed of a rank, the work of a group, the seconds
of a trainer. Must not know: other settings. Groups of a step that were admitted later than the others replaced some
without signal.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from rallypoint.journal import BatchTaken, GroupScored, RunBegan, read_journal
from rallypoint.roles.rank_engine import SLICE_S

_NUM_FITS, _NO_ROWS = 5, 1e-6
_MOST_WARMUP_STEPS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """Times of a group from its admission to its scores, in seconds since the latest start of the run."""

    index: int
    """Index of its prompt in the run."""
    rank: int
    """Rank of the rollout role that sampled it."""
    admitted_s: float
    sampled_s: float
    scored_s: float
    num_rows: int
    """Its rollouts."""
    num_tokens: int
    """Tokens sampled, of all of them."""
    num_steps: int
    """Tokens of the longest."""

    @classmethod
    def of(cls, group: GroupScored) -> Self:
        """Return those of a group."""
        lengths: dict[int, int] = collections.Counter()
        for sample, _, spans, _ in group.turns:
            lengths[sample] += sum(length for _, length in spans)
        return cls(
            index=group.prompt,
            rank=group.rank,
            admitted_s=group.admitted_s,
            sampled_s=group.sampled_s,
            scored_s=group.scored_s,
            num_rows=len(lengths),
            num_tokens=sum(lengths.values()),
            num_steps=max(lengths.values(), default=0),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of a step's batch, in seconds since the latest start of the run; see `BatchTaken`."""

    step: int
    asked_s: float
    taken_s: float
    loaded_s: float
    busy_s: tuple[float, ...]
    groups: tuple[GroupTimes, ...]


def read_times(journal: Path) -> list[StepTimes]:
    """Return the times of the steps that count, from the file of a run's journal.

    Raises:
        RunFolderError: it is damaged.
    """
    steps, groups = dict[int, StepTimes](), dict[int, GroupTimes]()
    for entry in read_journal(journal):
        match entry.event:
            case RunBegan(first=first):
                steps = {step: times for step, times in steps.items() if step <= first}
            case GroupScored() as group:
                groups[group.prompt] = GroupTimes.of(group)
            case BatchTaken() as taken:
                steps[taken.step] = StepTimes(
                    step=taken.step,
                    asked_s=taken.asked_s,
                    taken_s=taken.taken_s,
                    loaded_s=taken.loaded_s,
                    busy_s=tuple(taken.busy_s),
                    groups=tuple(groups.pop(prompt) for prompt in taken.prompts),
                )
            case _:
                pass
    return list(steps.values())


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
    """Seconds from the question for its batch to its admission, where the run took turns: others came before it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run has measured of its groups and steps, in seconds."""

    groups: tuple[GroupWork, ...]
    """In the order of prompts."""
    speed: Speed
    train_s: tuple[float, ...]
    """For each step: from its batch to the next weights."""
    between_s: tuple[float, ...]
    """For each step: from its weights to the question for a batch; there validation is, and saving."""
    after_s: tuple[float, ...] = (0.0,)
    """For each step: from the question and its last score to its batch; a reward model scores there."""
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
        starts = starts_of(steps)
        kinds = [[group for step in start for group in step.groups] for start in starts]
        speed = Speed.fitted(max(kinds, key=len), max_rows)
        works = {index: work for groups in kinds for index, work in _works(groups, speed, max_calls).items()}
        in_turns = all(group.admitted_s >= step.asked_s for step in steps for group in step.groups)
        late = {group.index: group.admitted_s - step.asked_s for step in steps for group in step.groups if in_turns}
        works |= {index: dataclasses.replace(works[index], late_s=late_s) for index, late_s in late.items()}
        shares = [_dot([*map(_rows, groups)], _over(groups, lambda rows: 1 / rows)) for groups in kinds]
        return cls(
            groups=tuple(works[index] for index in sorted(works)),
            speed=speed,
            train_s=tuple(two.loaded_s - one.taken_s for start in starts for one, two in itertools.pairwise(start)),
            between_s=tuple(step.asked_s - step.loaded_s for step in steps),
            after_s=tuple(_after_s(step) for step in steps),
            max_calls=max_calls,
            slice_s=SLICE_S if in_turns else 0.0,
            busy=min(1.0, sum(sum(step.busy_s) for step in steps) / max(1e-9, sum(shares))),
        )


def settled(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """Leave out the first steps of each start, a quarter of them and five at most: processes start in them."""
    return [step for start in starts_of(steps) for step in start[min(_MOST_WARMUP_STEPS, len(start) // 4) :]]


def _after_s(step: StepTimes) -> float:
    scored = max((group.scored_s for group in step.groups), default=step.asked_s)
    return max(0.0, step.taken_s - max(step.asked_s, scored))


def starts_of(steps: Sequence[StepTimes]) -> list[list[StepTimes]]:
    """Cut steps where the run was started again, with times that begin anew."""
    starts: list[list[StepTimes]] = []
    for step in steps:
        if not starts or step.step != starts[-1][-1].step + 1 or step.loaded_s < starts[-1][-1].taken_s:
            starts.append([])
        starts[-1].append(step)
    return starts


def _works(groups: Sequence[GroupTimes], speed: Speed, max_calls: int | None) -> dict[int, GroupWork]:
    """Return what there was to do for each group, by its index, if ranks have that speed."""
    servers, calls = Servers(max_calls), dict[int, float]()
    for group in sorted(groups, key=lambda group: group.sampled_s):
        calls[group.index] = servers.length(group.sampled_s, group.num_rows, group.scored_s)
        servers.call(group.sampled_s, group.num_rows, calls[group.index])
    return {
        group.index: GroupWork(
            num_tokens=tokens, num_rows=_rows(group), num_calls=group.num_rows, call_s=calls[group.index]
        )
        for group, tokens in zip(groups, _over(groups, lambda rows: 1 / speed.token_s(rows)), strict=True)
    }
