"""Prompts sampled by episodes: the rollouts of each are a group, which is scored while others are still sampled.

Owns: how a prompt becomes a scored group, and that nothing is under way after an error. Must not know: which prompts
these are, and what their groups are for; order and staleness (`groups.py`).

Consumes: prompts, by their index in the run. Produces: scored groups, in order of admission. Waits for: the rollout
role, and the reward function. Unblocked by: the ends of responses and calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from rallypoint.config import RolloutConfig, RunConfig
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.environment import Episode, Prompt
from rallypoint.environments.grader import Grader
from rallypoint.environments.scoring import ScoredGroup, Scoring
from rallypoint.errors import GenerationError, RallyError
from rallypoint.generation import SamplingParams
from rallypoint.journal import TurnSampled
from rallypoint.sampling.client import EpisodeClient
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.types import RolloutBatch, Trajectory, assemble

GRACE_S = 5.0
"""Seconds that the reward function is given for a step after the run was asked to end."""


class AbandonedError(RallyError):
    """A step was given up after an interruption; it is done again when the run goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    rows: RolloutBatch
    failures: tuple[GenerationError, ...]
    """Why rollouts are missing."""

    @property
    def oldest_version(self) -> int | None:
        """Version of its oldest token; None without a rollout."""
        return int(self.rows.versions.min()) if len(self.rows) else None


@dataclasses.dataclass(slots=True, eq=False)
class GroupUnderWay:
    """A prompt from its admission to its scores."""

    index: int
    """Index of the prompt in the run."""
    name: str
    """Name of its example."""
    rank: int
    """Rank of the rollout role that samples it."""
    cohort: Cohort
    """Those it was admitted with."""
    sampled: asyncio.Task[Group]
    """Its rollouts."""
    scored: asyncio.Future[ScoredGroup]
    """What the reward function says of them."""
    times: Times
    """When what happened to it."""

    def close(self) -> None:
        """Give it up."""
        self.sampled.cancel()
        self.scored.cancel()


@dataclasses.dataclass(slots=True, kw_only=True)
class Times:
    """When what happened to a group, in seconds of one clock; None before it has."""

    admitted: float
    sampled: float | None = None
    scored: float | None = None
    turns: tuple[TurnSampled, ...] = ()
    """Its responses, when it is sampled."""


class Cohort:
    """Groups that were admitted together, each scored while others are still sampled."""

    def __init__(self, scoring: Scoring, running: asyncio.Future[object]) -> None:
        self.groups: list[GroupUnderWay] = []
        self.scoring, self.running = scoring, running
        """What scores them, and its end: an error, if it raises one before all are scored."""

    def close(self) -> None:
        """Give up what is under way."""
        for group in self.groups:
            group.close()
        self.scoring.stop()


class Sampler:
    """Has prompts sampled by episodes, and scored."""

    def __init__(
        self,
        config: RunConfig,
        mailbox: Mailbox,
        *,
        tokenizer: PreTrainedTokenizerBase,
        grader: Grader,
        say: Callable[[str], None],
        episode: Episode,
        failed: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without prompts.

        Args:
            config: of the run.
            mailbox: in front of the role that samples.
            tokenizer: for texts.
            grader: asks the reward function.
            say: given a line for the user, from any thread.
            episode: how a rollout comes about.
            failed: given every error that ends a group or the scoring of its cohort; groups are then given up.
            clock: seconds, for `Times`.
        """
        self._failed = failed
        self._config, self._mailbox, self._grader, self._episode = config, mailbox, grader, episode
        self._tokenizer, self._token_texts, self._say, self._clock = tokenizer, TokenTexts(tokenizer), say, clock
        # Each cohort keeps one busy, and asyncio's own are few.
        self._threads = ThreadPoolExecutor(config.max_groups + 1, thread_name_prefix="scoring")

    def begin(
        self,
        prompts: Mapping[int, Prompt],
        params: SamplingParams,
        group_size: int,
        complete: Callable[[int], None] = lambda _: None,
        num_places: int | None = None,
    ) -> Cohort:
        """Have prompts sampled, and scored.

        Args:
            prompts: by their index in the run.
            params: how rollouts are drawn.
            group_size: G, rollouts of each prompt.
            complete: called with the index of each group that was sampled and scored.
            num_places: of a step, if prompts may come one by one at any time: then their ranks follow from their
                indices, and as many rollouts may fail as of a whole step; None: these prompts are all there are.
        """
        loop = asyncio.get_running_loop()

        def ended(place: int, scored: ScoredGroup) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, cohort.groups[place], scored)

        def end(group: GroupUnderWay, scored: ScoredGroup) -> None:
            if not group.scored.done():
                group.times.scored = self._clock()
                group.scored.set_result(scored)
                complete(group.index)

        scoring = Scoring(
            self._grader,
            decode=lambda responses: self._tokenizer.batch_decode(responses, skip_special_tokens=True),
            token_texts=self._token_texts,
            num_rows=(num_places or len(prompts)) * group_size,
            max_failed=self._config.reward.max_failed,
            has_models=bool(self._config.reward.all_models),
            warn=self._say,
            ended=ended,
        )
        cohort = Cohort(scoring, loop.run_in_executor(self._threads, scoring.run))
        cohort.running.add_done_callback(self._look_at)
        for place, (index, prompt) in enumerate(prompts.items()):
            rank = self._mailbox.rank_of(*((index % num_places, num_places) if num_places else (place, len(prompts))))
            times = Times(admitted=self._clock())
            most = self._config.max_row_tokens
            clients = [
                EpisodeClient(
                    self._mailbox, params, index, number, rank=rank, max_tokens=most, tokenizer=self._tokenizer
                )
                for number in range(group_size)
            ]
            sampled = asyncio.create_task(self._sample(place, prompt, clients, times, scoring))
            sampled.add_done_callback(self._look_at)
            group = GroupUnderWay(index, prompt.example.name, rank, cohort, sampled, loop.create_future(), times)
            cohort.groups.append(group)
        all_sampled = asyncio.gather(*(group.sampled for group in cohort.groups), return_exceptions=True)
        all_sampled.add_done_callback(lambda _: scoring.finish())
        return cohort

    async def _sample(
        self, place: int, prompt: Prompt, clients: Sequence[EpisodeClient], times: Times, scoring: Scoring
    ) -> Group:
        """Sample the rollouts of a prompt, and have them scored; an error of one gives the others up."""
        episodes = [asyncio.create_task(self._rollout(prompt, client)) for client in clients]
        try:
            found = await asyncio.gather(*episodes)
        finally:
            for episode in episodes:
                episode.cancel()
        params, index = clients[0].params, clients[0].prompt_index
        kept = {number: one for number, one in enumerate(found) if isinstance(one, Trajectory)}
        rows = assemble(
            list(kept.values()),
            prompt_index=index,
            sample_index=list(kept),
            is_narrowed=params.narrows,
            by_token=self._config.rollout.max_staleness > 0,
        )
        times.sampled = self._clock()
        times.turns = tuple(_turns_of(kept))
        scoring.add(place, rows, [prompt.example] * len(rows))
        return Group(rows, tuple(one for one in found if isinstance(one, GenerationError)))

    def _look_at(self, done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._failed(error)

    def close(self) -> None:
        """Let go of the threads; those of cohorts that were closed end by themselves."""
        self._threads.shutdown(wait=False)

    async def _rollout(self, prompt: Prompt, client: EpisodeClient) -> Trajectory | GenerationError:
        """Have an episode, or return why there is none: a failed rollout is counted."""
        try:
            return await client.have(self._episode, prompt)
        except GenerationError as error:
            return error


def _turns_of(rollouts: Mapping[int, Trajectory]) -> Iterator[TurnSampled]:
    """Yield the responses of rollouts, by their samples."""
    for sample, rollout in rollouts.items():
        for number, turn in enumerate(rollout.turns):
            digest = xxhash.xxh3_64_hexdigest(array("q", turn.response).tobytes())
            yield sample, number, turn.spans or ((turn.version, len(turn.response)),), digest


def sampling_params(rollout: RolloutConfig, *, seed: int, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """Return how a config has rollouts drawn."""
    return SamplingParams(
        max_new_tokens=rollout.max_response_tokens,
        min_new_tokens=rollout.min_response_tokens,
        temperature=rollout.temperature,
        seed=seed,
        stop_tokens=stop_tokens,
        stop_strings=rollout.stop,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
    )
