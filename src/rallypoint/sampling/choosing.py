"""Which of the groups under way a step takes, and what is sampled in place of those that it cannot learn from.

Owns: the choice of a step, and when a group is dropped. Must not know: how a group is sampled or scored; the order and
the bound on staleness (`groups.py`).

Consumes: groups, as they are scored. Produces: the groups of a step. Waits for: the groups under way. Unblocked by: the
ends of groups, an error of any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from rallypoint.config import RunConfig
from rallypoint.errors import RallyError, RewardError, ScheduleError, StalenessError
from rallypoint.observability import span
from rallypoint.sampling.group import GroupUnderWay
from rallypoint.sampling.groups import Groups, PromptsDone
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.over_sampling import OverSampledGroups
from rallypoint.sampling.timekeeper import Timekeeper
from rallypoint.sampling.under_way import UnderWay
from rallypoint.types import Metrics, Sum

_NO_SIGNAL = (
    "rollout.dynamic_sampling={batches}: the scores of all rollouts were equal for {num} prompts of a step, {batches} "
    "times rollout.num_prompts, which are too hard, too easy or too narrow to learn from. Look at the rollouts; mix in "
    "other prompts, raise rollout.group_size or rollout.temperature, or give partial scores"
)


class Choice:
    """Chooses the groups of each step."""

    groups: Groups
    """Order and bound; `begin` makes them."""

    def __init__(
        self,
        config: RunConfig,
        mailbox: Mailbox,
        under_way: UnderWay,
        times: Timekeeper,
        admit: Callable[[], None],
    ) -> None:
        """Begin without groups.

        Args:
            config: of the run.
            mailbox: in front of the role that samples.
            under_way: what is sampled and scored.
            times: records what became of each group.
            admit: begins with prompts while there are free slots.
        """
        self._config, self._mailbox, self._under_way, self._admit = config, mailbox, under_way, admit
        self._times = times
        self._dropped: dict[int, GroupUnderWay] = {}
        """Groups that were dropped, and that no step has counted yet."""

    def begin(self, done: PromptsDone) -> None:
        """Begin behind the prompts that are done, with no group under way."""
        self._dropped.clear()
        rollout, num_prompts = self._config.rollout, self._config.rollout.num_prompts
        limit, num_sampled = self._config.trainer.num_steps * num_prompts, rollout.over_sampling
        if num_sampled is not None:
            self.groups = OverSampledGroups(num_prompts=num_prompts, num_sampled=num_sampled, limit=limit, done=done)
            return
        self.groups = Groups(
            num_prompts=num_prompts,
            max_staleness=rollout.max_staleness,
            window=rollout.window,
            limit=limit,
            drops_ahead=self.drops_ahead,
            done=done,
        )

    @property
    def drops_ahead(self) -> bool:
        """Whether a group without signal is replaced as soon as it is scored, and not when a step wants it."""
        return bool(self._config.rollout.dynamic_sampling and self._config.rollout.max_staleness)

    def complete(self, index: int) -> None:
        """Take note that a group is scored. Over-sampled ones count once they are sampled, see `_see_who_ended`."""
        self._times.scored(self._under_way.groups[index])
        if self.drops_ahead and not self._under_way.has_signal(index):
            self._drop([index])
            try:
                self._admit()
            except RallyError as error:
                self._under_way.fail(error)
        elif self._config.rollout.over_sampling is None:
            self.groups.complete(index)
        self._under_way.is_complete.set()

    def _drop(self, indices: Sequence[int]) -> None:
        """Give up groups without signal; the next prompts get their slots."""
        for index in indices:
            self.groups.drop(index)
            self._times.dropped(index, "no signal")
            self._dropped[index] = self._under_way.groups.pop(index)

    async def choose(self) -> tuple[list[GroupUnderWay], list[GroupUnderWay], Metrics]:
        """Return the groups of the next step, those that they replaced, and how many were left out.

        Groups without a signal are replaced (DAPO, arXiv 2503.14476, section 3.2). All groups are waited for
        before others begin, so that the same seed samples the same prompts side by side. A run that samples ahead has
        replaced them as they were scored, see `complete`: which groups a step takes in order of admission follows from
        the scores alone, and what was sampled beside what is in its schedule.
        """
        rollout = self._config.rollout
        with contextlib.ExitStack() as until_chosen:
            if rollout.over_sampling is not None:
                until_chosen.enter_context(self._mailbox.barrier.watched())
            self._admit()
            groups = await self._next_groups()
            while rollout.dynamic_sampling and (without := await self._under_way.without_signal(groups)):
                self._drop(without)
                self._admit()
                groups = await self._next_groups()
            replaced = [self._dropped.pop(index) for index in self.groups.count_replaced()]
            counts = {} if not rollout.dynamic_sampling else {"rollout/num_replaced": Sum(len(replaced))}
            if isinstance(self.groups, OverSampledGroups):
                aborted = self.groups.abort([group.index for group in groups])
                await self._under_way.abort(aborted)
                for index in aborted:
                    self._times.dropped(index, "others had ended")
                counts["rollout/num_aborted"] = Sum(len(aborted))
        return groups, replaced, Metrics(counts)

    async def _next_groups(self) -> list[GroupUnderWay]:
        """Return the groups of the next step; with a window, or others beside them, they are already complete."""
        while (indices := self._find_next()) is None:
            groups = list(self._under_way.groups.values())
            if len(groups) < self._config.rollout.num_prompts:
                raise StalenessError(f"no weights were loaded since the batch before: version {self._mailbox.version}")
            async with self._under_way.unless_it_fails(groups):
                if self._config.rollout.over_sampling is None:
                    await self._under_way.see_one_complete(groups)
                else:
                    await self._see_who_ended(groups)
        return [self._under_way.groups[index] for index in indices]

    def _find_next(self) -> tuple[int, ...] | None:
        """Return the groups of the next step, by the schedule if there is one; None if these cannot be known yet.

        Raises:
            RewardError: too many had to be replaced.
            ScheduleError: the schedule has others than there are.
        """
        rollout, num_replaced = self._config.rollout, len(self.groups.replaced)
        if rollout.dynamic_sampling and num_replaced >= rollout.dynamic_sampling * rollout.num_prompts:
            raise RewardError(_NO_SIGNAL.format(batches=rollout.dynamic_sampling, num=num_replaced))
        if (taken := self._mailbox.schedule.next_take()) is None:
            return self.groups.next()
        missing = sorted(set(taken) - self._under_way.groups.keys())
        if missing and (not self.drops_ahead or self.groups.all_are_complete):
            raise ScheduleError(
                f"rollout.schedule trains on prompts {missing} next, which are not under way: it is not the schedule "
                "of a run with this config"
            )
        if self.drops_ahead and not all(map(self.groups.is_complete, taken)):
            return None  # one may have to be dropped before the next is admitted
        return taken

    async def _see_who_ended(self, groups: Sequence[GroupUnderWay]) -> None:
        """Have the ranks sample for a slice, and note whose rollouts are then complete, in order of admission."""
        if not self._mailbox.is_idle.is_set() or not self._note_ended(groups):
            with span("rollout"):
                await self._under_way.wait(self._mailbox.barrier.next(), groups)
            self._note_ended(groups)

    def _note_ended(self, groups: Sequence[GroupUnderWay]) -> bool:
        """Return whether the rollouts of more groups have ended."""
        ended = [group for group in groups if group.sampled.done() and not self.groups.is_complete(group.index)]
        for group in sorted(ended, key=lambda group: group.index):
            self.groups.complete(group.index)
        return bool(ended)

    async def begin_again(self) -> None:
        """Sample all running groups again where the run that wrote the schedule was killed and resumed."""
        replay = self._mailbox.schedule.replay
        if replay is None or not replay.resumes_after(self.groups.num_taken // self._config.rollout.num_prompts):
            return
        for cohort in {group.cohort for group in self._under_way.groups.values()}:
            cohort.close()
        self._under_way.groups.clear()
        await self._mailbox.stop()
        self.begin(replay.resume())
        self.groups.loaded(self._mailbox.version)
