"""Applying the reward function: sampled rollouts in, scored rollouts and failures out.

Owns: what a reward model's score adds to that of the function, and which rows have both. Must not know: which function
or model it is; what a result means (`outcome.py`), or where it comes from (`pool.py`). Invariant: a row of the scored
batch was scored by both; what failed is left out and named, and never counted as 0. The rows that are kept keep their
order.

A reward model's score is added on the last token; one that is not finite is a failure, too.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rallypoint.data.dataset import Example
from rallypoint.environments.outcome import (
    FAILURE_KINDS,
    NO_TOKEN,
    Failure,
    FailureKind,
    Outcome,
    RewardCall,
    Scores,
    too_large,
)
from rallypoint.environments.pool import Grader
from rallypoint.errors import RewardError
from rallypoint.types.batch import RolloutBatch, ScoredBatch
from rallypoint.types.metrics import Maximum, Mean, Metrics, Minimum, Sum, merge


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
    """A rollout that has no score, and why."""

    name: str
    """Of the example: `train.parquet:17`."""
    row: int
    """Of the batch that was to be scored."""
    sample_index: int
    """Which of the G rollouts of the prompt."""
    kind: FailureKind
    reason: str
    """One line."""
    traceback: str
    """The reward function's own frames; empty when it returned something that is no score."""

    def __str__(self) -> str:
        return f"{self.name}, sample {self.sample_index}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelScores:
    """What a reward model says of a batch."""

    scores: Tensor
    """[B] floats; not finite where it failed."""

    def metrics(self) -> Metrics:
        """Return mean, smallest and largest of the finite scores; nothing without one."""
        found = self.scores[self.scores.isfinite()].double()
        if not len(found):
            return Metrics()
        return Metrics(
            {
                "reward/model_mean": Mean(float(found.sum()), len(found)),
                "reward/model_min": Minimum(float(found.min())),
                "reward/model_max": Maximum(float(found.max())),
            }
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """What became of a batch of rollouts."""

    batch: ScoredBatch
    """The rows that have a score, in their old order; may be empty."""
    kept_rows: tuple[int, ...]
    """Where those rows stood in the batch that was scored."""
    failures: tuple[RewardFailure, ...]
    metrics: Metrics
    """`reward/...`: how many rows have a score, and how many failed in which way; the other finite numbers that the
    function returned, averaged over the rows kept; and what the reward model said, if there is one."""
    seconds: float


class TooManyFailuresError(RewardError):
    """More rollouts have no score than `reward.max_failed` allows."""


def score_rollouts(
    batch: RolloutBatch,
    examples: Sequence[Example],
    texts: Sequence[str],
    grader: Grader,
    *,
    token_texts: Callable[[Sequence[int]], Sequence[str]],
    max_failed: float = 1.0,
    model: ModelScores | None = None,
    warn: Callable[[str], None],
    warn_after_s: float = 30.0,
) -> Scored:
    """Score every row with the reward function; a row that it, or the reward model, fails on is left out and named.

    Blocks until then.

    Args:
        batch: the rollouts.
        examples: the example of each row.
        texts: the response of each row, without special tokens.
        grader: asks the function, once a row.
        token_texts: gives the text of each token of a response, also of special ones.
        max_failed: share of the rows that may fail.
        model: what a reward model says of the rows; None without one.
        warn: given a sentence for every `warn_after_s` that one call takes, from this thread.
        warn_after_s: how long a call may take without a word.

    Raises:
        TooManyFailuresError: more rows failed; the rest was not scored.
        RewardError: the user's file could not be imported.
    """
    if not len(batch) == len(examples) == len(texts):
        raise ValueError(f"{len(batch)} rollouts, {len(examples)} examples and {len(texts)} texts: one each is needed")
    started = time.monotonic()
    grader.load()
    calls = [
        _call(batch, row, example, text, token_texts if "tokens" in grader.wanted else None)
        for row, (example, text) in enumerate(zip(examples, texts, strict=True))
    ]
    max_failures = math.floor(max_failed * len(batch) + 1e-9)
    outcomes = grader.grade(calls, max_failures=max_failures, warn=warn, warn_after_s=warn_after_s)
    if model is not None:
        outcomes = [
            _add_model_score(outcome, score) if isinstance(outcome, Scores) else outcome
            for outcome, score in zip(outcomes, model.scores.tolist(), strict=True)
        ]
    results = {row: outcome for row, outcome in enumerate(outcomes) if isinstance(outcome, Scores)}
    failures = _name_failures(batch, examples, outcomes)
    if len(failures) > max_failures:
        raise TooManyFailuresError(_advise(failures, len(batch), max_failed))
    kept = batch.rows(list(results))
    token_rewards = torch.zeros(kept.num_tokens, dtype=torch.float32)
    token_rewards[kept.loss_mask] = _join_scores(list(results.values()))
    return Scored(
        batch=kept.scored(token_rewards),
        kept_rows=tuple(results),
        failures=tuple(failures),
        metrics=_measure(list(results.values()), failures, model),
        seconds=time.monotonic() - started,
    )


def count_failures(failures: Sequence[RewardFailure]) -> str:
    """Say how many rollouts have no score, and why, in a few words."""
    kinds = Counter(failure.kind for failure in failures)
    noun = "rollout has" if len(failures) == 1 else "rollouts have"
    return f"{len(failures)} {noun} no score ({', '.join(f'{kinds[kind]} {kind}' for kind in kinds)})"


def describe_failures(failures: Sequence[RewardFailure], limit: int = 3) -> str:
    """Say in a few lines which rollouts have no score and why, with the first traceback."""
    lines = [f"{count_failures(failures)}, the first is {failures[0]}"]
    lines += [f"  - {failure}" for failure in failures[1:limit]]
    if len(failures) > limit:
        lines.append(f"  - and {len(failures) - limit} more")
    first = next((failure for failure in failures if failure.traceback), None)
    if first is not None:
        lines += [f"the reward function's traceback for {first.name}:", first.traceback]
    return "\n".join(lines)


def _name_failures(
    batch: RolloutBatch, examples: Sequence[Example], outcomes: Sequence[Outcome | None]
) -> list[RewardFailure]:
    return [
        RewardFailure(example.name, row, int(batch.sample_index[row]), outcome.kind, outcome.reason, outcome.traceback)
        for row, (example, outcome) in enumerate(zip(examples, outcomes, strict=True))
        if isinstance(outcome, Failure)
    ]


def _advise(failures: Sequence[RewardFailure], num_rows: int, max_failed: float) -> str:
    """Say why a step that has so few scores is not trained on, and what to do."""
    return (
        f"of {num_rows} rollouts more than reward.max_failed={max_failed:g} have no score, so the rest says little of "
        "the policy. Mend what is said below. A response that the function cannot read is usually a wrong one: "
        "return 0 for it instead of raising. If so many failures are right, raise reward.max_failed.\n"
        f"{describe_failures(failures)}"
    )


def _call(
    batch: RolloutBatch,
    row: int,
    example: Example,
    text: str,
    token_texts: Callable[[Sequence[int]], Sequence[str]] | None,
) -> RewardCall:
    token_ids = tuple(batch.response(row).tolist())
    return RewardCall(
        name=f"{example.name}, sample {int(batch.sample_index[row])}",
        data_source=example.data_source,
        solution_str=text,
        ground_truth=example.ground_truth,
        extra_info=example.extra_info,
        token_ids=token_ids,
        tokens=tuple(token_texts(token_ids)) if token_texts is not None else None,
        ended=not bool(batch.truncated[row]),
    )


def _add_model_score(result: Scores, score: float) -> Outcome:
    """Return the result with a reward model's score on the last token, or why it has none."""
    if not math.isfinite(score):
        return Failure("nonfinite", f"the reward model's score is {score}, expected a finite number")
    if not result.token_scores:
        return Failure("malformed", NO_TOKEN)
    *before, last = result.token_scores
    scores = (*before, last + score)
    if problem := too_large(scores):
        return Failure("malformed", f"the score with that of the reward model {problem}")
    return dataclasses.replace(result, token_scores=scores)


def _measure(results: list[Scores], failures: Sequence[RewardFailure], model: ModelScores | None) -> Metrics:
    kinds = Counter(failure.kind for failure in failures)
    counts = {"num_scored": len(results), "failed": len(failures)}
    counts |= {f"failed_{kind}": kinds[kind] for kind in FAILURE_KINDS}
    counted = Metrics({f"reward/{name}": Sum(count) for name, count in counts.items()})
    return merge(counted, _average_extras(results), model.metrics() if model is not None else {})


def _join_scores(results: list[Scores]) -> Tensor:
    return torch.tensor([score for result in results for score in result.token_scores], dtype=torch.float32)


def _average_extras(results: list[Scores]) -> Metrics:
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.extras.items():
            values.setdefault(name, []).append(value)
    return Metrics({f"reward/{name}": Mean(math.fsum(entries), len(entries)) for name, entries in values.items()})
