"""Prompts in, scored groups out.

Owns: how prompts become a batch: sampled by episodes, scored by group, measured. Must not know: engines, ranks' state,
what is done with a batch.

Consumes: examples, by their place in the prompt stream. Produces: scored batches, groups in order of admission. Waits
for: the rollout role, the reward function and the reward model. Unblocked by: a publish, which brings the next version.

The state to be saved is one number, of prompts that batches were made of; everything else follows from it and the seed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from rallypoint.config import RolloutConfig, RunConfig
from rallypoint.data import EncodedPrompts, Example, PromptStream
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.environment import Client, Episode, Prompt, single_turn
from rallypoint.environments.pool import Grader
from rallypoint.environments.scoring import ModelScores, Scored, ScoredGroup, Scoring, combine, describe_failures
from rallypoint.errors import GenerationError, RallyError, RewardError, StalenessError
from rallypoint.generation import Request, SamplingParams, as_turn
from rallypoint.observability import span
from rallypoint.roles.groups import Groups
from rallypoint.roles.reward import RewardModel
from rallypoint.roles.rollout import Rollouts
from rallypoint.types import (
    Maximum,
    Mean,
    Metrics,
    RolloutBatch,
    ScoredBatch,
    Sum,
    Trajectory,
    Turn,
    assemble,
    merge,
)

# Training seeds are below 2**31, so validation never shares its random numbers with training.
_VALIDATION_STREAM = 2**32
_NEXT_TURN = 2**33
"""Distance of the seeds of two turns of one rollout."""
GRACE_S = 5.0
"""Seconds that the reward function is given for a step after the run was asked to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout in words, for people."""

    name: str
    prompt: str
    response: str
    ground_truth: str
    score: float
    truncated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """What one step has to learn from."""

    batch: ScoredBatch
    metrics: Metrics
    records: tuple[RolloutRecord, ...]
    """The first few rollouts of the step."""


class AbandonedError(RallyError):
    """A step was given up after an interruption; it is done again when the run goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """The rollouts of one prompt."""

    rows: RolloutBatch
    failures: tuple[GenerationError, ...]
    """Why rollouts are missing."""


class _Client:
    """Samples for one episode, see `Client`: each turn continues the tokens of those before."""

    def __init__(self, rollouts: Rollouts, params: SamplingParams, prompt: int, sample: int, rank: int) -> None:
        self._rollouts, self._params = rollouts, params
        self._prompt, self._sample, self._rank = prompt, sample, rank
        self._tokens: tuple[int, ...] = ()
        self._num_turns = 0

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """See `Client.sample`."""
        params, added = self._params, tuple(tokens)
        if self._num_turns:
            params = dataclasses.replace(params, seed=params.seed + self._num_turns * _NEXT_TURN)
        tokens = self._tokens + added
        request = Request(tokens=tokens, params=params, prompt_index=self._prompt, sample_index=self._sample)
        turn = as_turn(added, await self._rollouts.sample(request, self._rank))
        self._tokens = tokens + turn.response  # a turn that failed leaves nothing behind: an episode may repeat it
        self._num_turns += 1
        return turn


class _Batch:
    """Groups that are sampled together, each scored while others are still sampled."""

    def __init__(self, groups: Iterable[Coroutine[None, None, _Group]], scoring: Scoring) -> None:
        self._scoring = scoring
        self._groups = [asyncio.create_task(group) for group in groups]
        self._scored = asyncio.create_task(asyncio.to_thread(scoring.run))

    async def sampled(self) -> list[_Group]:
        """Return the groups in order of admission.

        Raises:
            GenerationError: all rollouts have failed.
        """
        sampled = asyncio.gather(*self._groups)
        sampled.add_done_callback(lambda done: done.cancelled() or done.exception())  # that of the cause is raised
        await asyncio.wait({sampled, self._scored}, return_when=asyncio.FIRST_COMPLETED)
        if self._scored.done():
            self._scored.result()  # raises: it has not been told yet that all groups are there
        groups = await sampled
        self._scoring.finish()
        failures = [failure for group in groups for failure in group.failures]
        if not any(len(group.rows) for group in groups):
            raise GenerationError(f"all {len(failures)} rollouts failed; the first one: {failures[0]}")
        return groups

    async def scored(self, interrupted: asyncio.Event) -> list[ScoredGroup]:
        """Return the groups with what the reward function says of them, after `sampled`.

        Raises:
            AbandonedError: it did not say so within some seconds after an interruption.
        """
        waiting = asyncio.create_task(interrupted.wait())
        await asyncio.wait({self._scored, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self._scored.done():
            await asyncio.wait({self._scored}, timeout=GRACE_S)
        if not self._scored.done():
            raise AbandonedError(f"the reward function was busy for {GRACE_S:g} s more")
        return self._scored.result()

    def close(self) -> None:
        """Give up what is under way."""
        for group in self._groups:
            group.cancel()
        self._scoring.stop()
        self._scored.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else looks at it


class RolloutSource:
    """Admits prompts, has them answered and scored."""

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
        self._tokenizer, self._say, self._episode, self._max_staleness = tokenizer, say, episode, max_staleness
        self._grader, self._reward_model = grader, reward_model
        self._token_texts = TokenTexts(tokenizer)
        self._stream = PromptStream(len(train.examples), config.seed, config.data.shuffle)
        self._params = sampling_params(config.rollout, seed=config.seed, stop_tokens=stop_tokens)
        hidden = sorted(set(tokenizer.all_special_ids) - set(stop_tokens))
        self._hidden_tokens = torch.tensor(hidden, dtype=torch.int64)
        self._interrupted, self._num_loads = asyncio.Event(), 0
        self._batches: collections.deque[_Batch] = collections.deque()
        self.num_admitted = 0

    @property
    def num_admitted(self) -> int:
        """Prompts that batches were made of: all that has to be saved."""
        return self._groups.num_taken

    @num_admitted.setter
    def num_admitted(self, num_prompts: int) -> None:
        self._groups: Groups[_Group] = Groups(
            num_prompts=self._config.rollout.num_prompts, max_staleness=self._max_staleness, num_taken=num_prompts
        )

    def hurry(self) -> None:
        """Give the reward function only some seconds from now on: the run is to end."""
        self._interrupted.set()

    async def next_batch(self) -> Sampled:
        """Return B scored rollouts of the next P prompts, fewer when reward function or model failed on some.

        Raises:
            RewardError: they failed on more of them than reward.max_failed, or on all.
            GenerationError: all rollouts have failed.
            StalenessError: a rollout was sampled from weights that are too old, or no weights were loaded since the
                batch before.
            AbandonedError: the run is to end, and the reward function takes long.
        """
        if self.rollouts.num_loads > self._num_loads:
            self._num_loads = self.rollouts.num_loads
            self._groups.loaded(self.rollouts.version)
        self._admit()
        if not self._batches:
            raise StalenessError(f"no weights were loaded since the batch before: version {self.rollouts.version}")
        sampled = await self._finish(self._batches[0])
        taken = self._groups.take()  # outside the assertion, which `python -O` leaves out
        assert taken is not None, "its groups are complete"
        self._batches.popleft()
        self.records = sampled.records
        return sampled

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
        return await self._finish(self._begin(prompts, params, 1))

    def _admit(self) -> None:
        """Have prompts sampled while there are slots; all of a batch before the first token of it."""
        num_prompts, admitted = self._config.rollout.num_prompts, self._groups.admit()
        for first in range(admitted.start, admitted.stop, num_prompts):
            prompts: dict[int, Prompt] = {}
            for index in range(first, first + num_prompts):
                row = self._stream.example_index(index)
                prompts[index] = Prompt(tuple(self._train.token_ids[row]), self._train.examples[row])
            group_size, complete = self._config.rollout.group_size, self._groups.complete
            self._batches.append(self._begin(prompts, self._params, group_size, complete))

    def _begin(
        self,
        prompts: Mapping[int, Prompt],
        params: SamplingParams,
        group_size: int,
        complete: Callable[[int, _Group, int | None], None] = lambda *_: None,
    ) -> _Batch:
        """Have prompts sampled, by their index in the run, and scored."""
        scoring = Scoring(
            self._grader,
            decode=lambda responses: self._tokenizer.batch_decode(responses, skip_special_tokens=True),
            token_texts=self._token_texts,
            num_rows=len(prompts) * group_size,
            max_failed=self._config.reward.max_failed,
            warn=self._say,
        )

        async def sample(place: int, index: int, prompt: Prompt) -> _Group:
            rank = self.rollouts.rank_of(place, len(prompts))
            clients = [_Client(self.rollouts, params, index, number, rank) for number in range(group_size)]
            found = await asyncio.gather(*(self._rollout(prompt, client) for client in clients))
            kept = {number: one for number, one in enumerate(found) if isinstance(one, Trajectory)}
            rows = assemble(
                list(kept.values()), prompt_index=index, sample_index=list(kept), is_narrowed=params.narrows
            )
            group = _Group(rows, tuple(one for one in found if isinstance(one, GenerationError)))
            complete(index, group, int(rows.versions.min()) if len(rows) else None)
            scoring.add(place, rows, [prompt.example] * len(rows))
            return group

        return _Batch((sample(place, *each) for place, each in enumerate(prompts.items())), scoring)

    async def _rollout(self, prompt: Prompt, client: Client) -> Trajectory | GenerationError:
        """Have an episode, or return why there is none: a failed rollout is counted."""
        try:
            return await self._episode(prompt, client)
        except GenerationError as error:
            return error

    async def _finish(self, batch: _Batch) -> Sampled:
        """Wait until a batch is sampled and scored; after an error nothing is under way."""
        async with contextlib.AsyncExitStack() as if_it_fails:
            if_it_fails.push_async_callback(self._give_up, batch)
            with span("rollout"):
                groups = await batch.sampled()
            failures = [failure for group in groups for failure in group.failures]
            if failures:
                self._say(f"{len(failures)} rollouts failed and are left out; the first one: {failures[0]}")
            with span("reward"):
                rows = RolloutBatch.join([group.rows for group in groups])
                # At once, and not by group: last bits depend on what is computed together, and it may need the
                # processes that sample.
                scores = await self._reward_model.scores(rows)
                model = None if scores is None else ModelScores(scores)
                scored_groups = await batch.scored(self._interrupted)
                scored = combine(scored_groups, max_failed=self._config.reward.max_failed, model=model)
            if_it_fails.pop_all()
        if scored.failures:
            self._say(describe_failures(scored.failures))
        if not len(scored.batch):
            raise RewardError(f"no rollout could be scored: {describe_failures(scored.failures)}")
        examples = [example for group in scored_groups for example in group.examples]
        texts = [text for group in scored_groups for text in group.texts]
        return Sampled(
            scored.batch,
            merge(self._measure(rows, scored, len(failures)), scored.metrics),
            self._records(scored, examples, texts),
        )

    async def close(self) -> None:
        """Give up what is sampled ahead; a run with max_staleness 0 samples nothing ahead."""
        await self._give_up()

    async def _give_up(self, *batches: _Batch) -> None:
        for each in (*batches, *self._batches):
            each.close()
        self._grader.close()  # or threads would wait for its calls
        await self.rollouts.stop()

    def _measure(self, batch: RolloutBatch, scored: Scored, num_failed: int) -> Metrics:
        """Return what a person wants to know of a step's rollouts."""
        scores = scored.batch.scores
        num_rows, num_tokens = len(batch), batch.num_loss_tokens
        hidden = torch.isin(batch.tokens[batch.loss_mask], self._hidden_tokens)
        narrowed: dict[str, Mean] = {}
        if batch.sampled_logprobs is not None:
            gain = (batch.sampled_logprobs - batch.rollout_logprobs)[batch.loss_mask]
            narrowed["rollout/narrowing"] = Mean(float(gain.double().sum()), num_tokens)
        return Metrics(
            {
                **narrowed,
                "reward/mean": Mean(float(scores.sum()), len(scores)),
                "reward/std": Mean(float(scores.std(correction=0)) * len(scores), len(scores)),
                "rollout/failed": Sum(num_failed),
                "rollout/num_tokens": Sum(num_tokens),
                "rollout/response_length": Mean(num_tokens, num_rows),
                "rollout/response_length_max": Maximum(float(_response_lengths(batch).max())),
                "rollout/truncated": Mean(float(batch.truncated.sum()), num_rows),
                # Special tokens inside a response: the policy pays nothing for what its reward function cannot see.
                "rollout/hidden_tokens": Mean(float(hidden.sum()), num_tokens),
            }
        )

    def _records(self, scored: Scored, examples: Sequence[Example], texts: Sequence[str]) -> tuple[RolloutRecord, ...]:
        scores = scored.batch.scores.tolist()
        limit = max(1, self._config.trainer.num_logged_rollouts)
        return tuple(
            RolloutRecord(
                name=examples[row].name,
                prompt=examples[row].prompt[-1].content,
                response=texts[row],
                ground_truth=str(examples[row].ground_truth),
                score=scores[place],
                truncated=bool(scored.batch.truncated[place]),
            )
            for place, row in enumerate(scored.kept_rows[:limit])
        )


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


def _response_lengths(batch: RolloutBatch) -> torch.Tensor:
    return torch.zeros(len(batch), dtype=torch.int64).index_add_(0, batch.row_of_token, batch.loss_mask.long())
