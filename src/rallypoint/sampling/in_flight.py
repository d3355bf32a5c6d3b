"""Groups in flight: each is the rollouts of one prompt, sampled by episodes, and scored while others are still sampled.

Owns: how a prompt becomes a scored group, which groups are in flight, and that none is after an error. Must not know:
which prompts these are, and which step takes them; order and staleness (`groups.py`).

Consumes: prompts, by their index in the run. Produces: scored groups. Waits for: the mailbox, and the reward function.
Unblocked by: the ends of responses and calls, an error of any of them, `hurry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from rallypoint.config import RunConfig
from rallypoint.data.prompt_sets import Prompt
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.environment import Episode
from rallypoint.environments.episodes import with_prompt_first
from rallypoint.environments.failures import RolloutFailure
from rallypoint.environments.scored import SampledGroup, ScoredGroup
from rallypoint.environments.scoring import Scoring
from rallypoint.errors import AbandonedError, RallyError
from rallypoint.generation import SamplingParams
from rallypoint.journal import Journal, RolloutFailed, TurnSampled
from rallypoint.observability import span
from rallypoint.roles.frozen import Scorers
from rallypoint.sampling.client import EpisodeClient, Terms
from rallypoint.sampling.episode_end import scores_of
from rallypoint.sampling.episode_task import leave_for_good, together
from rallypoint.sampling.kept import KeptGroups
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.timekeeper import Timekeeper, failed_event, scored_event, turns_of
from rallypoint.types import Trajectory, assemble

ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """Who is told what happens and what is waited for, and when; and what need not be sampled again."""

    journal: Journal
    times: Timekeeper
    kept: KeptGroups = dataclasses.field(default_factory=KeptGroups)
    """Groups that an earlier start of the run sampled."""
    patience_s: float = 30.0
    """Seconds that a step waits before it names a group that is much slower than the others."""
    grace_s: float = 5.0
    """Seconds that episodes, and the reward function, are given for a step after the run was asked to end."""
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    """Start of the run."""

    def now(self) -> float:
        """Return the seconds since the run began."""
        return round(time.monotonic() - self.began_s, 4)


@dataclasses.dataclass(slots=True, eq=False)
class GroupInFlight:
    """A prompt from its admission to its scores."""

    index: int
    """Index of the prompt in the run."""
    name: str
    """Name of its example."""
    rank: int
    """Rank of the rollout role that samples it."""
    batch: AdmittedBatch
    """Those it was admitted with."""
    sampled: asyncio.Task[SampledGroup]
    """Its rollouts."""
    scored: asyncio.Future[ScoredGroup]
    """What the reward function says of them."""
    admitted_s: float
    """Seconds of the run at its admission; the next ones are None until then."""
    sampled_s: float | None = None
    scored_s: float | None = None
    turns: tuple[TurnSampled, ...] = ()
    """Its responses, when it is sampled."""

    def close(self) -> None:
        """Give it up."""
        self.sampled.cancel()
        self.scored.cancel()


@dataclasses.dataclass(slots=True, eq=False)
class AdmittedBatch:
    """Groups that were admitted together, and what scores them."""

    scoring: Scoring
    validation: int | None = None
    """Step after which it is validated; None in training."""
    groups: dict[int, GroupInFlight] = dataclasses.field(default_factory=dict[int, GroupInFlight])
    """Those that are not scored, by their place."""

    def close(self) -> None:
        """Cancel what is in flight."""
        for group in self.groups.values():
            group.close()
        self.scoring.stop()


class InFlight:
    """What is being sampled and scored, by the index of its prompt in the run."""

    def __init__(
        self,
        config: RunConfig,
        mailbox: Mailbox,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Scorers,
        episode: Episode,
        watch: Watch,
    ) -> None:
        """Begin without groups.

        Args:
            config: of the run.
            mailbox: in front of the role that samples.
            tokenizer: for texts.
            rewards: what scores rollouts.
            episode: how a rollout comes about.
            watch: who is told what is waited for, and which groups need only be scored.
        """
        self.groups: dict[int, GroupInFlight] = {}
        """Those of training; validation has its own."""
        self.scored: asyncio.Queue[GroupInFlight | None] = asyncio.Queue()
        """Groups as they are scored, of the validation, too; None when all are cancelled."""
        self._ended, self._lock = list[tuple[AdmittedBatch, int, ScoredGroup]](), threading.Lock()
        """Groups that were scored, with their places, until they are taken; and what those who look at them hold."""
        self._config, self._mailbox, self._rewards = config, mailbox, rewards
        self._episode = with_prompt_first(episode)
        self._tokenizer, self._token_texts, self._watch = tokenizer, TokenTexts(tokenizer), watch
        # Each admitted batch keeps one busy, and asyncio's own are few.
        self._threads = ThreadPoolExecutor(config.max_groups + 1, thread_name_prefix="scoring")
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The error that ended a running group."""
        self._terms, self._interrupted = Terms.of(config, mailbox, tokenizer), asyncio.Event()

    def admit(self, prompts: Mapping[int, Prompt], params: SamplingParams, num_places: int | None) -> None:
        """Have prompts of training sampled and scored; see `begin`."""
        groups = self.begin(prompts, params, self._config.rollout.group_size, num_places)
        self.groups |= {group.index: group for group in groups}
        if self._config.rollout.over_sampling is not None:
            for group in groups:
                group.sampled.add_done_callback(self._look)

    def _look(self, _: object) -> None:
        if self._mailbox.is_idle.is_set():  # as while a slow tool is used
            self._mailbox.barrier.look()

    def begin(
        self,
        prompts: Mapping[int, Prompt],
        params: SamplingParams,
        group_size: int,
        num_places: int | None = None,
        validation: int | None = None,
    ) -> list[GroupInFlight]:
        """Have prompts sampled, and scored.

        Args:
            prompts: by their index in the run.
            params: how rollouts are drawn.
            group_size: G, rollouts of each prompt.
            num_places: of a step, if prompts may come one by one at any time: then their ranks follow from their
                indices; None: these prompts are all there are.
            validation: step after which these are validated; None in training, where as many may fail as of a step.
        """
        loop, replay = asyncio.get_running_loop(), self._mailbox.schedule.replay
        of_step = 0 if validation is not None else self._config.rollout.num_prompts

        def failed(index: int, sample: int) -> RolloutFailed | None:
            return None if replay is None else replay.failure_of((index, sample, validation))

        def ended(place: int, scored: ScoredGroup) -> None:
            with self._lock, contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._ended.append((batch, place, scored))
                if len(self._ended) == 1:
                    loop.call_soon_threadsafe(self._end)

        scoring = Scoring(
            self._rewards.grader,
            decode=lambda responses: self._tokenizer.batch_decode(responses, skip_special_tokens=True),
            token_texts=self._token_texts,
            num_rows=max(of_step, len(prompts)) * group_size,
            max_failed=self._config.rollout.max_failed,
            has_models=bool(self._config.reward.all_models),
            warn=self._watch.journal.say,
            ended=ended,
        )
        batch = AdmittedBatch(scoring, validation)
        loop.run_in_executor(self._threads, scoring.run).add_done_callback(self.note_failure)
        for place, (index, prompt) in enumerate(prompts.items()):
            rank = self._mailbox.rank_of(*((index % num_places, num_places) if num_places else (place, len(prompts))))
            clients = [
                EpisodeClient(self._terms, params, (index, prompt), sample, rank=rank, recorded=failed(index, sample))
                for sample in range(group_size)
            ]
            sampled = asyncio.create_task(self._sample(place, prompt, clients, batch))
            sampled.add_done_callback(self.note_failure)
            scored, now = loop.create_future(), self._watch.now()
            batch.groups[place] = GroupInFlight(index, prompt.example.name, rank, batch, sampled, scored, now)
        groups = list(batch.groups.values())
        all_sampled = asyncio.gather(*(group.sampled for group in groups), return_exceptions=True)
        all_sampled.add_done_callback(lambda _: scoring.finish())
        return groups

    def _end(self) -> None:
        """Take the groups that were scored meanwhile: all of a step at once, where the reward function is fast."""
        with self._lock:
            ended, self._ended = self._ended, []
        # A cycle of references would keep all that was sampled for a while.
        groups = [(batch.groups.pop(place), scored) for batch, place, scored in ended]
        found, now = [(group, scored) for group, scored in groups if not group.scored.done()], self._watch.now()
        for group, _ in found:
            group.scored_s = now
        try:
            self._watch.journal.append(*(scored_event(group, group.batch.validation) for group, _ in found))
        except RallyError as error:  # nobody awaits a callback
            for group, _ in found:
                group.scored.set_exception(error)
                self.note_failure(group.scored)
            return
        for group, scored in found:
            group.scored.set_result(scored)
            self.scored.put_nowait(group)

    async def _sample(
        self, place: int, prompt: Prompt, clients: Sequence[EpisodeClient], batch: AdmittedBatch
    ) -> SampledGroup:
        """Sample the rollouts of a prompt, and have them scored; an error of one gives the others up."""
        params, index = clients[0].params, clients[0].prompt_index
        known = self._watch.kept.groups.get(index) if batch.validation is None else None
        found = known.rollouts if known else await together(client.rollout(self._episode) for client in clients)
        if batch.validation is None and known is None:
            self._watch.kept.put(index, found)
        kept = {number: one for number, one in enumerate(found) if isinstance(one, Trajectory)}
        failures = [one for one in found if isinstance(one, RolloutFailure)]
        self._watch.journal.append(*(failed_event(failure, batch.validation) for failure in failures))
        rows = assemble(
            list(kept.values()),
            prompt_index=index,
            sample_index=list(kept),
            is_narrowed=params.narrows,
            by_token=self._config.rollout.max_staleness > 0,
            has_states=self._config.advantage.name == "gigpo",
        )
        in_flight = batch.groups[place]
        in_flight.sampled_s, in_flight.turns = self._watch.now(), tuple(turns_of(kept))
        own, rollouts = [*map(scores_of, kept.values())], tuple(kept.values())
        batch.scoring.add(place, group := SampledGroup(rows, [prompt.example] * len(rows), own, failures, rollouts))
        return group

    def hurry(self) -> None:
        """From now on give episodes and the reward function only a few seconds, because the run is ending."""
        self._interrupted.set()

    async def see_one_complete(self, is_complete: asyncio.Event, groups: Sequence[GroupInFlight]) -> None:
        """Wait until an event says that another group is complete; after an interruption for some seconds.

        Raises:
            AbandonedError: they are over.
        """
        complete = asyncio.ensure_future(is_complete.wait())
        try:
            await self._unless_interrupted(complete, groups)
            if not complete.done():
                await self.sampled(groups)
                await self._grace(complete, (), "the reward function was")
        finally:
            complete.cancel()

    def has_signal(self, group: GroupInFlight) -> bool:
        """Whether there is something to learn from a group that is scored."""
        return group.scored.result().has_signal(self._rewards.advantage)

    async def without_signal(self, groups: Sequence[GroupInFlight]) -> list[int]:
        """Return the indices of those without a signal, once all are scored."""
        async with self.unless_it_fails(groups):
            with span("rollout"):
                await self.sampled(groups)
            with span("reward"):
                await self.scores(groups)
        return [group.index for group in groups if not self.has_signal(group)]

    async def sampled(self, groups: Sequence[GroupInFlight]) -> list[SampledGroup]:
        """Return the rollouts of groups; AbandonedError if after an interruption only episodes are busy for seconds."""
        sampled = asyncio.gather(*(group.sampled for group in groups))
        await self._unless_interrupted(sampled, groups)
        while not sampled.done():
            if self._mailbox.is_idle.is_set():
                await self._grace(sampled, groups, "episodes were")
            else:
                await self.wait(asyncio.wait({sampled}, timeout=self._watch.grace_s / 10), groups)
        return sampled.result()

    async def scores(self, groups: Sequence[GroupInFlight]) -> list[ScoredGroup]:
        """Return the scores of sampled groups; AbandonedError if the function takes long after an interruption."""
        scored = asyncio.gather(*(group.scored for group in groups))
        await self._unless_interrupted(scored, groups)
        if not scored.done():
            await self._grace(scored, groups, "the reward function was")
        return scored.result()

    async def _unless_interrupted(self, awaited: asyncio.Future[Any], groups: Sequence[GroupInFlight]) -> None:
        """Wait for something, or for an interruption."""
        awaited.add_done_callback(lambda done: done.cancelled() or done.exception())  # those given up have one, too
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            await self.wait(asyncio.wait({awaited, interrupted}, return_when=asyncio.FIRST_COMPLETED), groups)
        finally:
            interrupted.cancel()

    async def _grace(self, awaited: asyncio.Future[Any], groups: Sequence[GroupInFlight], who: str) -> None:
        grace_s = self._watch.grace_s
        await self.wait(asyncio.wait({awaited}, timeout=grace_s), groups)
        if not awaited.done():
            raise AbandonedError(f"{who} busy for {grace_s:g} s more")

    async def wait(self, awaited: Awaitable[ResultT], groups: Sequence[GroupInFlight]) -> ResultT:
        """Wait for something, and name what is waited for long; raise what any group raises."""
        task = asyncio.ensure_future(awaited)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # that of the cause is raised
        try:
            while not task.done():
                patience_s = self._watch.patience_s
                await asyncio.wait({task, self._failure}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if self._failure.done():
                    self._failure.result()
                told = self._held_up(groups) or self._watch.times.slowest(groups, self._watch.now())
                if told and not task.done():
                    self._watch.journal.say(told)
            return task.result()
        finally:
            task.cancel()

    def _held_up(self, groups: Sequence[GroupInFlight]) -> str | None:
        """Say which groups have episodes that wait for something else than a response; None while a rank samples."""
        left = [group for group in groups if not group.sampled.done()]
        if not left or not self._mailbox.is_idle.is_set():
            return None
        return (
            f"the step waits for {len(left)} of {len(groups)} prompts, of which no response is being sampled: "
            f"{left[0].name}, prompt {left[0].index} of the run, has an episode that waits for something else; give "
            "what it awaits a deadline, with asyncio.timeout"
        )

    def note_failure(self, done: asyncio.Future[Any]) -> None:
        """Raise the error of something that has ended, if it has one, in the caller who waits."""
        if not done.cancelled() and (error := done.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # or asyncio says that nobody asked for it

    @contextlib.asynccontextmanager
    async def unless_it_fails(self, groups: Sequence[GroupInFlight]) -> AsyncIterator[None]:
        """Cancel everything that is running if the block raises."""
        async with contextlib.AsyncExitStack() as if_it_fails:
            if_it_fails.push_async_callback(self.give_up, groups)
            yield
            if_it_fails.pop_all()

    async def give_up(self, groups: Sequence[GroupInFlight]) -> None:
        """Cancel these and all that is in flight; nothing can be scored any more."""
        for batch in {group.batch for group in (*groups, *self.groups.values())}:
            batch.close()
        self.scored.put_nowait(None)
        self._rewards.grader.close()  # otherwise threads would go on waiting for its calls
        await self._mailbox.stop()

    async def abort(self, indices: Sequence[int]) -> None:
        """Cancel some groups, and all that is sampled; the others of their batches are still scored."""
        for index in indices:
            self.groups.pop(index).close()
        if indices:
            await self._mailbox.stop()

    async def clear(self) -> None:
        """Cancel all groups of training; others are to follow."""
        for batch in {group.batch for group in self.groups.values()}:
            batch.close()
        self.groups.clear()
        await self._mailbox.stop()

    async def close(self) -> None:
        """Release episodes and threads; those of batches that were closed end by themselves."""
        await leave_for_good()
        self._threads.shutdown(wait=False)
