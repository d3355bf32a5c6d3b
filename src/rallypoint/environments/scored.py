"""Rollouts of a group before and after scoring, and the scored batch that groups make.

Owns: what the scores of reward models add to those of functions, and which rows have them all. Must not know: which
function or model it is; what a result means (`outcome.py`). Invariant: a row of the scored batch was scored by all;
what failed is left out and named, and never counted as 0. The rows that are kept keep their order.

The score of a reward model is added on the last token; one that is not finite is a failure, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from rallypoint.algorithms import Advantage, has_signal
from rallypoint.data.dataset import Example
from rallypoint.environments.conversation import RolloutInWords
from rallypoint.environments.failures import RewardFailure, RolloutFailure
from rallypoint.environments.outcome import FAILURE_KINDS, NO_TOKEN, Failure, Outcome, Scores, too_large
from rallypoint.types.batch import RolloutBatch, ScoredBatch
from rallypoint.types.metrics import Maximum, Mean, Metric, Metrics, Minimum, Sum, merge
from rallypoint.types.trajectory import Trajectory

if TYPE_CHECKING:
    from rallypoint.config import RewardConfig


@dataclasses.dataclass(frozen=True, slots=True)
class SampledGroup:
    """The rollouts of a prompt, or of several, to be scored."""

    rows: RolloutBatch
    examples: Sequence[Example]
    """Example of each row."""
    own: Sequence[Scores | None] = ()
    """Scores of rows that need no function, None of others; empty if all need it."""
    failures: Sequence[RolloutFailure] = ()
    """Why rollouts are missing."""
    rollouts: Sequence[Trajectory] = ()
    """The rows turn by turn; empty if each is a single turn."""

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.examples):
            raise ValueError(f"{len(self.rows)} rollouts and {len(self.examples)} examples: one each is needed")

    @property
    def oldest_version(self) -> int | None:
        """Version of its oldest token; None without a rollout."""
        return int(self.rows.versions.min()) if len(self.rows) else None


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredGroup:
    """What the reward function says of some rollouts."""

    rows: RolloutBatch
    examples: tuple[Example, ...]
    """Example of each row."""
    texts: tuple[str, ...]
    """Response of each row, without special tokens."""
    outcomes: list[Outcome | None]
    """What became of each row; None where the function was not asked any more."""
    conversations: tuple[RolloutInWords | None, ...] = ()
    """What was said in each row; None, or nothing at all, where that is one response to its prompt."""

    def has_signal(self, advantage: Advantage) -> bool:
        """Whether an estimator finds a difference between rollouts; see `Advantage.signal`."""
        return bool(has_signal(combine([self]).batch, advantage).any())

    def with_model(self, scores: Sequence[float], model: ModelScores) -> ScoredGroup:
        """Return the group with its rows' scores of a reward model added."""
        found = zip(self.outcomes, self.rows.responses(), scores, strict=True)
        outcomes = [_add_model_score(outcome, len(response), score, model) for outcome, response, score in found]
        return dataclasses.replace(self, outcomes=outcomes)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelScores:
    """What a reward model says of a batch."""

    scores: Tensor
    """[B] floats; not finite where it failed."""
    name: str = "model"
    weight: float = 1.0
    """Its weight in the sum."""
    functions: tuple[str, ...] = ("function",)
    """Names of the functions beside it."""

    @classmethod
    def of(cls, scores: Sequence[Tensor], settings: RewardConfig) -> list[Self]:
        """Return the scores of each model of a run with what its config says of them."""
        functions = tuple(one.name for one in settings.all_functions)
        return [
            cls(each, model.name, model.weight, functions)
            for model, each in zip(settings.all_models, scores, strict=True)
        ]

    @property
    def title(self) -> str:
        """What failures call it."""
        return "the reward model" if self.name == "model" else f"the reward model {self.name}"

    def metrics(self) -> Metrics:
        """Return mean, deviation, smallest and largest of the finite scores; nothing without one."""
        name = f"reward/{self.name}{'_' if self.name == 'model' else '/'}"
        found = self.scores[self.scores.isfinite()].double()
        if not len(found):
            return Metrics()
        return Metrics(
            {
                f"{name}mean": Mean(float(found.sum()), len(found)),
                f"{name}std": Mean(float(found.std(correction=0)) * len(found), len(found)),
                f"{name}min": Minimum(float(found.min())),
                f"{name}max": Maximum(float(found.max())),
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
    extras: tuple[dict[str, float], ...]
    """Other finite numbers that the function returned for each of those rows."""
    answers: tuple[str | None, ...]
    """The answer that it read in each, if it said so."""
    metrics: Metrics
    """`reward/...`: how many rows have a score, and how many failed in which way; the other finite numbers that the
    function returned, averaged over the rows kept; and what the reward model said, if there is one."""
    feedback: tuple[str, ...] = ()
    """What the function says of each of these rows in words; empty text if nothing."""


def combine(
    groups: Sequence[ScoredGroup], *, rows: RolloutBatch | None = None, models: Sequence[ModelScores] = ()
) -> Scored:
    """Return the rows of all groups that the reward functions, and the reward models, have scored.

    Args:
        groups: of a batch, in its order.
        rows: theirs, where they were put together before.
        models: what reward models say of all rows.
    """
    for model in models:
        parts = model.scores.split([len(group.rows) for group in groups])
        groups = [group.with_model(scores.tolist(), model) for group, scores in zip(groups, parts, strict=True)]
    batch = RolloutBatch.join([group.rows for group in groups]) if rows is None else rows
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    results = {row: outcome for row, outcome in enumerate(outcomes) if isinstance(outcome, Scores)}
    failures = failures_of(groups)
    kept = batch if len(results) == len(batch) else batch.rows(list(results))
    token_rewards = torch.zeros(kept.num_tokens, dtype=torch.float32)
    token_scores = [score for result in results.values() for score in result.token_scores]
    token_rewards[kept.loss_mask] = torch.tensor(token_scores, dtype=torch.float32)
    names = tuple(next((each.parts for each in results.values()), {}))
    parts = torch.tensor([[each.parts[name] for name in names] for each in results.values()], dtype=torch.float64)
    scored = kept.scored(token_rewards, parts, names) if names else kept.scored(token_rewards)
    exact = torch.tensor([math.fsum(each.token_scores) for each in results.values()], dtype=torch.float64)
    return Scored(
        batch=dataclasses.replace(scored, rounding=exact - scored.scores),
        kept_rows=tuple(results),
        failures=tuple(failures),
        extras=tuple(each.extras for each in results.values()),
        answers=tuple(each.answer for each in results.values()),
        metrics=_measure(list(results.values()), failures, models),
        feedback=tuple(each.feedback for each in results.values()),
    )


def failures_of(groups: Sequence[ScoredGroup]) -> list[RewardFailure]:
    """Return why rows have no score."""
    rows = [
        (int(sample), example, outcome)
        for group in groups
        for sample, example, outcome in zip(group.rows.sample_index, group.examples, group.outcomes, strict=True)
    ]
    return [
        RewardFailure(example.name, row, sample, outcome.kind, outcome.reason, outcome.traceback)
        for row, (sample, example, outcome) in enumerate(rows)
        if isinstance(outcome, Failure)
    ]


def _add_model_score(outcome: Outcome | None, num_tokens: int, score: float, model: ModelScores) -> Outcome | None:
    """Return an outcome with a reward model's score on the last token, or why it has none."""
    if not isinstance(outcome, Scores) and (outcome is None or outcome.kind != "not_applicable"):
        return outcome
    if not math.isfinite(score):
        return Failure("nonfinite", f"{model.title} gives {score}, expected a finite number")
    nothing = Scores((0.0,) * num_tokens, {}, dict.fromkeys(model.functions, math.nan))
    result = outcome if isinstance(outcome, Scores) else nothing
    if not result.token_scores:
        return Failure("malformed", NO_TOKEN)
    *before, last = result.token_scores
    scores = (*before, last + model.weight * score)
    if problem := too_large(scores):
        return Failure("malformed", f"the score with that of {model.title} {problem}")
    others = result.parts or dict.fromkeys(model.functions, math.fsum(result.token_scores))
    return dataclasses.replace(result, token_scores=scores, parts=others | {model.name: score})


def _measure(results: list[Scores], failures: Sequence[RewardFailure], models: Sequence[ModelScores]) -> Metrics:
    kinds = Counter(failure.kind for failure in failures)
    counts = {"num_scored": len(results), "failed": len(failures)}
    counts |= {f"failed_{kind}": kinds[kind] for kind in FAILURE_KINDS}
    counted = Metrics({f"reward/{name}": Sum(count) for name, count in counts.items()})
    of_functions = _parts(results, {model.name for model in models})
    return merge(counted, _average_extras(results), of_functions, *(model.metrics() for model in models))


def _parts(results: list[Scores], models: Set[str]) -> Metrics:
    """Return mean and deviation of each of several functions, and their number, over the rows that it applies to."""
    names = [name for name in next((each.parts for each in results), {}) if name not in models]
    found: dict[str, Metric] = {}
    for name in names:
        said = torch.tensor([each.parts[name] for each in results], dtype=torch.float64)
        scores = said[~said.isnan()]
        found[f"reward/{name}/num_scored"] = Sum(len(scores))
        if len(scores):
            found[f"reward/{name}/mean"] = Mean(float(scores.sum()), len(scores))
            found[f"reward/{name}/std"] = Mean(float(scores.std(correction=0)) * len(scores), len(scores))
    return Metrics(found)


def _average_extras(results: list[Scores]) -> Metrics:
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.extras.items():
            values.setdefault(name, []).append(value)
    return Metrics({f"reward/{name}": Mean(math.fsum(entries), len(entries)) for name, entries in values.items()})
