"""Prompts in, scored groups out.

Owns: which prompts are sampled when, and how scored groups become a batch. Must not know: engines, ranks' state, what
is done with a batch.

Consumes: examples, by their place in the prompt stream. Produces: scored batches, groups in order of admission. Waits
for: the rollout role, the reward function and the reward model. Unblocked by: a publish, which brings the next version.

A checkpoint needs to know which prompts have gone into batches. The rest follows from that and the seed. What was under
way when a run ended is sampled again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rallypoint.algorithms import Advantage, OverlongPenalty
from rallypoint.config import RunConfig
from rallypoint.config.sections.material import path_of, weight_of
from rallypoint.data import EncodedPrompts, Mixture, PromptStream, StreamedPrompts
from rallypoint.environments.environment import Episode, Prompt, single_turn
from rallypoint.environments.failures import describe_failures
from rallypoint.environments.grader import Grader
from rallypoint.environments.scoring import ModelScores, combine
from rallypoint.errors import DataError, GenerationError, RewardError
from rallypoint.journal import Journal
from rallypoint.observability import span
from rallypoint.roles.reward import RewardModels
from rallypoint.roles.rollout import Rollouts
from rallypoint.run.rollouts import StepRollouts
from rallypoint.sampling.choosing import Choice
from rallypoint.sampling.group import GRACE_S, GroupUnderWay, Sampler, sampling_params
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.sampled import Sampled, measure, measure_sources, shown_tokens
from rallypoint.sampling.timekeeper import Timekeeper
from rallypoint.sampling.under_way import UnderWay
from rallypoint.types import Mean, Metrics, RolloutBatch, merge

# Training seeds are below 2**31, so validation never shares its random numbers with training.
_VALIDATION_STREAM = 2**32
_MOST_SOURCES = 32
"""Values of `data_source` in the training data that have metrics of their own, each; more would be noise."""
PATIENCE_S = 30.0
"""Seconds that a step waits before it names a group that is much slower than the others."""


class RolloutSource:
    """Admits prompts and returns them as sampled and scored batches."""

    def __init__(
        self,
        config: RunConfig,
        mailbox: Mailbox,
        *,
        train: EncodedPrompts | StreamedPrompts,
        validation: EncodedPrompts | None,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: tuple[int, ...],
        grader: Grader,
        reward_models: RewardModels,
        advantage: Advantage,
        say: Callable[[str], None],
        journal: Journal,
        episode: Episode = single_turn,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.mailbox = mailbox
        self.newest: StepRollouts | None = None
        """Rollouts of the newest batch."""
        self.validated: StepRollouts | None = None
        """Rollouts of the newest validation."""
        self._config, self._train, self._validation = config, train, validation
        self._say, self._reward_models = say, reward_models
        self._times = Timekeeper(clock, journal)
        self._under_way = UnderWay(
            mailbox,
            grader,
            slowest=self._times.slowest,
            say=say,
            patience_s=patience_s,
            grace_s=grace_s,
            advantage=advantage,
        )
        self._choice = Choice(config, mailbox, self._under_way, self._times, self._admit)
        self._sampler = Sampler(
            config,
            mailbox,
            tokenizer=tokenizer,
            grader=grader,
            say=say,
            episode=episode,
            failed=self._under_way.fail,
            clock=clock,
        )
        self._penalty = _penalty_of(config)
        self._stream = train if isinstance(train, StreamedPrompts) else _stream_of(config, train)
        self._sources = train.sources
        self._params = sampling_params(config.rollout, seed=config.seed, stop_tokens=stop_tokens)
        self._is_shown = shown_tokens(tokenizer, stop_tokens)
        self._num_loads = 0
        self.done = PromptsDone()

    @property
    def done(self) -> PromptsDone:
        """The prompts that have gone into batches: all that a checkpoint needs."""
        return self._choice.groups.done

    @done.setter
    def done(self, done: PromptsDone) -> None:
        self._choice.begin(done)

    def examples_of(self, batch: RolloutBatch) -> list[int]:
        """Return the number of the example that each row answers."""
        return [self._stream.example_index(int(index)) for index in batch.prompt_index]

    @property
    def num_admitted(self) -> int:
        """Number of prompts that have gone into batches."""
        return self._choice.groups.num_taken

    @num_admitted.setter
    def num_admitted(self, num_prompts: int) -> None:
        self.done = PromptsDone(num_prompts, num_prompts)

    @property
    def role(self) -> Rollouts:
        """The role that samples."""
        return self.mailbox.role

    async def load(self, version: int, published: Path | None = None) -> None:
        """Have the ranks load new weights; a run that samples ahead has more to sample then."""
        await self.mailbox.load(version, published)
        self._times.loaded()
        if self._config.rollout.max_staleness:
            self._admit()

    def hurry(self) -> None:
        """From now on give the reward function only a few seconds, because the run is ending."""
        self._under_way.hurry()

    async def next_batch(self) -> Sampled:
        """Return B scored rollouts of the next P prompts, fewer if some could not be scored.

        Raises:
            RewardError: more of them than reward.max_failed could not be scored, or none could.
            GenerationError: all rollouts have failed.
            StalenessError: a rollout was sampled from weights that are too old, or no weights were loaded since the
                previous batch.
            AbandonedError: the run is ending, and the reward function did not return in time.
        """
        self._times.asked()
        await self._choice.begin_again()
        groups, replaced, counts = await self._choice.choose()
        sampled = await self._finish(groups, replaced)
        sampled = dataclasses.replace(sampled, metrics=merge(sampled.metrics, counts))
        taken = {group.index: group.sampled.result().oldest_version for group in groups}
        self._choice.groups.take(taken)
        self.mailbox.schedule.taken()
        for index in taken:
            del self._under_way.groups[index]
        step = self._choice.groups.num_taken // self._config.rollout.num_prompts
        idle = self._times.taken(step, groups, self.mailbox.take_busy_s())
        if self._config.rollout.max_staleness:
            aged = sampled.aged(self._choice.groups.age, keeps=self._config.rollout.on_load == "keep")
            sampled = dataclasses.replace(aged, metrics=merge(aged.metrics, idle))
        self.newest = sampled.rollouts
        if self._penalty is None:
            return sampled
        batch, lost = self._penalty(sampled.batch)
        return dataclasses.replace(sampled, batch=batch, metrics=merge(sampled.metrics, lost))

    async def validate(self) -> Sampled | None:
        """Return the validation prompts' rollouts, n each; None when the run has no validation set.

        Raises:
            RewardError, GenerationError, AbandonedError: see `next_batch`.
        """
        if self._validation is None:
            return None
        limit = self._config.validation.max_prompts
        pairs = zip(self._validation.token_ids[:limit], self._validation.examples[:limit], strict=True)
        prompts = {index: Prompt(tuple(ids), example) for index, (ids, example) in enumerate(pairs)}
        params = dataclasses.replace(
            self._params,
            seed=self._config.seed + _VALIDATION_STREAM,
            temperature=self._config.validation.temperature,
        )
        sampled = await self._finish(self._sampler.begin(prompts, params, self._config.validation.num_samples).groups)
        self.validated = sampled.rollouts
        return sampled

    def _admit(self) -> None:
        """Submit prompts while there are free slots; all of them are submitted before their first token is sampled."""
        if self.mailbox.num_loads > self._num_loads:
            self._num_loads = self.mailbox.num_loads
            self._choice.groups.loaded(self.mailbox.version)
        num_prompts, admitted = self._config.rollout.num_prompts, self._choice.groups.admit()
        for first in range(0, len(admitted), num_prompts):
            prompts: dict[int, Prompt] = {}
            for index in admitted[first : first + num_prompts]:
                row = self._stream.example_index(index)
                prompts[index] = Prompt(tuple(self._train.token_ids[row]), self._train.examples[row])
            cohort = self._sampler.begin(
                prompts,
                self._params,
                self._config.rollout.group_size,
                self._choice.complete,
                num_places=num_prompts if self._choice.drops_ahead else None,
            )
            self._under_way.add(cohort.groups, are_watched=self._config.rollout.over_sampling is not None)

    async def _finish(self, groups: Sequence[GroupUnderWay], replaced: Sequence[GroupUnderWay] = ()) -> Sampled:
        """Wait until groups are sampled and scored; after an error nothing is left running.

        Args:
            groups: become the batch.
            replaced: were sampled and scored for it, but are only measured.
        """
        async with self._under_way.unless_it_fails(groups):
            with span("rollout"):
                sampled = await self._under_way.wait(asyncio.gather(*(group.sampled for group in groups)), groups)
                failures = [failure for group in sampled for failure in group.failures]
                if not any(len(group.rows) for group in sampled):
                    raise GenerationError(f"all {len(failures)} rollouts failed; the first one: {failures[0]}")
            if failures:
                self._say(f"{len(failures)} rollouts failed and are left out; the first one: {failures[0]}")
            with span("reward"):
                rows = RolloutBatch.join([group.rows for group in sampled])
                # The whole batch at once, not group by group: the last bits of a score depend on which rows are
                # computed together, and the reward models may share their processes with the sampler.
                models = ModelScores.of(await self._reward_models.scores(rows), self._config.reward)
                scored_groups = await self._under_way.scores(groups)
                scored = combine(scored_groups, max_failed=self._config.reward.max_failed, models=models)
        if scored.failures:
            self._say(describe_failures(scored.failures))
        if not len(scored.batch):
            raise RewardError(f"no rollout could be scored: {describe_failures(scored.failures)}")
        batch = scored.batch
        if replaced:
            others = [group.sampled.result() for group in replaced]
            rows = RolloutBatch.join([rows, *(group.rows for group in others)])
            failures += [failure for group in others for failure in group.failures]
            scored_groups = [*scored_groups, *(group.scored.result() for group in replaced)]
            scored = combine(scored_groups)
        rollouts = StepRollouts.of(rows, scored, scored_groups, {group.index for group in replaced})
        measured = measure(rows, scored, num_failed=len(failures), is_shown=self._is_shown)
        if self._config.rollout.dynamic_sampling:
            kept = Mean(float(batch.scores.sum()), len(batch))
            measured = merge(measured, Metrics({"reward/kept_mean": kept}))
        if 1 < len(self._sources) <= _MOST_SOURCES:
            measured = merge(measured, measure_sources(scored, rollouts.examples))
        return Sampled(batch, merge(measured, scored.metrics), rollouts)

    async def close(self) -> None:
        """Cancel what is being sampled ahead, and release threads."""
        await self._under_way.give_up(())
        self._sampler.close()


def _penalty_of(config: RunConfig) -> OverlongPenalty | None:
    """Return the penalty for overlong responses; None without reward.overlong."""
    if config.reward.overlong is None:
        return None
    max_tokens, buffer = config.overlong
    return OverlongPenalty(max_tokens=max_tokens, buffer=buffer, factor=config.reward.overlong.factor)


def _stream_of(config: RunConfig, train: EncodedPrompts) -> PromptStream | Mixture:
    """Return the order of the prompts: of one set, or of several with weights.

    Raises:
        DataError: a set with a weight has no prompts.
    """
    weights = [weight for one in config.data.train if (weight := weight_of(one)) is not None]
    if not weights:
        return PromptStream(len(train.examples), config.seed, config.data.shuffle)
    parts = [example.part for example in train.examples]
    if missing := [path_of(one) for part, one in enumerate(config.data.train) if part not in set(parts)]:
        raise DataError(f"data.train: no prompt of {', '.join(missing)} is left, and it has a weight: leave it out")
    return Mixture(parts, weights, config.seed, config.data.shuffle)
