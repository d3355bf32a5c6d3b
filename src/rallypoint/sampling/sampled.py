"""What a step learns from: its batch, and what there is to measure of it.

Owns: the metrics of rollouts. Must not know: how they were sampled, or why these are the rollouts of the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from rallypoint.algorithms import OverlongPenalty
from rallypoint.config import RunConfig
from rallypoint.data import Example, special_ids
from rallypoint.environments.failures import ROLLOUT_FAILURE_KINDS, RolloutFailure
from rallypoint.environments.scored import Scored
from rallypoint.roles.learner import NOT_FINITE
from rallypoint.roles.publishing import Subscriber
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.sampling.groups import PromptsDone
from rallypoint.types import Maximum, Mean, Metric, Metrics, RolloutBatch, ScoredBatch, Sum, Trajectory, merge

_MOST_TURNS = 8
"""Turns of a rollout that have a metric each: more would be noise."""

_MOST_SOURCES = 32
"""Values of `data_source` in the training data that have metrics of their own, each; more would be noise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """What one step has to learn from."""

    batch: ScoredBatch
    metrics: Metrics
    rollouts: StepRollouts
    """All rollouts with their texts, for people and the run's folder; those of replaced groups are last."""

    @property
    def feedback(self) -> Sequence[str]:
        """What the reward function said of each row of the batch."""
        return self.rollouts.scored.feedback[: len(self.batch)]

    def aged(self, age: Callable[[int], int], *, keeps: bool) -> Sampled:
        """Return it with the steps that each token is behind the actor, and with what there is to measure of them.

        Args:
            age: gives the number of loads after that of a version.
            keeps: whether responses go on with the keys and values of weights before a load.
        """
        batch = self.batch
        of_rows = batch.versions.repeat_interleave(batch.lengths)
        versions = of_rows if batch.token_versions is None else batch.token_versions
        found, places = versions[batch.loss_mask].unique(return_inverse=True)
        ages = torch.tensor([age(version) for version in found.tolist()], dtype=torch.int64)[places]
        oldest = torch.tensor([age(version) for version in batch.versions.tolist()], dtype=torch.int64)
        behind = torch.zeros_like(batch.tokens)
        behind[batch.loss_mask] = oldest.repeat_interleave(batch.lengths)[batch.loss_mask] if keeps else ages
        measured = Metrics(
            {
                "rollout/staleness_mean": Mean(float(ages.sum()), len(ages)),
                "rollout/staleness_max": Maximum(max(ages.tolist(), default=0)),
            }
        )
        return dataclasses.replace(
            self, batch=dataclasses.replace(batch, steps_behind=behind), metrics=merge(self.metrics, measured)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Measuring:
    """What there is to measure of the rollouts of a run."""

    config: RunConfig
    is_shown: torch.Tensor
    """[V] by token id, whether a response shows it or ends with it; ids beyond are shown by nothing."""
    has_episode: bool
    """Whether a rollout may have several turns, and metrics of its own."""
    num_sources: int
    """Values of `data_source` in the training data."""

    def sampled(
        self,
        batch: ScoredBatch,
        rollouts: StepRollouts,
        failures: Sequence[RolloutFailure],
        episodes: Sequence[Trajectory],
    ) -> Sampled:
        """Return a batch with what there is to measure of it.

        Args:
            batch: what is learned from.
            rollouts: all of its step, with those of replaced groups.
            failures: why others are left out.
            episodes: the rollouts turn by turn.
        """
        scored = rollouts.scored
        measured = measure(rollouts.rows, scored, num_failed=len(failures), is_shown=self.is_shown)
        if self.has_episode:
            measured = merge(measured, measure_episodes(episodes, failures))
        if wild := sum(one.kind == "nonfinite" for one in failures):
            measured = merge(measured, Metrics({f"rollout/{NOT_FINITE}": Sum(wild)}))
        if self.config.rollout.dynamic_sampling:
            measured = merge(measured, Metrics({"reward/kept_mean": Mean(float(batch.scores.sum()), len(batch))}))
        if 1 < self.num_sources <= _MOST_SOURCES:
            measured = merge(measured, measure_sources(scored, rollouts.examples))
        return Sampled(batch, merge(measured, scored.metrics), rollouts)


class Batches(Subscriber, Protocol):
    """Where a recipe's scored rollouts come from: prompts that are sampled, or the record of an earlier run."""

    newest: StepRollouts | None
    """Rollouts of the newest batch."""
    validated: StepRollouts | None
    """Rollouts of the newest validation."""

    @property
    def done(self) -> PromptsDone:
        """The prompts that have gone into batches: all that a checkpoint needs."""
        ...

    @property
    def num_admitted(self) -> int:
        """Number of prompts that have gone into batches."""
        ...

    @num_admitted.setter
    def num_admitted(self, num_prompts: int, /) -> None: ...

    def go_on(self, step: int, version: int, done: PromptsDone) -> None:
        """Go on after a step, with weights of a version."""
        ...

    def examples_of(self, batch: RolloutBatch) -> list[int]:
        """Return the number of the example that each row answers."""
        ...

    async def next_batch(self) -> Sampled:
        """Return the scored rollouts of the next step."""
        ...

    async def validate(self) -> Sampled | None:
        """Return those of the validation prompts; None if there are none."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight."""
        ...

    def hurry(self) -> None:
        """Wait only some seconds for what may take long, as the run is ending."""
        ...


def penalty_of(config: RunConfig) -> OverlongPenalty | None:
    """Return the penalty for overlong responses; None without reward.overlong."""
    if config.reward.overlong is None:
        return None
    max_tokens, buffer = config.overlong
    return OverlongPenalty(max_tokens=max_tokens, buffer=buffer, factor=config.reward.overlong.factor)


def shown_tokens(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int]) -> torch.Tensor:
    """Return by token id whether a text shows it, or a response ends with it: neither special tokens nor unused ids."""
    ids = list(tokenizer.get_vocab().values())
    is_shown = torch.zeros(max((*ids, *stop_tokens)) + 1, dtype=torch.bool)
    is_shown[ids] = True
    is_shown[[token for token in special_ids(tokenizer) if token < len(is_shown)]] = False
    is_shown[list(stop_tokens)] = True
    return is_shown


def measure(batch: RolloutBatch, scored: Scored, *, num_failed: int, is_shown: torch.Tensor) -> Metrics:
    """Return what a person wants to know of a step's rollouts.

    Args:
        batch: all that were sampled.
        scored: those that have a score.
        num_failed: rollouts that are left out, as they failed.
        is_shown: by token id, whether a response shows it or ends with it; ids beyond are shown by nothing. [V].
    """
    scores = scored.batch.scores
    num_rows, num_tokens = len(batch), batch.num_loss_tokens
    sampled = batch.tokens[batch.loss_mask]
    hidden = num_tokens - int(is_shown[sampled[sampled < len(is_shown)]].sum())
    narrowed: dict[str, Mean] = {}
    if batch.sampled_logprobs is not None:
        gain = (batch.sampled_logprobs - batch.rollout_logprobs)[batch.loss_mask]
        narrowed["rollout/narrowing"] = Mean(float(gain.double().sum()), num_tokens)
    unscored = [failure.row for failure in scored.failures]
    counts = batch.num_sequences
    branching = {} if batch.sequence_starts is None else {"rollout/sequences": Mean(float(counts.sum()), len(counts))}
    return Metrics(
        {
            **narrowed,
            **branching,
            "reward/mean": Mean(float(scores.sum()), len(scores)),
            "reward/std": Mean(float(scores.std(correction=0)) * len(scores), len(scores)),
            "rollout/failed": Sum(num_failed),
            "rollout/unscored_tokens": Sum(int(_response_lengths(batch)[unscored].sum())),
            "rollout/num_tokens": Sum(num_tokens),
            "rollout/response_length": Mean(num_tokens, num_rows),
            "rollout/response_length_max": Maximum(float(_response_lengths(batch).max())),
            "rollout/truncated": Mean(float(batch.truncated.sum()), num_rows),
            # Inside a response: the policy pays nothing for what its reward function cannot see.
            "rollout/hidden_tokens": Mean(float(hidden), num_tokens),
        }
    )


def measure_episodes(rollouts: Sequence[Trajectory], failures: Sequence[RolloutFailure]) -> Metrics:
    """Return how long episodes were, what they counted themselves, and how many failed in which way.

    Args:
        rollouts: those that did not fail.
        failures: why the others did.
    """
    counted: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(each.metrics.items() for each in rollouts):
        counted.setdefault(name, []).append(value)
    kinds = Counter(failure.kind for failure in failures)
    found: dict[str, Metric] = {f"episode/{name}": Mean(math.fsum(each), len(each)) for name, each in counted.items()}
    found |= {f"rollout/failed_{kind}": Sum(kinds[kind]) for kind in ROLLOUT_FAILURE_KINDS}
    return Metrics(found | (_measure_turns(rollouts) if rollouts else {}))


def _measure_turns(rollouts: Sequence[Trajectory]) -> dict[str, Metric]:
    lengths = [[len(turn.response) for turn in each.turns] for each in rollouts]
    num_rollouts, num_turns = len(rollouts), [len(each) for each in lengths]
    added = sum(len(turn.prompt) for each in rollouts for turn in each.turns[1:])
    own_s = [each.own_s for each in rollouts]
    calls, errors = sum(each.num_tool_calls for each in rollouts), sum(each.num_tool_errors for each in rollouts)
    found: dict[str, Metric] = {
        "rollout/num_turns": Mean(sum(num_turns), num_rollouts),
        "rollout/num_turns_max": Maximum(max(num_turns)),
        "rollout/turn_length": Mean(sum(map(sum, lengths)), sum(num_turns)),
        "rollout/added_tokens": Mean(added, num_rollouts),
        "rollout/tool_calls": Mean(calls, num_rollouts),
        "rollout/environment_s": Mean(math.fsum(own_s), num_rollouts),
        "rollout/environment_s_max": Maximum(max(own_s)),
    }
    for number in range(min(max(num_turns), _MOST_TURNS)):
        of_turn = [each[number] for each in lengths if len(each) > number]
        found[f"rollout/turn_length/{number + 1}"] = Mean(sum(of_turn), len(of_turn))
    if calls:
        found["rollout/tool_errors"] = Mean(errors, calls)
    return found


def measure_sources(scored: Scored, examples: Sequence[Example]) -> Metrics:
    """Return how many prompts of each `data_source` a step had, and the mean of their scores."""
    rows: dict[str, list[int]] = {}
    for place, row in enumerate(scored.kept_rows):
        rows.setdefault(examples[row].data_source, []).append(place)
    scores, prompts = scored.batch.scores, scored.batch.prompt_index
    means = {f"reward/mean/{name}": Mean(float(scores[at].sum()), len(at)) for name, at in rows.items()}
    counts = {f"rollout/num_prompts/{name}": Sum(len(prompts[at].unique())) for name, at in rows.items()}
    return Metrics({**means, **counts})


def _response_lengths(batch: RolloutBatch) -> torch.Tensor:
    return torch.zeros(len(batch), dtype=torch.int64).index_add_(0, batch.row_of_token, batch.loss_mask.long())
