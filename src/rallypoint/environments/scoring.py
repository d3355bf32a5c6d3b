"""Applying the reward function: sampled rollouts in, scored rollouts and failures out.

Owns: what a result of a reward function means, what a reward model's score adds to it, and which rows have both. Must
not know: which function or model it is. Invariant: a row of the scored batch was scored by both; what failed is left
out and named, and never counted as 0. The rows that are kept keep their order.

What a result means, for a response of the three tokens 7 8 <eos>:

    0.5                        0     0     0.5      a number: on the last token
    {"score": 0.5, "len": 2}   0     0     0.5      and the metric `reward/len`
    [0.1, 0.2, 0.3]            0.1   0.2   0.3      a score a token
    [0.1, 0.2]                 0.1   0.2   0        `<eos>` may be left out where the row ended by itself
    None, "0.5", nan, [0.1]    a failure

A reward model's score is added on the last token; one that is not finite is a failure, too.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from rallypoint.data.dataset import Example
from rallypoint.environments.reward import RewardFunction, format_user_traceback
from rallypoint.types.batch import RolloutBatch, ScoredBatch
from rallypoint.types.metrics import Maximum, Mean, Metrics, Minimum, merge

_LARGEST_SCORE = float(np.finfo(np.float32).max)
_TAKEN = frozenset({"mean", "std", "failed", "memory_gib", "model_mean", "model_min", "model_max"})
"""Metrics of every run under `reward/`, or of a run with a reward model."""
_NO_TOKEN = "the response has no token that a score could be placed on"


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
    """A rollout that has no score, and why."""

    name: str
    """Of the example: `train.parquet:17`."""
    row: int
    """Of the batch that was to be scored."""
    sample_index: int
    """Which of the G rollouts of the prompt."""
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
    """`reward/...`: the other finite numbers that the reward function returned, averaged over the rows kept; and what
    the reward model said, if there is one."""
    seconds: float


class _NotAScoreError(ValueError):
    """The function returned something that is no score."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """What the function said of one row."""

    token_scores: list[float]
    extras: dict[str, float]


def score_rollouts(
    batch: RolloutBatch,
    examples: Sequence[Example],
    texts: Sequence[str],
    reward: RewardFunction,
    *,
    model: ModelScores | None = None,
    warn: Callable[[str], None],
    warn_after_s: float = 30.0,
) -> Scored:
    """Score every row with the reward function; a row that it, or the reward model, fails on is left out and named.

    Args:
        batch: the rollouts.
        examples: the example of each row.
        texts: the response of each row, without the end-of-sequence token.
        reward: called once a row, in their order, with copies of ground truth and extra info.
        model: what a reward model says of the rows; None without one.
        warn: given a sentence for every `warn_after_s` that one call takes, from a thread of its own.
        warn_after_s: how long a call may take without a word.
    """
    if not len(batch) == len(examples) == len(texts):
        raise ValueError(f"{len(batch)} rollouts, {len(examples)} examples and {len(texts)} texts: one each is needed")
    started = time.monotonic()
    results: dict[int, _Result] = {}
    failures: list[RewardFailure] = []
    num_response_tokens = torch.zeros(len(batch), dtype=torch.int64)
    num_response_tokens.index_add_(0, batch.row_of_token, batch.loss_mask.to(torch.int64))
    with _Watchdog(warn, warn_after_s) as watchdog:
        for row, (example, text) in enumerate(zip(examples, texts, strict=True)):
            sample_index = int(batch.sample_index[row])
            watchdog.watch(f"{example.name}, sample {sample_index}")
            result = _score_row(example, text, reward, int(num_response_tokens[row]), not bool(batch.truncated[row]))
            if model is not None and isinstance(result, _Result):
                result = _add_model_score(result, float(model.scores[row]))
            if isinstance(result, _Result):
                results[row] = result
            else:
                reason, frames = result
                failures.append(RewardFailure(example.name, row, sample_index, reason, frames))
    kept = batch.rows(list(results))
    token_rewards = torch.zeros(kept.num_tokens, dtype=torch.float32)
    token_rewards[kept.loss_mask] = _join_scores(list(results.values()))
    return Scored(
        batch=kept.scored(token_rewards),
        kept_rows=tuple(results),
        failures=tuple(failures),
        metrics=merge(_average_extras(list(results.values())), {} if model is None else model.metrics()),
        seconds=time.monotonic() - started,
    )


def describe_failures(failures: Sequence[RewardFailure], limit: int = 3) -> str:
    """Say in a few lines which rollouts have no score and why, with one traceback."""
    noun = "rollout has" if len(failures) == 1 else "rollouts have"
    lines = [f"{len(failures)} {noun} no score:", *(f"  - {failure}" for failure in failures[:limit])]
    if len(failures) > limit:
        lines.append(f"  - and {len(failures) - limit} more")
    first = next((failure for failure in failures if failure.traceback), None)
    if first is not None:
        lines += [f"the reward function's traceback for {first.name}:", first.traceback]
    return "\n".join(lines)


def _score_row(
    example: Example, text: str, reward: RewardFunction, num_tokens: int, ended: bool
) -> _Result | tuple[str, str]:
    """Return the result for one row, or the reason and traceback of its failure."""
    ground_truth, extra_info = copy.deepcopy((example.ground_truth, example.extra_info))
    try:
        value = reward(
            data_source=example.data_source, solution_str=text, ground_truth=ground_truth, extra_info=extra_info
        )
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything: a counted value
        shown = format_user_traceback(error, skip=lambda file: file == __file__)
        return f"the reward function raised {_first_line(error)}", shown
    try:
        return _read_result(value, num_tokens, ended)
    except _NotAScoreError as error:
        return str(error), ""


def _add_model_score(result: _Result, score: float) -> _Result | tuple[str, str]:
    """Return the result with a reward model's score on the last token, or the reason why it has none."""
    if not math.isfinite(score):
        return f"the reward model's score is {score}, expected a finite number", ""
    if not result.token_scores:
        return _NO_TOKEN, ""
    try:
        last = _read_score(result.token_scores[-1] + score, "the score with that of the reward model")
    except _NotAScoreError as error:
        return str(error), ""
    return dataclasses.replace(result, token_scores=[*result.token_scores[:-1], last])


def _first_line(error: BaseException) -> str:
    """Return type and message; the message may itself be code of the user's, so traceback is asked for it."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((line for line in lines if not line.startswith(" ")), lines[0])


def _read_result(value: object, num_tokens: int, ended: bool) -> _Result:
    extras: dict[str, float] = {}
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        if "score" not in entries:
            raise _NotAScoreError(f"expected the key 'score', found {', '.join(map(repr, entries)) or 'no key'}")
        value = entries["score"]
        if taken := sorted(_TAKEN.intersection(map(str, entries))):
            raise _NotAScoreError(
                f"found the key {taken[0]!r}, but reward/{taken[0]} is a metric of every run; call it something else"
            )
        numbers = {str(key): _number(entry) for key, entry in entries.items() if key != "score"}
        extras = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
    value = _unwrap(value)
    if not isinstance(value, list | tuple):
        score = _read_score(value, "the score")
        if num_tokens == 0:
            raise _NotAScoreError(_NO_TOKEN)
        return _Result([0.0] * (num_tokens - 1) + [score], extras)
    entries = cast("Sequence[object]", value)
    scores = [_read_score(entry, f"score {index} of the list") for index, entry in enumerate(entries)]
    if ended and len(scores) == num_tokens - 1:
        scores.append(0.0)
    if len(scores) != num_tokens:
        without_eos = f" (or {num_tokens - 1} without the end-of-sequence token)" if ended and num_tokens else ""
        raise _NotAScoreError(f"expected one score for each of {num_tokens} tokens{without_eos}, found {len(scores)}")
    return _Result(scores, extras)


def _unwrap(value: object) -> object:
    """Return numpy's and torch's numbers and vectors as Python's own."""
    return cast("Any", value).tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else value


def _number(value: object) -> float | None:
    """Return a number of any kind as a float; None for what is no number."""
    value = _unwrap(value)
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_score(value: object, what: str) -> float:
    number = _number(value)
    if number is None:
        shown = repr(value)[:60] if isinstance(value, str | None) else type(value).__name__
        raise _NotAScoreError(f"{what} is {shown}, expected a number")
    # `not <=` and not `>`: NaN compares false with everything.
    if not abs(number) <= _LARGEST_SCORE:
        raise _NotAScoreError(f"{what} is {number}, expected a finite number")
    return number


def _join_scores(results: list[_Result]) -> Tensor:
    return torch.tensor([score for result in results for score in result.token_scores], dtype=torch.float32)


def _average_extras(results: list[_Result]) -> Metrics:
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.extras.items():
            values.setdefault(name, []).append(value)
    return Metrics({f"reward/{name}": Mean(math.fsum(entries), len(entries)) for name, entries in values.items()})


class _Watchdog:
    """A voice for a call that does not come back.

    Consumes: what is being scored since when. Produces: warnings. Waits for: the next moment at which a
    warning can be due. Unblocked by: that moment, or the end of scoring.

    It looks at most once every `warn_after_s`, so that short calls pass without a thread ever waking.
    """

    def __init__(self, warn: Callable[[str], None], warn_after_s: float) -> None:
        if warn_after_s <= 0:
            raise ValueError(f"warn_after_s: expected more than 0, found {warn_after_s}")
        self._warn = warn
        self._warn_after_s = warn_after_s
        self._current = ("", time.monotonic())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reward-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def watch(self, name: str) -> None:
        """Say what is being scored from now on."""
        self._current = (name, time.monotonic())

    def _run(self) -> None:
        pause = self._warn_after_s
        warned, num_warnings = self._current, 0
        while not self._stop.wait(pause):
            current = self._current
            if current is not warned:
                warned, num_warnings = current, 0
            name, since = current
            waited = time.monotonic() - since
            if waited >= (num_warnings + 1) * self._warn_after_s:
                num_warnings = int(waited / self._warn_after_s)
                self._warn(f"the reward function has been busy with {name} for {waited:.0f} s")
            pause = since + (num_warnings + 1) * self._warn_after_s - time.monotonic()
