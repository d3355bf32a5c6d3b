"""The rollouts of an earlier run in place of a role that samples: a step is computed again, and nothing is sampled.

Owns: how a step's rows become its batch again, to the bit. Must not know: what the step is compared with.

Scores are those of the record, unless a reward is asked to score the rollouts anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rallypoint.cluster.call import Process
from rallypoint.config import RunConfig
from rallypoint.data.prompt_sets import PromptSets, TrainingPrompts
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.grader import Grader
from rallypoint.environments.outcome import Failure, FailureKind, Outcome, Scores
from rallypoint.environments.scored import SampledGroup, Scored, ScoredGroup, combine
from rallypoint.environments.scoring import Scoring
from rallypoint.roles.actor import Actor
from rallypoint.roles.publishing import Publisher, Replica, Stream, Subscriber, WeightTransport
from rallypoint.run.rollouts import read_rollouts
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.sampled import Sampled, penalty_of
from rallypoint.transport_kinds import FOLDER
from rallypoint.types import Mean, Metrics, RolloutBatch, Sum, offsets_from_lengths
from rallypoint.weights import TransferPlan

Row = Mapping[str, Any]
"""A rollout by the columns of docs/tracking.md."""


@dataclasses.dataclass(slots=True, eq=False)
class Recorded:
    """What is computed again."""

    run: Path
    """Folder of the run."""
    versions: Sequence[int]
    """Versions of weights that it has sampled from."""
    is_rescored: bool = False
    """Whether the reward functions score its rollouts anew."""
    logprobs: dict[int, Tensor] = dataclasses.field(default_factory=dict[int, Tensor])
    """Step -> logprob of every trained token of its rows by the weights after it: [T]."""


class RecordedSource:
    """The batches of an earlier run, step by step; see `Batches`."""

    def __init__(
        self, config: RunConfig, recorded: Recorded, prompts: PromptSets, grader: Grader, say: Callable[[str], None]
    ) -> None:
        """Begin before the first step.

        Args:
            config: of the run, with what is to be different.
            recorded: what is computed again.
            prompts: those of the run.
            grader: asks the reward functions.
            say: given a line on a reward function that takes long.
        """
        self.newest: StepRollouts | None = None
        self.validated: StepRollouts | None = None
        self.done = PromptsDone()
        self.num_admitted = 0
        self.role = _Nobody(_KeptLogprobs(FOLDER, recorded))
        self.step = 0
        """Step whose batch was taken."""
        self._config, self._recorded, self._grader, self._say = config, recorded, grader, say
        self._version = 0
        self._prompts, self._train = prompts, TrainingPrompts(config, prompts.train)
        self._texts = TokenTexts(prompts.tokenizer)
        self._penalty = penalty_of(config)

    def go_on(self, step: int, version: int, done: PromptsDone) -> None:
        """Go on after a step."""
        self.step, self._version, self.done = step, version, done

    def examples_of(self, batch: RolloutBatch) -> list[int]:
        """Return the number of the example that each row answers."""
        return [self._train.example_index(int(index)) for index in batch.prompt_index]

    def announce(self, version: int, digest: str) -> None:
        """Keep nothing: the record has no ranks that load."""

    async def load(self, version: int, published: Path | None = None) -> None:
        """Record the version that the next batch was sampled with, or an older one."""
        del published
        self._version = version

    async def next_batch(self) -> Sampled:
        """Return the batch of the next step as it was.

        Raises:
            RunFolderError: its rollouts were not kept.
        """
        self.step += 1
        recorded, rollout = read_rollouts(self._recorded.run, self.step), self._config.rollout
        groups = list(self._groups(recorded))
        if self._recorded.is_rescored:
            groups = await asyncio.to_thread(self._scored, groups)
        replaced = {int(row["prompt_index"]) for row in recorded if row["replaced"]}
        kept = [group for group in groups if int(group.rows.prompt_index[0]) not in replaced]
        batch, everything = self._combined(kept, recorded).batch, self._combined(groups, recorded)
        measured = Metrics(
            {
                "reward/mean": Mean(float(everything.batch.scores.sum()), len(everything.batch)),
                "rollout/num_tokens": Sum(sum(group.rows.num_loss_tokens for group in groups)),
            }
        )
        rows = RolloutBatch.join([group.rows for group in groups])
        sampled = Sampled(batch, measured, StepRollouts.of(rows, everything, groups, replaced))
        if rollout.max_staleness:
            sampled = sampled.aged(self._age, keeps=rollout.on_load == "keep")
        self.newest = sampled.rollouts
        return sampled if self._penalty is None else dataclasses.replace(sampled, batch=self._penalty(sampled.batch)[0])

    def _age(self, version: int) -> int:
        return sum(version < loaded <= self._version for loaded in {*self._recorded.versions, self._version})

    def _groups(self, recorded: Sequence[Row]) -> Iterator[ScoredGroup]:
        for prompt, rows in itertools.groupby(recorded, key=lambda row: int(row["prompt_index"])):
            group, example = list(rows), self._prompts.train[self._train.example_index(prompt)][1]
            texts = tuple(row["response"] for row in group)
            yield ScoredGroup(rows_of(group), (example,) * len(group), texts, [_outcome(row) for row in group])

    def _scored(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Have the reward functions score groups; in a thread."""
        scoring = Scoring(
            self._grader,
            decode=lambda responses: self._prompts.tokenizer.batch_decode(responses, skip_special_tokens=True),
            token_texts=self._texts,
            num_rows=sum(len(group.rows) for group in groups),
            max_failed=self._config.rollout.max_failed,
            warn=self._say,
        )
        for place, group in enumerate(groups):
            scoring.add(place, SampledGroup(group.rows, group.examples))
        scoring.finish()
        return scoring.run()

    def _combined(self, groups: Sequence[ScoredGroup], recorded: Sequence[Row]) -> Scored:
        """Return what `combine` does; with what float32 has cut off the scores, which the record has whole."""
        scored = combine(groups)
        if self._recorded.is_rescored:
            return scored
        whole = {(row["prompt_index"], row["sample_index"]): row["score"] for row in recorded}
        batch = dataclasses.replace(scored.batch, rounding=None)
        pairs = zip(batch.prompt_index.tolist(), batch.sample_index.tolist(), strict=True)
        exact = torch.tensor([whole[pair] for pair in pairs], dtype=torch.float64)
        return dataclasses.replace(scored, batch=dataclasses.replace(batch, rounding=exact - batch.scores))

    async def validate(self) -> None:
        """Return None: nothing is sampled."""

    async def close(self) -> None:
        """Give nothing up: nothing is under way."""

    def hurry(self) -> None:
        """Wait for nothing."""


@dataclasses.dataclass(slots=True)
class _KeptLogprobs(WeightTransport):
    """Nobody takes the weights; what they say of the rollouts that they were trained on is kept."""

    recorded: Recorded

    async def publish(self, actor: Publisher, subscriber: Subscriber) -> None:
        """See `WeightTransport`."""
        assert isinstance(actor, Actor), "a run has one policy"
        assert isinstance(subscriber, RecordedSource), "which has this"
        if subscriber.newest is not None:
            self.recorded.logprobs[subscriber.step] = await actor.logprobs(subscriber.newest.rows)
        await subscriber.load(actor.version)

    def load(self, rank: Replica, version: int, published: Path | None) -> None:
        """See `WeightTransport`."""
        raise AssertionError(f"no rank samples, and {rank} is to load version {version} from {published}")


@dataclasses.dataclass(slots=True)
class _Nobody:
    """A role of no ranks."""

    transport: WeightTransport
    processes: Sequence[Process] = ()
    publisher: Publisher | None = None

    async def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """See `Receivers`."""


def rows_of(recorded: Sequence[Row]) -> RolloutBatch:
    """Return the rows of rollouts as they were sampled.

    >>> row = {"prompt_ids": [5, 6], "response_ids": [7, 8], "loss_mask": [True, True], "prompt_index": 3}
    >>> row |= {"rollout_logprobs": [-1.0, -2.0], "sample_index": 0, "version": 4, "finish_reason": "stop"}
    >>> batch = rows_of([row])
    >>> batch.tokens.tolist(), batch.loss_mask.tolist(), batch.rollout_logprobs.tolist()
    ([5, 6, 7, 8], [False, False, True, True], [0.0, 0.0, -1.0, -2.0])
    """

    def each(column: str, kind: torch.dtype) -> Tensor:
        return torch.tensor([row[column] for row in recorded], dtype=kind)

    def of_tokens(column: str, kind: torch.dtype) -> Tensor:
        """Return what is of a response, and 0 before it."""
        values = [[*[0] * len(row["prompt_ids"]), *row[column]] for row in recorded]
        return torch.tensor([value for row in values for value in row], dtype=kind)

    def of_some(column: str, kind: torch.dtype) -> Tensor | None:
        return of_tokens(column, kind) if has(column) else None

    def has(column: str) -> bool:
        return all(row.get(column) is not None for row in recorded)

    def experts() -> Tensor:
        data = b"".join(row["experts"] for row in recorded)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(sum(map(len, tokens)), -1)

    tokens = [[*row["prompt_ids"], *row["response_ids"]] for row in recorded]
    return RolloutBatch(
        offsets=offsets_from_lengths(torch.tensor([len(row) for row in tokens])),
        tokens=torch.tensor([token for row in tokens for token in row], dtype=torch.int64),
        loss_mask=of_tokens("loss_mask", torch.bool),
        prompt_index=each("prompt_index", torch.int64),
        sample_index=each("sample_index", torch.int64),
        sequence_starts=of_some("sequence_starts", torch.bool),
        rollout_logprobs=of_tokens("rollout_logprobs", torch.float32),
        versions=each("version", torch.int64),
        truncated=torch.tensor([row["finish_reason"] == "length" for row in recorded]),
        sampled_logprobs=of_some("sampled_logprobs", torch.float32),
        token_versions=of_some("token_versions", torch.int64),
        turn_states=of_some("turn_states", torch.int64),
        experts=experts() if has("experts") else None,
    )


def _outcome(row: Row) -> Outcome:
    """Return what the reward said of a rollout."""
    if row["score"] is None:
        kind, _, reason = str(row["failure"]).partition(": ")
        return Failure(cast("FailureKind", kind), reason)
    scores = [value for value, mine in zip(row["token_rewards"], row["loss_mask"], strict=True) if mine]
    parts = {name: math.nan if value is None else value for name, value in (row["reward_parts"] or {}).items()}
    return Scores(tuple(scores), dict(row["reward_extras"] or {}), parts, answer=row["answer"])
