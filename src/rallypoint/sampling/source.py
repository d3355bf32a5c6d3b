"""Prompts in, scored groups out.

Owns: when prompts are sampled, which groups a step takes, and how these become a batch. Must not know: engines, ranks'
state, what is done with a batch; which examples prompts are (`data/prompt_sets.py`); how a group is sampled
(`in_flight.py`); the order of groups and the bound (`groups.py`).

Consumes: examples, by their place in the prompt stream. Produces: scored batches, groups in order of admission. Waits
for: groups in flight, and the reward models. Unblocked by: the ends of groups, an error of any of them, and `load`,
which brings the next version.

A checkpoint needs to know which prompts have gone into batches. The rest follows from that and the seed. What was in
flight when a run ended is sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rallypoint.config import RunConfig
from rallypoint.data.prompt_sets import PromptSets, TrainingPrompts
from rallypoint.environments.environment import Episode, single_turn
from rallypoint.environments.failures import check_failures, describe_failures
from rallypoint.environments.scored import ModelScores, combine
from rallypoint.errors import RewardError, ScheduleError, StalenessError
from rallypoint.generation import SamplingParams
from rallypoint.journal import GroupDropped
from rallypoint.observability import span
from rallypoint.roles.frozen import Scorers
from rallypoint.roles.rollout import Rollouts
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.sampling.groups import OverSampledGroups, PromptsDone, groups_of
from rallypoint.sampling.in_flight import GroupInFlight, InFlight, Watch
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.sampled import Measuring, Sampled, penalty_of, shown_tokens
from rallypoint.types import Last, Metrics, RolloutBatch, Sum, merge

# Training seeds are below 2**31, so validation never shares its random numbers with training.
_VALIDATION_STREAM = 2**32
_NO_SIGNAL = (
    "rollout.dynamic_sampling={batches}: the scores of all rollouts were equal for {num} prompts of a step, {batches} "
    "times rollout.num_prompts, which are too hard, too easy or too narrow to learn from. Look at the rollouts; mix in "
    "other prompts, raise rollout.group_size or rollout.temperature, or give partial scores"
)


class RolloutSource:
    """Admits prompts and returns them as sampled and scored batches."""

    def __init__(
        self,
        config: RunConfig,
        mailbox: Mailbox,
        prompts: PromptSets,
        rewards: Scorers,
        episode: Episode,
        watch: Watch,
    ) -> None:
        """Begin without groups.

        Args:
            config: of the run.
            mailbox: in front of the role that samples.
            prompts: what is sampled.
            rewards: what scores rollouts.
            episode: how a rollout comes about.
            watch: who is told what is waited for, and which groups an earlier start sampled.
        """
        self.mailbox = mailbox
        self.newest: StepRollouts | None = None
        """Rollouts of the newest batch."""
        self.validated: StepRollouts | None = None
        """Rollouts of the newest validation."""
        self._config, self._prompts, self._rewards, self._watch = config, prompts, rewards, watch
        self._in_flight = InFlight(config, mailbox, prompts.tokenizer, rewards, episode, watch)
        self._dropped: dict[int, GroupInFlight] = {}
        """Groups that were dropped, and that no step has counted yet."""
        self._is_complete = asyncio.Event()
        """Set when another group is complete."""
        self._penalty, self._train = penalty_of(config), TrainingPrompts(config, prompts.train)
        self._params = SamplingParams.of(config.rollout, seed=config.seed, stop_tokens=prompts.stop_tokens)
        is_shown = shown_tokens(prompts.tokenizer, prompts.stop_tokens)
        self._measuring = Measuring(config, is_shown, episode is not single_turn, self._train.num_sources)
        self._num_loads, self.done = 0, PromptsDone()
        asyncio.create_task(self._follow()).add_done_callback(self._in_flight.note_failure)

    @property
    def done(self) -> PromptsDone:
        """The prompts that have gone into batches: all that a checkpoint needs."""
        return self._groups.done

    @done.setter
    def done(self, done: PromptsDone) -> None:
        """Begin behind the prompts that are done, with no group in flight."""
        self._dropped.clear()
        self._groups = groups_of(self._config, done)

    def go_on(self, step: int, version: int, done: PromptsDone) -> None:
        """Go on after a step, with weights of a version, and with the groups that were finished."""
        self.done = done
        found = self.mailbox.schedule.go_on(step, version, done, self._watch.kept.go_on(step, done))
        self._watch.kept.only(found.kept)
        for loaded in found.loads:
            self._groups.loaded(loaded)

    @property
    def num_admitted(self) -> int:
        """Number of prompts that have gone into batches."""
        return self._groups.num_taken

    @num_admitted.setter
    def num_admitted(self, num_prompts: int) -> None:
        self.done = PromptsDone(num_prompts, num_prompts)

    @property
    def _num_steps(self) -> int:
        """Number of steps that have their batch."""
        return self._groups.num_taken // self._config.rollout.num_prompts

    @property
    def role(self) -> Rollouts:
        """The role that samples."""
        return self.mailbox.role

    def examples_of(self, batch: RolloutBatch) -> list[int]:
        """Return the number of the example that each row answers."""
        return [self._train.example_index(int(index)) for index in batch.prompt_index]

    def announce(self, version: int, digest: str) -> None:
        """See `Subscriber`."""
        self._watch.kept.published(self._num_steps)
        self.mailbox.announce(version, digest)

    async def load(self, version: int, published: Path | None = None) -> None:
        """Have the ranks load new weights; a run that samples ahead has more to sample then."""
        await self.mailbox.load(version, published)
        self._watch.times.loaded_s = self._watch.now()
        if self._config.rollout.max_staleness:
            self._admit()

    async def next_batch(self) -> Sampled:
        """Return B scored rollouts of the next P prompts, fewer if some could not be scored.

        Raises:
            TooManyFailuresError: more of them than rollout.max_failed have failed or could not be scored.
            RewardError: none could be scored.
            StalenessError: a rollout was sampled from weights that are too old, or no weights were loaded since the
                previous batch.
            AbandonedError: the run is ending, and the reward function did not return in time.
        """
        rollout, times = self._config.rollout, self._watch.times
        times.asked_s = self._watch.now()
        await self._begin_again()
        groups, replaced, counts = await self._choose()
        sampled = await self._batch_of(groups, replaced)
        taken = {group.index: group.sampled.result().oldest_version for group in groups}
        self._groups.take(taken)
        if (replay := self.mailbox.schedule.replay) is not None:
            replay.taken()
        for index in taken:
            del self._in_flight.groups[index]
        if self._train.num_in_epoch is not None:
            counts = merge(counts, Metrics({"data/epoch": Last(self.done.num / self._train.num_in_epoch)}))
        sampled = dataclasses.replace(sampled, metrics=merge(sampled.metrics, counts))
        self._watch.kept.taken(self._num_steps, [*taken, *(group.index for group in replaced)])
        event, idle = times.taken(self._num_steps, groups, self.mailbox.take_busy_s(), self._watch.now())
        self._watch.journal.append(event)
        if rollout.max_staleness:
            aged = sampled.aged(self._groups.age, keeps=rollout.on_load == "keep")
            sampled = dataclasses.replace(aged, metrics=merge(aged.metrics, idle))
        self.newest = sampled.rollouts
        if self._penalty is None:
            return sampled
        batch, _ = self._penalty(sampled.batch)
        _, lost = self._penalty(sampled.rollouts.scored.batch)  # as `reward/mean`: also of groups that were replaced
        return dataclasses.replace(sampled, batch=batch, metrics=merge(sampled.metrics, lost))

    async def validate(self) -> Sampled | None:
        """Return the validation prompts' rollouts, n each; None when the run has no validation set.

        Raises:
            RewardError, GenerationError, AbandonedError: see `next_batch`.
        """
        if (prompts := self._prompts.of_validation(self._config.validation.max_prompts)) is None:
            return None
        params = dataclasses.replace(
            self._params,
            seed=self._config.seed + _VALIDATION_STREAM,
            temperature=self._config.validation.temperature,
        )
        num_samples = self._config.validation.num_samples
        groups = self._in_flight.begin(prompts, params, num_samples, validation=self._num_steps)
        sampled = await self._batch_of(groups)
        self.validated = sampled.rollouts
        return sampled

    def _admit(self) -> None:
        """Submit prompts while there are free slots; all of them are submitted before their first token is sampled."""
        if self.mailbox.num_loads > self._num_loads:
            self._num_loads = self.mailbox.num_loads
            self._groups.loaded(self.mailbox.version)
        num_prompts, admitted = self._config.rollout.num_prompts, self._groups.admit()
        num_kept = len(self._watch.kept.groups.keys() & set(admitted))
        if not self._config.rollout.max_staleness and 0 < num_kept < len(admitted):
            self._watch.kept.forget(admitted)  # what is sampled side by side depends on each other, unless it is exact
        for first in range(0, len(admitted), num_prompts):
            prompts = self._train.at(admitted[first : first + num_prompts])
            self._in_flight.admit(prompts, self._params, num_prompts if self._groups.drops_ahead else None)

    async def _follow(self) -> None:
        """Note which groups can be trained on, as they are scored; over-sampled ones can once they are sampled."""
        while (group := await self._in_flight.scored.get()) is not None:
            if self._in_flight.groups.get(group.index) is not group:  # of the validation, or dropped meanwhile
                continue
            if self._groups.drops_ahead and not self._in_flight.has_signal(group):
                self._drop([group.index])
                self._admit()
            elif self._config.rollout.over_sampling is None:
                self._groups.complete(group.index)
            self._is_complete.set()

    def _drop(self, indices: Sequence[int]) -> None:
        """Drop groups without a signal; the next prompts get their slots."""
        for index in indices:
            self._groups.drop(index)
            self._watch.journal.append(GroupDropped(prompt=index, why="no signal"))
            self._dropped[index] = self._in_flight.groups.pop(index)

    async def _choose(self) -> tuple[list[GroupInFlight], list[GroupInFlight], Metrics]:
        """Return the groups of the next step, those that they replaced, and how many were left out.

        Groups without a signal are replaced (DAPO, arXiv 2503.14476, section 3.2). All groups are waited for
        before others begin, so that the same seed samples the same prompts side by side. A run that samples ahead has
        replaced them as they were scored, see `_follow`: which groups a step takes in order of admission follows from
        the scores alone, and which requests were sampled together is in its schedule.
        """
        rollout = self._config.rollout
        with contextlib.ExitStack() as until_chosen:
            if rollout.over_sampling is not None:
                until_chosen.enter_context(self.mailbox.barrier.watched())
            self._admit()
            groups = await self._next_groups()
            while rollout.dynamic_sampling and (without := await self._in_flight.without_signal(groups)):
                self._drop(without)
                self._admit()
                groups = await self._next_groups()
            replaced = [self._dropped.pop(index) for index in self._groups.count_replaced()]
            counts = {} if not rollout.dynamic_sampling else {"rollout/num_replaced": Sum(len(replaced))}
            if isinstance(self._groups, OverSampledGroups):
                aborted = self._groups.abort([group.index for group in groups])
                await self._in_flight.abort(aborted)
                self._watch.journal.append(*(GroupDropped(prompt=one, why="others had ended") for one in aborted))
                counts["rollout/num_aborted"] = Sum(len(aborted))
        return groups, replaced, Metrics(counts)

    async def _next_groups(self) -> list[GroupInFlight]:
        """Return the groups of the next step; with a window, or over-sampling, they are already complete."""
        while (indices := self._find_next()) is None:
            groups = list(self._in_flight.groups.values())
            if len(groups) < self._config.rollout.num_prompts:
                raise StalenessError(f"no weights were loaded since the batch before: version {self.mailbox.version}")
            async with self._in_flight.unless_it_fails(groups):
                if self._config.rollout.over_sampling is None:
                    self._is_complete.clear()
                    await self._in_flight.see_one_complete(self._is_complete, groups)
                elif not self.mailbox.is_idle.is_set() or not self._note_ended(groups):
                    with span("rollout"):
                        await self._in_flight.wait(self.mailbox.barrier.next(), groups)
                    self._note_ended(groups)
        return [self._in_flight.groups[index] for index in indices]

    def _find_next(self) -> tuple[int, ...] | None:
        """Return the groups of the next step, by the schedule if there is one; None if these cannot be known yet.

        Raises:
            RewardError: too many had to be replaced.
            ScheduleError: the schedule has others than there are.
        """
        rollout, num_replaced = self._config.rollout, len(self._groups.replaced)
        if rollout.dynamic_sampling and num_replaced >= rollout.dynamic_sampling * rollout.num_prompts:
            raise RewardError(_NO_SIGNAL.format(batches=rollout.dynamic_sampling, num=num_replaced))
        if (replay := self.mailbox.schedule.replay) is None or (taken := replay.next_take) is None:
            return self._groups.next()
        missing = sorted(set(taken) - self._in_flight.groups.keys())
        if missing and (not self._groups.drops_ahead or self._groups.all_are_complete):
            raise ScheduleError(
                f"rollout.schedule trains on prompts {missing} next, which are not in flight: it is not the schedule "
                "of a run with this config"
            )
        if self._groups.drops_ahead and not all(map(self._groups.is_complete, taken)):
            return None  # one may have to be dropped before the next is admitted
        return taken

    def _note_ended(self, groups: Sequence[GroupInFlight]) -> bool:
        """Note whose rollouts are complete at a barrier, in order of admission; return whether there are more."""
        ended = [group for group in groups if group.sampled.done() and not self._groups.is_complete(group.index)]
        for group in sorted(ended, key=lambda group: group.index):
            self._groups.complete(group.index)
        return bool(ended)

    async def _begin_again(self) -> None:
        """Sample groups again where the run that wrote the schedule was killed and resumed, but for those it kept."""
        replay = self.mailbox.schedule.replay
        while replay is not None and (resumed := await replay.resumed_after(self._num_steps)) is not None:
            there = self._in_flight.groups | self._dropped
            if missing := set(resumed.kept) - there.keys():
                raise ScheduleError(f"rollout.schedule has kept prompts {sorted(missing)}, which are not in flight")
            kept, loads = [there[index] for index in resumed.kept], self._groups.loads
            async with self._in_flight.unless_it_fails(kept):
                await self._in_flight.sampled(kept)
            await self._in_flight.clear()
            replay.resume()
            self.done = PromptsDone.read(resumed.done)
            self._watch.kept.only(resumed.kept)
            for loaded in loads:
                self._groups.loaded(loaded)

    async def _batch_of(self, groups: Sequence[GroupInFlight], replaced: Sequence[GroupInFlight] = ()) -> Sampled:
        """Wait until groups are sampled and scored; after an error nothing is left running.

        Args:
            groups: become the batch.
            replaced: were sampled and scored for it, but are only measured.
        """
        async with self._in_flight.unless_it_fails(groups):
            with span("rollout"):
                sampled = await self._in_flight.sampled(groups)
                failures = [failure for group in sampled for failure in group.failures]
                num, most = len(failures) + sum(len(each.rows) for each in sampled), self._config.rollout.max_failed
                check_failures(failures, num, most)
            if failures:
                self._watch.journal.say(f"left out: {describe_failures(failures)}")
            with span("reward"):
                rows = RolloutBatch.join([group.rows for group in sampled])
                # The whole batch at once: the last bits of a score depend on which rows are computed together.
                models = ModelScores.of(await self._rewards.models.scores(rows), self._config.reward)
                scored_groups = await self._in_flight.scores(groups)
                scored = combine(scored_groups, rows=rows, models=models)
                check_failures([*failures, *scored.failures], num, most)
        if scored.failures:
            self._watch.journal.say(describe_failures(scored.failures))
        if not len(scored.batch):
            raise RewardError(f"no rollout could be scored: {describe_failures(scored.failures)}")
        batch = scored.batch
        if replaced:
            others = [group.sampled.result() for group in replaced]
            rows = RolloutBatch.join([rows, *(group.rows for group in others)])
            failures += [failure for group in others for failure in group.failures]
            scored_groups = [*scored_groups, *(group.scored.result() for group in replaced)]
            scored = combine(scored_groups, rows=rows)
        rollouts = StepRollouts.of(rows, scored, scored_groups, {group.index for group in replaced})
        episodes = [each for group in (*groups, *replaced) for each in group.sampled.result().rollouts]
        return self._measuring.sampled(batch, rollouts, failures, episodes)

    def hurry(self) -> None:
        """Give episodes and the reward function only a few more seconds, because the run is ending."""
        self._in_flight.hurry()

    async def close(self) -> None:
        """Cancel what is being sampled ahead, and release threads."""
        await self._in_flight.give_up(())
        await self._in_flight.close()
