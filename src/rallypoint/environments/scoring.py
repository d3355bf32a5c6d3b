"""Applying the reward function: groups of rollouts in as they complete, an outcome for each row out.

Owns: when the function is called, and when too much has failed. Must not know: which function it is; what a result
means (`outcome.py`), where it comes from (`grader.py`), or what is made of it (`scored.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from rallypoint.environments.asking import Asking
from rallypoint.environments.conversation import RolloutInWords
from rallypoint.environments.failures import RolloutFailure, check_failures, most_failures
from rallypoint.environments.grader import Grader
from rallypoint.environments.outcome import FAILURE_KINDS, Failure, Outcome, RewardCall
from rallypoint.environments.scored import SampledGroup, ScoredGroup, failures_of

_WARN_AFTER_S = 30.0
"""Seconds that a call may take without a word."""


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
            warn: given a sentence for every half minute that one call takes, from the thread of `run`.
            ended: given each group that is scored, with its index, in the thread of `run`.
        """
        self._grader, self._decode, self._token_texts = grader, decode, token_texts
        self._num_rows, self._max_failed = num_rows, max_failed
        self._failing = {*FAILURE_KINDS} - ({"not_applicable"} if has_models else set())
        self._warn, self._ended = warn, ended
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._groups: dict[int, ScoredGroup] = {}
        self._held: list[tuple[int, dict[int, RewardCall]]] = []
        self._calls: dict[Future[Outcome], tuple[int, int]] = {}
        self._is_complete = False
        self._failed: list[RolloutFailure] = []
        self._num_failures = 0

    def add(self, index: int, group: SampledGroup) -> None:
        """Have a group scored, which has this place among those of the batch; its failures count here, too."""
        self._failed += group.failures
        self._events.put(lambda: self._begin(index, group))

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
                pause_s = self._grader.complain(self._warn, _WARN_AFTER_S)
                with contextlib.suppress(Empty):
                    self._events.get(timeout=pause_s)()
                if self._num_failures + len(self._failed) > most_failures(self._max_failed, self._num_rows):
                    break
        finally:
            self._abandon()
        groups = [self._groups.pop(index) for index in sorted(self._groups)]
        failures = [failure for failure in failures_of(groups) if failure.kind in self._failing]
        check_failures([*self._failed, *failures], self._num_rows, self._max_failed)
        return groups

    def _begin(self, index: int, group: SampledGroup) -> None:
        rows, own = group.rows, group.own or [None] * len(group.rows)
        texts = self._decode(responses) if (responses := rows.responses()) else []
        said = tuple(
            RolloutInWords.of(each, decode=self._decode, written=lambda ids: "".join(self._token_texts(ids)))
            for each in group.rollouts
        )
        self._groups[index] = ScoredGroup(rows, tuple(group.examples), tuple(texts), [*own], said)
        wants = self._grader.wants
        asking = Asking(rows, wants.more, self._decode, self._token_texts, group.rollouts)
        calls = {
            row: asking.call(row, example, response, text)
            for row, (example, response, text) in enumerate(zip(group.examples, responses, texts, strict=True))
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
