"""The state of a run as a display knows it: the last reports, their history, the pace.

Owns no terminal. Neither its memory nor the cost of reading it grows with the length of the run.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len

from rallypoint.config.recipes import WATCHED
from rallypoint.display.text import clean
from rallypoint.observability.health import Health, health
from rallypoint.observability.numbers import finite_mean
from rallypoint.observability.spans import shares_of, top_level
from rallypoint.observability.trend import FLAT_STEPS, RewardTrend
from rallypoint.run.reports import REWARD, Completion, RunInfo, StepReport

MAX_POINTS = 512
PACE_STEPS = 50
"""Steps whose mean pace gives the eta, validation and checkpoints between them included."""
SMOOTHING = 0.9
"""Shares of the phases are an exponential mean, so that the bar is calm enough to read."""
HOLD_S = 4.0
"""Seconds that a completion stays on the screen."""
NEW_S = 30.0
"""Seconds for which a note counts as new: time to read some lines."""


class History:
    """A series of any length in at most `MAX_POINTS` points: when full, neighbours become one.

    >>> history = History()
    >>> for value in range(1000):
    ...     history.add(value)
    >>> len(history.points()), history.points()[:3]
    (500, [0.5, 2.5, 4.5])
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._points: list[float] = []
        self._pending: list[float] = []
        self._stride = 1
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Append a value."""
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._points.append(finite_mean(self._pending))
            self._pending = []
        if len(self._points) == MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [finite_mean(pair) for pair in pairs]
            self._stride *= 2

    def points(self) -> list[float]:
        """Return the series, oldest first; the last point may stand for less than the others."""
        return self._points + ([finite_mean(self._pending)] if self._pending else [])


class Board:
    """The state behind a display; `clock` is any clock that only goes forward."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.run: RunInfo | None = None
        self.message = ""
        self._message_began = self._began
        self.report: StepReport | None = None
        self.health: tuple[Health, ...] = ()
        self.course = History()
        """History of what is watched above all, such as the reward."""
        self._trend = RewardTrend()
        self.validations = History()
        self.first_validation: float | None = None
        self.validation: float | None = None
        self.notes: dict[str, int] = {}
        """Each note once -> how often it was given."""
        self.longest_note = 0
        """Cells of the longest note so far, so that the next one need not change the height of a display."""
        self._noted = -math.inf
        self.end_message = ""
        """Why and how the run is about to end, once somebody asked for it."""
        self._ending_began = -math.inf
        self.completion: Completion | None = None
        self.longest_texts = dict.fromkeys(("prompt", "response", "answer"), 0)
        """Cells of the longest of each that was shown."""
        self._completion_began = -math.inf
        self._steps_ended: collections.deque[float] = collections.deque(maxlen=PACE_STEPS + 1)
        self._phases: dict[str, float] = {}
        self._seconds = 0.0
        self._num_tokens = 0.0

    def start(self, run: RunInfo) -> None:
        """Show a run that begins or resumes."""
        self.run = run
        self.course = History(run.course)
        rewards = run.course if run.watched[0][0] == REWARD else ()
        self._trend = RewardTrend(rewards, num_warmup_steps=run.num_warmup_steps)
        self.validations = History(run.validations)
        if run.validations:
            self.first_validation, self.validation = run.validations[0], run.validations[-1]

    def wait(self, message: str) -> None:
        """Show what the run waits for, until the next step."""
        self.message, self._message_began = message, self._clock()

    def step(self, report: StepReport) -> None:
        """Add a step that is done."""
        now = self._clock()
        self.report, self.message = report, ""
        self._trend.add(report.scalars)
        self.health = health({**report.scalars, FLAT_STEPS: self._trend.num_flat_steps})
        self.course.add(report.scalars.get(self.watched[0][0], math.nan))
        self._steps_ended.append(now)
        self._smooth(report)
        if report.completion is not None and now - self._completion_began >= HOLD_S:
            self.completion, self._completion_began = report.completion, now
            shown = (report.completion.prompt, report.completion.response, report.completion.ground_truth)
            for name, text in zip(self.longest_texts, shown, strict=True):
                self.longest_texts[name] = max(self.longest_texts[name], cell_len(clean(text)))

    def validate(self, score: float) -> None:
        """Add a validation."""
        self.validations.add(score)
        self.validation = score
        if self.first_validation is None:
            self.first_validation = score

    def note(self, message: str) -> None:
        """Add a warning."""
        self.notes[message] = self.notes.pop(message, 0) + 1
        more = len(" (and 99 more)") if len(self.notes) > 1 else 0
        self.longest_note = max(self.longest_note, cell_len(clean(message)) + more)
        self._noted = self._clock()

    def end(self, message: str) -> None:
        """Show that the run ends after the current step."""
        self.end_message, self._ending_began = message, self._clock()

    @property
    def watched(self) -> Sequence[tuple[str, str]]:
        """Scalars that a person wants to see of this run, with short names."""
        return WATCHED if self.run is None else self.run.watched

    @property
    def validation_label(self) -> str:
        """What a validation's number is."""
        return "val loss" if self.run is not None and self.run.validated == "loss" else "validation"

    @property
    def elapsed_s(self) -> float:
        """Seconds since this display began."""
        return self._clock() - self._began

    @property
    def waiting_s(self) -> float:
        """Seconds since the present wait began."""
        return self._clock() - self._message_began

    @property
    def ending_s(self) -> float:
        """Seconds since the run was asked to end."""
        return self._clock() - self._ending_began

    @property
    def note_is_new(self) -> bool:
        """Whether the last note came just now."""
        return self._clock() - self._noted < NEW_S

    @property
    def eta_s(self) -> float:
        """Seconds to the end of the run at the present pace; NaN before the first step."""
        if self.run is None or self.report is None:
            return math.nan
        ended = self._steps_ended
        pace = (ended[-1] - ended[0]) / (len(ended) - 1) if len(ended) > 1 else self.report.seconds
        return max(0.0, pace * (self.run.num_steps - self.report.step) - (self._clock() - ended[-1]))

    @property
    def shares(self) -> dict[str, float]:
        """Share of each phase in a step, smoothed."""
        return shares_of(self._phases, self._seconds)

    @property
    def seconds_per_step(self) -> float:
        """Seconds of a step, smoothed."""
        return self._seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens sampled per second of training, smoothed."""
        return self._num_tokens / self._seconds if self._seconds > 0 else math.nan

    def _smooth(self, report: StepReport) -> None:
        keep = SMOOTHING if self._seconds > 0 else 0.0
        phases = top_level(report.spans)
        names = dict.fromkeys((*self._phases, *phases))
        self._phases = {name: keep * self._phases.get(name, 0.0) + (1 - keep) * phases.get(name, 0.0) for name in names}
        self._seconds = keep * self._seconds + (1 - keep) * report.seconds
        self._num_tokens = keep * self._num_tokens + (1 - keep) * report.num_tokens


def tokens_per_s(report: StepReport) -> float:
    """Return the speed of one step."""
    return report.num_tokens / report.seconds if report.seconds > 0 else math.nan
