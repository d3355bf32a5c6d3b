"""Prompts in, scored groups out.

One object owns the order in which prompts are admitted, the random numbers of their rollouts, and the
reward. Consumes: examples, by their place in the prompt stream. Produces: scored batches, groups in order
of admission. Waits for: the rollout role, and the reward model. Unblocked by: a publish, which brings the next
version.

The state to be saved is one number, of prompts admitted; everything else follows from it and the seed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from rallypoint.config import RolloutConfig, RunConfig
from rallypoint.data import EncodedPrompts, Example, PromptStream
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.pool import Grader
from rallypoint.environments.scoring import ModelScores, Scored, describe_failures, score_rollouts
from rallypoint.errors import RewardError, StalenessError
from rallypoint.generation import SamplingParams
from rallypoint.observability import span
from rallypoint.roles.reward import RewardModel
from rallypoint.roles.rollout import Rollouts
from rallypoint.types import (
    Maximum,
    Mean,
    Metrics,
    Prompts,
    RolloutBatch,
    ScoredBatch,
    Sum,
    merge,
    offsets_from_lengths,
)

# Training seeds are below 2**31, so validation never shares its random numbers with training.
_VALIDATION_STREAM = 2**32


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
    ) -> None:
        self.rollouts = rollouts
        self.num_admitted = 0
        self.records: tuple[RolloutRecord, ...] = ()
        """The first few rollouts of the newest batch."""
        self._config, self._train, self._validation = config, train, validation
        self._tokenizer, self._say = tokenizer, say
        self._grader, self._reward_model = grader, reward_model
        self._token_texts = TokenTexts(tokenizer)
        self._stream = PromptStream(len(train.examples), config.seed, config.data.shuffle)
        self._params = sampling_params(config.rollout, seed=config.seed, stop_tokens=stop_tokens)
        hidden = sorted(set(tokenizer.all_special_ids) - set(stop_tokens))
        self._hidden_tokens = torch.tensor(hidden, dtype=torch.int64)

    async def next_batch(self) -> Sampled:
        """Return B scored rollouts of the next P prompts, fewer when reward function or model failed on some.

        Raises:
            RewardError: they failed on more of them than reward.max_failed, or on all.
            StalenessError: a rollout was sampled from weights that are not the newest.
        """
        first = self.num_admitted
        admissions = range(first, first + self._config.rollout.num_prompts)
        rows = [self._stream.example_index(admission) for admission in admissions]
        prompts = _prompts([self._train.token_ids[row] for row in rows], first)
        with span("rollout"):
            batch = await self._sample(prompts, self._params)
        self.num_admitted += len(prompts)
        if len(batch) and int(batch.versions.min()) != self.rollouts.version:
            raise StalenessError(f"sampled from version {int(batch.versions.min())}, newest {self.rollouts.version}")
        with span("reward"):
            examples = [self._train.examples[rows[int(index) - first]] for index in batch.prompt_index]
            sampled = await self._score(batch, examples)
        self.records = sampled.records
        return sampled

    async def validate(self) -> Sampled | None:
        """Return the validation prompts' rollouts, one each; None when the run has no validation set."""
        if self._validation is None:
            return None
        limit = self._config.validation.max_prompts
        token_ids, examples = self._validation.token_ids[:limit], self._validation.examples[:limit]
        params = dataclasses.replace(
            self._params,
            seed=self._config.seed + _VALIDATION_STREAM,
            group_size=1,
            temperature=self._config.validation.temperature,
        )
        batch = await self._sample(_prompts(token_ids, 0), params)
        return await self._score(batch, [examples[int(index)] for index in batch.prompt_index])

    async def _sample(self, prompts: Prompts, params: SamplingParams) -> RolloutBatch:
        batch = await self.rollouts.sample(prompts, params)
        if failures := self.rollouts.failures:
            self._say(f"{len(failures)} rollouts failed and are left out; the first one: {failures[0]}")
        return batch

    async def _score(self, batch: RolloutBatch, examples: Sequence[Example]) -> Sampled:
        texts = self._tokenizer.batch_decode(
            [batch.response(row).tolist() for row in range(len(batch))], skip_special_tokens=True
        )
        scores = await self._reward_model.scores(batch)
        model = None if scores is None else ModelScores(scores)
        try:
            scored = await asyncio.to_thread(
                score_rollouts,
                batch,
                examples,
                texts,
                self._grader,
                token_texts=self._token_texts,
                max_failed=self._config.reward.max_failed,
                model=model,
                warn=self._say,
            )
        except asyncio.CancelledError:
            self._grader.close()  # or the thread would wait for its calls
            raise
        if scored.failures:
            self._say(describe_failures(scored.failures))
        if not len(scored.batch):
            raise RewardError(f"no rollout could be scored: {describe_failures(scored.failures)}")
        return Sampled(
            scored.batch, merge(self._measure(batch, scored), scored.metrics), self._records(scored, examples, texts)
        )

    def _measure(self, batch: RolloutBatch, scored: Scored) -> Metrics:
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
                "rollout/failed": Sum(len(self.rollouts.failures)),
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
        group_size=rollout.group_size,
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


def _prompts(token_ids: Sequence[Sequence[int]], first_index: int) -> Prompts:
    return Prompts(
        offsets=offsets_from_lengths(torch.tensor([len(ids) for ids in token_ids])),
        tokens=torch.tensor([token for ids in token_ids for token in ids]),
        prompt_index=torch.arange(first_index, first_index + len(token_ids)),
    )


def _response_lengths(batch: RolloutBatch) -> torch.Tensor:
    return torch.zeros(len(batch), dtype=torch.int64).index_add_(0, batch.row_of_token, batch.loss_mask.long())
