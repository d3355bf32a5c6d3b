"""Applying the reward function: groups of rollouts in as they complete, a scored batch and failures out.

Owns: what the scores of reward models add to those of functions, and which rows have them all. Must not know: which
function or model it is; what a result means (`outcome.py`), or where it comes from (`grader.py`). Invariant: a row of
the scored batch was scored by all; what failed is left out and named, and never counted as 0. The rows that are kept
keep their order, in whatever order groups complete.

The score of a reward model is added on the last token; one that is not finite is a failure, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from rallypoint.algorithms import Advantage, has_signal
from rallypoint.data.dataset import Example
from rallypoint.environments.asking import Asking
from rallypoint.environments.conversation import Conversation
from rallypoint.environments.failures import RewardFailure, RolloutFailure, check_failures, most_failures
from rallypoint.environments.grader import Grader
from rallypoint.environments.outcome import (
    FAILURE_KINDS,
    NO_TOKEN,
    Failure,
    Outcome,
    RewardCall,
    Scores,
    too_large,
)
from rallypoint.types.batch import RolloutBatch, ScoredBatch
from rallypoint.types.metrics import Maximum, Mean, Metric, Metrics, Minimum, Sum, merge
from rallypoint.types.trajectory import Trajectory

if TYPE_CHECKING:
    from rallypoint.config import RewardConfig


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


class Scoring:
    """Scores the groups of one batch, each as soon as it is there, in the thread that calls `run`.

    Consumes: groups, from any thread. Produces: an outcome for each of their rows. Waits for: groups, and the calls of
    the reward function. Unblocked by: `add`, `finish`, `stop`, and the ends of calls.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        decode: Callable[[list[list[int]]], Sequence[str]],
        token_texts: Callable[[Sequence[int]], Sequence[str]],
        num_rows: int,
        max_failed: float = 1.0,
        has_models: bool = False,
        warn: Callable[[str], None],
        warn_after_s: float = 30.0,
        ended: Callable[[int, ScoredGroup], None] = lambda *_: None,
    ) -> None:
        """Begin without groups.

        Args:
            grader: asks the function, once a row.
            decode: gives the texts of responses, without special tokens.
            token_texts: gives the text of each token of a response, also of special ones.
            num_rows: rollouts of all groups that will come.
            max_failed: share of them that may fail.
            has_models: whether reward models score them, too, so that a row needs no function that applies.
            warn: given a sentence for every `warn_after_s` that one call takes, from the thread of `run`.
            warn_after_s: how long a call may take without a word.
            ended: given each group that is scored, with its index, in the thread of `run`.
        """
        self._grader, self._decode, self._token_texts = grader, decode, token_texts
        self._num_rows, self._max_failed = num_rows, max_failed
        self._failing = {*FAILURE_KINDS} - ({"not_applicable"} if has_models else set())
        self._warn, self._warn_after_s, self._ended = warn, warn_after_s, ended
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._groups: dict[int, ScoredGroup] = {}
        self._held: list[tuple[int, dict[int, RewardCall]]] = []
        self._calls: dict[Future[Outcome], tuple[int, int]] = {}
        self._is_complete = False
        self._failed: list[RolloutFailure] = []
        self._num_failures = 0

    def add(self, index: int, rows: RolloutBatch, examples: Sequence[Example], own: Sequence[Scores | None] = (),
            failed: Sequence[RolloutFailure] = (), rollouts: Sequence[Trajectory] = ()) -> None:  # fmt: skip
        """Have a group scored.

        Args:
            index: place of the group among those of the batch.
            rows: its rollouts.
            examples: the example of each row.
            own: scores of rows that need no function, None of others; empty if all need it.
            failed: rollouts of the group that are no rows; they count as failures.
            rollouts: the rows turn by turn, for a function that asks for turns; empty: each is a single turn.
        """
        if len(rows) != len(examples):
            raise ValueError(f"{len(rows)} rollouts and {len(examples)} examples: one each is needed")
        self._failed += failed
        self._events.put(lambda: self._begin(index, rows, examples, own or [None] * len(rows), rollouts))

    def finish(self) -> None:
        """Let `run` return when all groups that were added are scored."""
        self._events.put(self._complete)

    def stop(self) -> None:
        """Let `run` return now; calls that have begun end by themselves, or with the grader."""
        self._events.put(self._abandon)

    def run(self) -> list[ScoredGroup]:
        """Return what became of every row, by group in the order of their indices.

        Raises:
            TooManyFailuresError: more rollouts failed than may; the rest was not scored.
            RewardError: the user's file could not be imported.
        """
        self._grader.load()
        try:
            while self._calls or not self._is_complete:
                pause_s = self._grader.complain(self._warn, self._warn_after_s)
                with contextlib.suppress(Empty):
                    self._events.get(timeout=pause_s)()
                if self._num_failures + len(self._failed) > most_failures(self._max_failed, self._num_rows):
                    break
        finally:
            self._abandon()
        groups = [self._groups[index] for index in sorted(self._groups)]
        failures = [failure for failure in _failures_of(groups) if failure.kind in self._failing]
        check_failures([*self._failed, *failures], self._num_rows, self._max_failed)
        return groups

    def _begin(
        self,
        index: int,
        rows: RolloutBatch,
        examples: Sequence[Example],
        own: Sequence[Scores | None],
        rollouts: Sequence[Trajectory],
    ) -> None:
        texts = self._decode(responses) if (responses := rows.responses()) else []
        said = tuple(
            Conversation.of(each, decode=self._decode, written=lambda ids: "".join(self._token_texts(ids)))
            for each in rollouts
        )
        self._groups[index] = ScoredGroup(rows, tuple(examples), tuple(texts), [*own], said)
        wants = self._grader.wants
        asking = Asking(rows, wants.more, self._decode, self._token_texts, rollouts)
        calls = {
            row: asking.call(row, example, response, text)
            for row, (example, response, text) in enumerate(zip(examples, responses, texts, strict=True))
            if own[row] is None
        }
        self._held.append((index, calls))
        if wants.scope != "batch":
            self._ask()

    def _ask(self) -> None:
        """Submit the calls that are held."""
        held, self._held = self._held, []
        rows = [(index, row) for index, calls in held for row in calls]
        asked = self._grader.submit([call for _, calls in held for call in calls.values()]) if rows else []
        for (index, row), call in zip(rows, asked, strict=True):
            if call.done():
                self._take(self._groups[index], row, call.result())
                continue
            self._calls[call] = (index, row)
            call.add_done_callback(lambda done: self._events.put(lambda: self._end(done)))
        for index, _ in held:
            self._tell(index)

    def _end(self, call: Future[Outcome]) -> None:
        index, row = self._calls.pop(call)
        if not call.cancelled():
            self._take(self._groups[index], row, call.result())
            self._tell(index)

    def _tell(self, index: int) -> None:
        """Say that a group is scored, if it is."""
        if None not in self._groups[index].outcomes:
            self._ended(index, self._groups[index])

    def _take(self, group: ScoredGroup, row: int, outcome: Outcome) -> None:
        group.outcomes[row] = outcome
        self._num_failures += isinstance(outcome, Failure) and outcome.kind in self._failing

    def _complete(self) -> None:
        self._is_complete = True
        self._ask()

    def _abandon(self) -> None:
        self._is_complete = True
        for call in list(self._calls):  # a call that is cancelled puts its end into the queue
            call.cancel()
        self._calls.clear()


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
    conversations: tuple[Conversation | None, ...] = ()
    """What was said in each row; None, or nothing at all, where that is one response to its prompt."""

    def has_signal(self, advantage: Advantage) -> bool:
        """Whether an estimator finds a difference between rollouts; see `Advantage.signal`."""
        return bool(has_signal(combine([self]).batch, advantage).any())

    def with_model(self, scores: Sequence[float], model: ModelScores) -> ScoredGroup:
        """Return the group with its rows' scores of a reward model added."""
        found = zip(self.outcomes, self.rows.responses(), scores, strict=True)
        outcomes = [_add_model_score(outcome, len(response), score, model) for outcome, response, score in found]
        return dataclasses.replace(self, outcomes=outcomes)


def combine(groups: Sequence[ScoredGroup], *, models: Sequence[ModelScores] = ()) -> Scored:
    """Return the rows of all groups that the reward functions, and the reward models, have scored.

    Args:
        groups: of a batch, in its order.
        models: what reward models say of all rows.
    """
    for model in models:
        parts = model.scores.split([len(group.rows) for group in groups])
        groups = [group.with_model(scores.tolist(), model) for group, scores in zip(groups, parts, strict=True)]
    batch = RolloutBatch.join([group.rows for group in groups])
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    results = {row: outcome for row, outcome in enumerate(outcomes) if isinstance(outcome, Scores)}
    failures = _failures_of(groups)
    kept = batch.rows(list(results))
    token_rewards = torch.zeros(kept.num_tokens, dtype=torch.float32)
    token_rewards[kept.loss_mask] = _join_scores(list(results.values()))
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


def _failures_of(groups: Sequence[ScoredGroup]) -> list[RewardFailure]:
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


def _join_scores(results: list[Scores]) -> Tensor:
    return torch.tensor([score for result in results for score in result.token_scores], dtype=torch.float32)


def _average_extras(results: list[Scores]) -> Metrics:
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.extras.items():
            values.setdefault(name, []).append(value)
    return Metrics({f"reward/{name}": Mean(math.fsum(entries), len(entries)) for name, entries in values.items()})
