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
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rallypoint.algorithms import OverlongPenalty
from rallypoint.config import RunConfig
from rallypoint.config.sections.material import path_of, weight_of
from rallypoint.data import EncodedPrompts, Mixture, PromptStream, StreamedPrompts
from rallypoint.environments.environment import Episode, Prompt, single_turn
from rallypoint.environments.failures import describe_failures
from rallypoint.environments.pool import Grader
from rallypoint.environments.scoring import ModelScores, ScoredGroup, combine
from rallypoint.errors import DataError, GenerationError, RewardError, ScheduleError, StalenessError
from rallypoint.observability import span
from rallypoint.roles.groups import Groups, PromptsDone
from rallypoint.roles.reward import RewardModel
from rallypoint.roles.rollout import Rollouts
from rallypoint.roles.sampled import Sampled, measure, measure_sources
from rallypoint.roles.sampling import GRACE_S, AbandonedError, GroupUnderWay, Sampler, sampling_params
from rallypoint.roles.timekeeper import Timekeeper
from rallypoint.run.rollouts import StepRollouts
from rallypoint.run.timeline import StepTimes
from rallypoint.types import Metrics, RolloutBatch, Sum, merge

ResultT = TypeVar("ResultT")

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
        rollouts: Rollouts,
        *,
        train: EncodedPrompts | StreamedPrompts,
        validation: EncodedPrompts | None,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: tuple[int, ...],
        grader: Grader,
        reward_model: RewardModel,
        say: Callable[[str], None],
        write_times: Callable[[StepTimes], None] = lambda _: None,
        episode: Episode = single_turn,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.rollouts = rollouts
        self.newest: StepRollouts | None = None
        """Rollouts of the newest batch."""
        self.validated: StepRollouts | None = None
        """Rollouts of the newest validation."""
        self._config, self._train, self._validation = config, train, validation
        self._say, self._grader, self._reward_model = say, grader, reward_model
        self._times, self._patience_s, self._grace_s = Timekeeper(clock, write_times), patience_s, grace_s
        self._sampler = Sampler(
            config,
            rollouts,
            tokenizer=tokenizer,
            grader=grader,
            say=say,
            episode=episode,
            failed=self._fail,
            clock=clock,
        )
        self._penalty = _penalty_of(config)
        self._stream = train if isinstance(train, StreamedPrompts) else _stream_of(config, train)
        self._sources = train.sources
        self._params = sampling_params(config.rollout, seed=config.seed, stop_tokens=stop_tokens)
        hidden = sorted(set(tokenizer.all_special_ids) - set(stop_tokens))
        self._hidden_tokens = torch.tensor(hidden, dtype=torch.int64)
        self._interrupted, self._num_loads = asyncio.Event(), 0
        self._is_complete = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The error that ended a running group."""
        self._under_way: dict[int, GroupUnderWay] = {}
        self.done = PromptsDone()
        rollouts.after_load = self._loaded

    @property
    def done(self) -> PromptsDone:
        """The prompts that have gone into batches: all that a checkpoint needs."""
        return self._groups.done

    @done.setter
    def done(self, done: PromptsDone) -> None:
        rollout, num_steps = self._config.rollout, self._config.trainer.num_steps
        self._groups = Groups(
            num_prompts=rollout.num_prompts,
            max_staleness=rollout.max_staleness,
            window=rollout.window,
            limit=num_steps * rollout.num_prompts,
            done=done,
        )

    def examples_of(self, batch: RolloutBatch) -> list[int]:
        """Return the number of the example that each row answers."""
        return [self._stream.example_index(int(index)) for index in batch.prompt_index]

    @property
    def num_admitted(self) -> int:
        """Number of prompts that have gone into batches."""
        return self._groups.num_taken

    @num_admitted.setter
    def num_admitted(self, num_prompts: int) -> None:
        self.done = PromptsDone(num_prompts, num_prompts)

    def hurry(self) -> None:
        """From now on give the reward function only a few seconds, because the run is ending."""
        self._interrupted.set()
        self._is_complete.set()  # who waits looks

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
        await self._begin_again()
        self._admit()
        groups = await self._next_groups()
        replaced = Metrics()
        if self._config.rollout.dynamic_sampling is not None:
            groups, replaced = await self._with_signal(groups, self._config.rollout.dynamic_sampling)
        sampled = await self._finish(groups)
        sampled = dataclasses.replace(sampled, metrics=merge(sampled.metrics, replaced))
        taken = {group.index: group.sampled.result().oldest_version for group in groups}
        self._groups.take(taken)
        if self._config.rollout.window > 1:
            self.rollouts.schedule.taken(list(taken))
        for index in taken:
            del self._under_way[index]
        step = self._groups.num_taken // self._config.rollout.num_prompts
        idle = self._times.taken(step, groups, self.rollouts.take_busy_s())
        if self._config.rollout.max_staleness:
            aged = sampled.aged(self._groups.age, keeps=self._config.rollout.on_load == "keep")
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
        if self.rollouts.num_loads > self._num_loads:
            self._num_loads = self.rollouts.num_loads
            self._groups.loaded(self.rollouts.version)
        num_prompts, admitted = self._config.rollout.num_prompts, self._groups.admit()
        for first in range(0, len(admitted), num_prompts):
            prompts: dict[int, Prompt] = {}
            for index in admitted[first : first + num_prompts]:
                row = self._stream.example_index(index)
                prompts[index] = Prompt(tuple(self._train.token_ids[row]), self._train.examples[row])
            cohort = self._sampler.begin(prompts, self._params, self._config.rollout.group_size, self._complete)
            self._under_way |= {group.index: group for group in cohort.groups}

    def _loaded(self) -> None:
        """Take note of new weights; a run that samples ahead has more to sample now."""
        self._times.loaded()
        if self._config.rollout.max_staleness:
            self._admit()

    def _complete(self, index: int) -> None:
        self._groups.complete(index)
        self._is_complete.set()

    async def _next_groups(self) -> list[GroupUnderWay]:
        """Return the groups of the next step; with a window they are already complete."""
        while (indices := self.rollouts.schedule.next_take() or self._groups.next()) is None:
            groups = list(self._under_way.values())
            if len(groups) < self._config.rollout.num_prompts:
                raise StalenessError(f"no weights were loaded since the batch before: version {self.rollouts.version}")
            async with self._unless_it_fails(groups):
                self._is_complete.clear()
                if not self._interrupted.is_set():
                    await self._wait(self._is_complete.wait(), groups)
                    continue
                await self._wait(asyncio.wait({group.sampled for group in groups}), groups)
                await self._wait(
                    asyncio.wait({asyncio.ensure_future(self._is_complete.wait())}, timeout=self._grace_s), ()
                )
                if not self._is_complete.is_set():
                    raise AbandonedError(f"the reward function was busy for {self._grace_s:g} s more")
        if not self._under_way.keys() >= set(indices):
            raise ScheduleError(
                f"rollout.schedule trains on prompts {sorted(set(indices) - self._under_way.keys())} next, which are "
                "not under way: it is not the schedule of a run with this config"
            )
        return [self._under_way[index] for index in indices]

    async def _with_signal(self, groups: list[GroupUnderWay], max_rounds: int) -> tuple[list[GroupUnderWay], Metrics]:
        """Replace groups whose scores are all equal by those of the next prompts (DAPO, arXiv 2503.14476, section 3.2).

        All groups are waited for before others begin, so that the same seed samples the same prompts side by side.
        """
        num_replaced = 0
        for _ in range(max_rounds):
            async with self._unless_it_fails(groups):
                with span("rollout"):
                    await self._wait(asyncio.gather(*(group.sampled for group in groups)), groups)
                with span("reward"):
                    scored = await self._scores_of(groups)
            without = [group for group, found in zip(groups, scored, strict=True) if not found.has_signal]
            if not without:
                return groups, Metrics({"rollout/num_replaced": Sum(num_replaced)})
            for group in without:
                self._groups.drop(group.index)
                del self._under_way[group.index]
            num_replaced += len(without)
            self._admit()
            groups = await self._next_groups()
        raise RewardError(
            f"rollout.dynamic_sampling={max_rounds}: in {max_rounds} rounds the scores of all rollouts were equal for "
            f"{num_replaced} prompts, which is too hard, too easy or too narrow to learn from. Look at the rollouts; "
            "mix in other prompts, raise rollout.group_size or rollout.temperature, or give partial scores"
        )

    async def _begin_again(self) -> None:
        """Sample all running groups again where the run that wrote the schedule was killed and resumed."""
        replay = self.rollouts.schedule.replay
        if replay is None or not replay.resumes_after(self._groups.num_taken // self._config.rollout.num_prompts):
            return
        for cohort in {group.cohort for group in self._under_way.values()}:
            cohort.close()
        self._under_way.clear()
        await self.rollouts.stop()
        replay.resume()
        self.done = self._groups.done
        self._groups.loaded(self.rollouts.version)

    async def _finish(self, groups: Sequence[GroupUnderWay]) -> Sampled:
        """Wait until groups are sampled and scored; after an error nothing is left running."""
        async with self._unless_it_fails(groups):
            with span("rollout"):
                sampled = await self._wait(asyncio.gather(*(group.sampled for group in groups)), groups)
                failures = [failure for group in sampled for failure in group.failures]
                if not any(len(group.rows) for group in sampled):
                    raise GenerationError(f"all {len(failures)} rollouts failed; the first one: {failures[0]}")
            if failures:
                self._say(f"{len(failures)} rollouts failed and are left out; the first one: {failures[0]}")
            with span("reward"):
                rows = RolloutBatch.join([group.rows for group in sampled])
                # The whole batch at once, not group by group: the last bits of a score depend on which rows are
                # computed together, and the reward model may share its processes with the sampler.
                scores = await self._reward_model.scores(rows)
                model = None if scores is None else ModelScores.of(scores, self._config.reward)
                scored_groups = await self._scores_of(groups)
                scored = combine(scored_groups, max_failed=self._config.reward.max_failed, model=model)
        if scored.failures:
            self._say(describe_failures(scored.failures))
        if not len(scored.batch):
            raise RewardError(f"no rollout could be scored: {describe_failures(scored.failures)}")
        rollouts = StepRollouts.of(rows, scored, scored_groups)
        measured = measure(rows, scored, num_failed=len(failures), hidden_tokens=self._hidden_tokens)
        if 1 < len(self._sources) <= _MOST_SOURCES:
            measured = merge(measured, measure_sources(scored, rollouts.examples))
        return Sampled(scored.batch, merge(measured, scored.metrics), rollouts)

    async def _scores_of(self, groups: Sequence[GroupUnderWay]) -> list[ScoredGroup]:
        """Return the reward function's scores of groups that are sampled.

        Raises:
            AbandonedError: it did not say so within some seconds after an interruption.
        """
        scored = asyncio.gather(*(group.scored for group in groups))
        scored.add_done_callback(lambda done: done.cancelled() or done.exception())  # those given up have one, too
        interrupted = asyncio.create_task(self._interrupted.wait())
        await self._wait(asyncio.wait({scored, interrupted}, return_when=asyncio.FIRST_COMPLETED), groups)
        interrupted.cancel()
        if not scored.done():
            await self._wait(asyncio.wait({scored}, timeout=self._grace_s), groups)
        if not scored.done():
            raise AbandonedError(f"the reward function was busy for {self._grace_s:g} s more")
        return scored.result()

    async def _wait(self, awaited: Awaitable[ResultT], groups: Sequence[GroupUnderWay]) -> ResultT:
        """Wait for something, and name groups that are much slower than others; raise what any group raises."""
        task = asyncio.ensure_future(awaited)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # that of the cause is raised
        try:
            while not task.done():
                await asyncio.wait({task, self._failure}, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
                if self._failure.done():
                    self._failure.result()
                if not task.done() and (slowest := self._times.slowest(groups)) is not None:
                    self._say(slowest)
            return task.result()
        finally:
            task.cancel()

    def _fail(self, error: BaseException) -> None:
        """Raise this error in the caller who waits for a batch."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # or asyncio says that nobody asked for it

    @contextlib.asynccontextmanager
    async def _unless_it_fails(self, groups: Sequence[GroupUnderWay]) -> AsyncIterator[None]:
        """Cancel everything that is running if the block raises."""
        async with contextlib.AsyncExitStack() as if_it_fails:
            if_it_fails.push_async_callback(self._give_up, groups)
            yield
            if_it_fails.pop_all()

    async def close(self) -> None:
        """Cancel what is being sampled ahead, and release threads."""
        await self._give_up(())
        self._sampler.close()

    async def _give_up(self, groups: Sequence[GroupUnderWay]) -> None:
        for cohort in {group.cohort for group in (*groups, *self._under_way.values())}:
            cohort.close()
        self._grader.close()  # otherwise threads would go on waiting for its calls
        await self.rollouts.stop()


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
