"""Prompts in, scored groups out.

Owns: which prompts are sampled when, and how scored groups become a batch. Must not know: engines, ranks' state, what
is done with a batch.

Consumes: examples, by their place in the prompt stream. Produces: scored batches, groups in order of admission. Waits
for: the rollout role, the reward function and the reward model. Unblocked by: a publish, which brings the next version.

A checkpoint needs one number of it: how many prompts have gone into batches. The rest follows from that and the seed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase

from rallypoint.algorithms import OverlongPenalty
from rallypoint.config import RunConfig
from rallypoint.data import EncodedPrompts, PromptStream
from rallypoint.environments.environment import Episode, Prompt, single_turn
from rallypoint.environments.failures import describe_failures
from rallypoint.environments.pool import Grader
from rallypoint.environments.scoring import ModelScores, combine
from rallypoint.errors import RewardError, StalenessError
from rallypoint.observability import span
from rallypoint.roles.groups import Groups
from rallypoint.roles.reward import RewardModel
from rallypoint.roles.rollout import Rollouts
from rallypoint.roles.sampled import RolloutRecord, Sampled, measure, records_of
from rallypoint.roles.sampling import Group, GroupsUnderWay, Sampler, sampling_params
from rallypoint.types import RolloutBatch, merge

# Training seeds are below 2**31, so validation never shares its random numbers with training.
_VALIDATION_STREAM = 2**32


class RolloutSource:
    """Admits prompts and returns them as sampled and scored batches."""

    def __init__(
        self,
        config: RunConfig,
        rollouts: Rollouts,
        *,
        train: EncodedPrompts,
        validation: EncodedPrompts | None,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: tuple[int, ...],
        grader: Grader,
        reward_model: RewardModel,
        say: Callable[[str], None],
        episode: Episode = single_turn,
        max_staleness: int = 0,
    ) -> None:
        self.rollouts = rollouts
        self.records: tuple[RolloutRecord, ...] = ()
        """The first few rollouts of the newest batch."""
        self._config, self._train, self._validation = config, train, validation
        self._say, self._max_staleness, self._grader, self._reward_model = say, max_staleness, grader, reward_model
        self._sampler = Sampler(config, rollouts, tokenizer=tokenizer, grader=grader, say=say, episode=episode)
        self._penalty = _penalty_of(config)
        self._stream = PromptStream(len(train.examples), config.seed, config.data.shuffle)
        self._params = sampling_params(config.rollout, seed=config.seed, stop_tokens=stop_tokens)
        hidden = sorted(set(tokenizer.all_special_ids) - set(stop_tokens))
        self._hidden_tokens = torch.tensor(hidden, dtype=torch.int64)
        self._interrupted, self._num_loads = asyncio.Event(), 0
        self._batches: collections.deque[GroupsUnderWay] = collections.deque()
        self.num_admitted = 0

    @property
    def num_admitted(self) -> int:
        """Number of prompts that have gone into batches: all that a checkpoint needs."""
        return self._groups.num_taken

    @num_admitted.setter
    def num_admitted(self, num_prompts: int) -> None:
        self._groups: Groups[Group] = Groups(
            num_prompts=self._config.rollout.num_prompts, max_staleness=self._max_staleness, num_taken=num_prompts
        )

    def hurry(self) -> None:
        """From now on give the reward function only a few seconds, because the run is ending."""
        self._interrupted.set()

    async def next_batch(self) -> Sampled:
        """Return B scored rollouts of the next P prompts, fewer if some could not be scored.

        Raises:
            RewardError: more of them than reward.max_failed could not be scored, or none could.
            GenerationError: all rollouts have failed.
            StalenessError: a rollout was sampled from weights that are too old, or no weights were loaded since the
                previous batch.
            AbandonedError: the run is ending, and the reward function did not return in time.
        """
        if self.rollouts.num_loads > self._num_loads:
            self._num_loads = self.rollouts.num_loads
            self._groups.loaded(self.rollouts.version)
        self._admit()
        if not self._batches:
            raise StalenessError(f"no weights were loaded since the batch before: version {self.rollouts.version}")
        sampled = await self._finish(self._batches[0])
        taken = self._groups.take()  # outside the assert statement, which `python -O` removes
        assert taken is not None, "its groups are complete"
        self._batches.popleft()
        self.records = sampled.records
        if self._penalty is None:
            return sampled
        batch, lost = self._penalty(sampled.batch)
        return dataclasses.replace(sampled, batch=batch, metrics=merge(sampled.metrics, lost))

    async def validate(self) -> Sampled | None:
        """Return the validation prompts' rollouts, one each; None when the run has no validation set.

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
        return await self._finish(self._sampler.begin(prompts, params, 1))

    def _admit(self) -> None:
        """Submit prompts while there are free slots; a whole batch is submitted before its first token is sampled."""
        num_prompts, admitted = self._config.rollout.num_prompts, self._groups.admit()
        for first in range(admitted.start, admitted.stop, num_prompts):
            prompts: dict[int, Prompt] = {}
            for index in range(first, first + num_prompts):
                row = self._stream.example_index(index)
                prompts[index] = Prompt(tuple(self._train.token_ids[row]), self._train.examples[row])
            group_size, complete = self._config.rollout.group_size, self._groups.complete
            self._batches.append(self._sampler.begin(prompts, self._params, group_size, complete))

    async def _finish(self, batch: GroupsUnderWay) -> Sampled:
        """Wait until a batch is sampled and scored; after an error nothing is left running."""
        async with contextlib.AsyncExitStack() as if_it_fails:
            if_it_fails.push_async_callback(self._give_up, batch)
            with span("rollout"):
                groups = await batch.sampled()
            failures = [failure for group in groups for failure in group.failures]
            if failures:
                self._say(f"{len(failures)} rollouts failed and are left out; the first one: {failures[0]}")
            with span("reward"):
                rows = RolloutBatch.join([group.rows for group in groups])
                # The whole batch at once, not group by group: the last bits of a score depend on which rows are
                # computed together, and the reward model may share its processes with the sampler.
                scores = await self._reward_model.scores(rows)
                model = None if scores is None else ModelScores.of(scores, self._config.reward)
                scored_groups = await batch.scored(self._interrupted)
                scored = combine(scored_groups, max_failed=self._config.reward.max_failed, model=model)
            if_it_fails.pop_all()
        if scored.failures:
            self._say(describe_failures(scored.failures))
        if not len(scored.batch):
            raise RewardError(f"no rollout could be scored: {describe_failures(scored.failures)}")
        examples = [example for group in scored_groups for example in group.examples]
        texts = [text for group in scored_groups for text in group.texts]
        measured = measure(rows, scored, num_failed=len(failures), hidden_tokens=self._hidden_tokens)
        records = records_of(scored, examples, texts, max(1, self._config.trainer.num_logged_rollouts))
        return Sampled(scored.batch, merge(measured, scored.metrics), records)

    async def close(self) -> None:
        """Cancel what is being sampled ahead; with max_staleness 0 there is nothing."""
        await self._give_up()

    async def _give_up(self, *batches: GroupsUnderWay) -> None:
        for each in (*batches, *self._batches):
            each.close()
        self._grader.close()  # otherwise threads would go on waiting for its calls
        await self.rollouts.stop()


def _penalty_of(config: RunConfig) -> OverlongPenalty | None:
    """Return the penalty for overlong responses; None without reward.overlong."""
    if config.reward.overlong is None:
        return None
    max_tokens, buffer = config.overlong
    return OverlongPenalty(max_tokens=max_tokens, buffer=buffer, factor=config.reward.overlong.factor)
