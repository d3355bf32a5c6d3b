"""What another staleness, window or split of the machine would give, by the times that a run has measured.

Owns: a model of a run in few rules, and its events. Must not know: files, texts for people. What decides which groups
are sampled and taken is not a model, but `Groups` itself. The rules:

- a rank takes a + b * rows seconds for a token of all its rows, where a and b are fitted to the times of the groups;
  more rows than fit into its batch take turns;
- a reward function takes as long as it did for each rollout, and so many at once as it has processes, first come first;
- in turns, a group is admitted as late after the question for its batch as it was: it may have replaced another one;
- a batch is there as long after its last score as it was: a reward model scores whole batches;
- the trainer takes as long as it did, from a batch to the next weights, and then to the next question for a batch;
- weights that are published wait for the end of the time slice in which ranks sample;
- more ranks are faster in proportion.

What no run in turns can tell is how much slower sampler and trainer are when both work at once, on the same cores.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from rallypoint.sampling.groups import Groups
from rallypoint.sampling.measured import GroupWork, Measured, Servers, StepTimes, starts_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run would be like."""

    num_prompts: int
    max_staleness: int = 0
    window: int = 1
    num_ranks: int = 1
    """Ranks that sample."""
    train_speed: float = 1.0
    """Speed of the trainer, where 1 is what was measured."""
    num_steps: int = 100
    num_warmup_steps: int = 0
    """Steps at the beginning that do not count; nor does what comes before the first batch after them."""


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
    """Mean staleness of groups, by the weights that were loaded when they were admitted."""
    staleness_max: int


def measured_outcome(steps: Sequence[StepTimes]) -> Outcome:
    """Return what a run took from its first batch to its last, without its staleness, which its metrics have."""
    total = waited = busy = 0.0
    num_steps = 0
    for start in starts_of(steps):
        total += start[-1].taken_s - start[0].taken_s
        num_steps += len(start) - 1
        waited += sum(step.taken_s - step.asked_s for step in start[1:])
        busy += sum(sum(step.busy_s) for step in start[1:])
    return Outcome(
        step_s=total / max(1, num_steps),
        rollout_idle=max(0.0, 1 - busy / max(1e-9, total * len(steps[0].busy_s))),
        actor_idle=waited / max(1e-9, total),
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
        """Groups that each rank samples, and the tokens that are left of their longest rollouts."""
        self._late: list[tuple[float, int, int]] = []
        """A heap of the times at which groups are admitted, with their indices and ranks."""
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
            self._groups.loaded(step)
            if setting.max_staleness:
                self._admit(step)
            self._until(self._now + times.between_s[step % len(times.between_s)])
            if not setting.max_staleness:
                self._admit(step)
            asked = self._now
            while (taken := self._groups.next()) is None or not self._complete.issuperset(taken):
                self._until(self._next_event())
            self._until(self._now + times.after_s[step % len(times.after_s)] / setting.train_speed)
            self._waited += self._now - asked
            self._ages += [step - self._versions[index] for index in taken]
            self._groups.take({index: self._versions[index] for index in taken})
            if step == setting.num_warmup_steps:
                began, self._busy, self._waited, self._ages = self._now, 0.0, 0.0, []
            if step + 1 < setting.num_steps:
                self._until(self._now + times.train_s[step % len(times.train_s)] / setting.train_speed)
                if self._began is not None and times.slice_s:
                    self._until(self._now + times.slice_s - (self._now - self._began) % times.slice_s)
        total = max(1e-9, self._now - began)
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
        """Return what a token of all groups takes a rank that samples them."""
        return self._measured.speed.token_s(sum(self._work(index).num_rows for index in rank))

    def _admit(self, version: int) -> None:
        admitted, num_prompts = self._groups.admit(), self._setting.num_prompts
        for number, index in enumerate(admitted):
            place, size = number % num_prompts, min(num_prompts, len(admitted) - number // num_prompts * num_prompts)
            rank = (self._setting.num_ranks * (place + 1) - 1) // size
            late_s = 0.0 if self._setting.max_staleness else self._work(index).late_s
            heapq.heappush(self._late, (self._now + late_s, index, rank))
            self._versions[index] = version
        self._advance(self._now)

    def _next_event(self) -> float:
        """Return when the next group is sampled or scored."""
        ends = [self._now + min(rank.values()) * self._token_s(rank) for rank in self._ranks if rank]
        return min([*ends, *(time for time, _ in self._rewards[:1]), *(time for time, *_ in self._late[:1])])

    def _until(self, time: float) -> None:
        """Let everything happen that does until then."""
        while (any(self._ranks) or self._rewards or self._late) and (event := self._next_event()) <= time:
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
        while self._late and self._late[0][0] <= time:
            _, index, place = heapq.heappop(self._late)
            self._ranks[place][index] = max(1e-9, self._work(index).num_tokens)
            self._began = time if self._began is None else self._began
        self._began = self._began if any(self._ranks) else None
        while self._rewards and self._rewards[0][0] <= time:
            index = heapq.heappop(self._rewards)[1]
            self._complete.add(index)
            self._groups.complete(index)


def splits(num_processes: int, num_actor: int) -> Mapping[tuple[int, int], float]:
    """Return how processes could be split into ranks that sample and ranks that train, and how fast these train.

    Three ranks that train and another process, or four processes that take turns at both:

    >>> splits(4, 3)
    {(1, 3): 1.0, (2, 2): 0.6666666666666666, (3, 1): 0.3333333333333333}
    >>> splits(4, 4)
    {(1, 3): 0.75, (2, 2): 0.5, (3, 1): 0.25}

    Args:
        num_processes: those that there are.
        num_actor: ranks that trained in the time that was measured.
    """
    of_sampling = range(1, num_processes)
    return {(num, num_processes - num): (num_processes - num) / num_actor for num in of_sampling}
