"""The picture of a run: reward and validation score over the steps, and what went with them.

Read from the folder of the run alone, so that it can be drawn again at any time: numbers from metrics.jsonl, resumes
from the journal. matplotlib is an extra and is imported only here, inside functions, without its global state.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint import checkpoint
from rallypoint.config import shown
from rallypoint.disk import naming
from rallypoint.display.text import clock_time, limits, resample, shorten
from rallypoint.display.theme import phase_colours
from rallypoint.journal import STEP, TIME, Change, RunBegan, config_changes
from rallypoint.observability.numbers import counted, finite_mean
from rallypoint.observability.spans import START, TIME_PREFIX, spans_of, top_level
from rallypoint.run.folder import RunFolder
from rallypoint.run.reports import REWARD, VALIDATION
from rallypoint.run.resume import is_free

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REWARD_LIGHT, REWARD_LINE, SCORE, THIRD = "#8ecae6", "#0072b2", "#d55e00", "#009e73"
INK, QUIET, FAINT = "#333333", "#666666", "#b8b8b8"
MAX_POINTS = 400
"""More than this many steps are drawn as means of neighbours."""
MAX_PHASES, MAX_RESUMES = 8, 4
"""Most phases that get a name, and most resumes that get a line of words."""
_WIDTH, _HEIGHT, _LINE = 9.0, 5.6, 0.19
"""Inches of the picture, and of a line of words below it."""

Record = Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class _Course:
    """What a run is about."""

    name: str
    label: str
    validated: str
    """The same of a validation."""

    @property
    def lower_is_better(self) -> bool:
        return self.label == "loss"


_COURSES = (
    _Course(REWARD, "reward", VALIDATION),
    _Course("actor/accuracy", "accuracy", VALIDATION),
    _Course("actor/loss", "loss", "validation/loss"),
)
"""The first of these that was measured is drawn."""


def save_curve(folder: RunFolder) -> Path | None:
    """Draw the learning curve of a run into its folder and return its path; None where matplotlib is missing.

    `reports.why_no_plot` has the remedy. A run without steps gives an empty picture that says so.

    Raises:
        DiskError: the disk is full or not writable.
        RunFolderError: the journal is damaged.
    """
    try:
        from matplotlib import font_manager
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return None
    figure = draw_curve(folder)
    FigureCanvasAgg(figure)
    part = folder.curve.with_name(folder.curve.name + ".part")
    try:
        with naming(folder.curve):
            figure.savefig(part, format="png")
            part.replace(folder.curve)
    finally:
        # matplotlib keeps the files of its fonts open, for each thread that ever drew.
        font_manager._get_font.cache_clear()  # pyright: ignore[reportAttributeAccessIssue]
    return folder.curve


def draw_curve(folder: RunFolder) -> Figure:
    """Return the picture of a run.

    Raises:
        RunFolderError: the journal is damaged.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    state = folder.state()
    records, resumes = state.records, list(_resumes(state.starts))
    words, small, course = _words_of(resumes), _small_panels(records), _course_of(records)
    height = _HEIGHT + _LINE * len(words)
    below = (0.06 + _LINE * len(words)) / height
    room = ConstrainedLayoutEngine(rect=(0.0, below, 1.0, 1.0 - 0.8 / height - below), w_pad=0.11)
    figure = Figure(figsize=(_WIDTH, height), dpi=130, facecolor="white", layout=room)
    heights = [2.6, 1.15] if small else [1.0]
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    _draw_course(figure.add_subplot(rows[0]), records, course, resumes, checkpoint.steps(folder.checkpoints))
    columns = rows[len(heights) - 1].subgridspec(1, max(len(small), 1))
    for column, name in enumerate(small):
        axes = figure.add_subplot(columns[column])
        if name == TIME_PREFIX:
            _draw_time(axes, records, small[name])
        else:
            _draw_line(axes, *_series(records, name), small[name])
    _headings(figure, records, course, folder.path.name)
    for at, line in enumerate(reversed(words)):
        figure.text(0.012, (0.06 + _LINE * at) / height, line, fontsize=8, color=QUIET, parse_math=False)
    return figure


def smooth(values: Sequence[float]) -> list[float]:
    """Return a centred moving average over an eighth of the series; at the ends, of the side there is.

    >>> smooth([0.0, 3.0] * 8)[4:6]
    [2.0, 1.0]
    """
    reach = len(values) // 16
    return [finite_mean(values[max(0, at - reach) : at + reach + 1]) for at in range(len(values))]


def _resumes(starts: Sequence[RunBegan]) -> Iterator[tuple[int, list[Change]]]:
    """Yield after which step each resume begins, and which keys it has changed that the weights may depend on."""
    for before, now in itertools.pairwise(starts):
        yield now.first, [one for one in config_changes(before, now) if not is_free(one.key)]


def _words_of(resumes: Sequence[tuple[int, list[Change]]]) -> list[str]:
    """Write a line for each resume that has changed the config, the newest ones if there are many."""
    changed = [(step, keys) for step, keys in resumes if keys]
    lines = [f"resumed after step {step} with {_short(keys)}" for step, keys in changed[-MAX_RESUMES:]]
    if left := len(changed) - len(lines):
        lines.insert(0, f"{counted(left, 'earlier resume')} changed the config, too: see journal.jsonl")
    return lines


def _short(keys: Sequence[Change]) -> str:
    named = ", ".join(f"{one.key} {shown(one.of_a)} → {shown(one.of_b)}" for one in keys)
    return shorten(named, 110)


def _series(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one scalar, thinned to what a picture can show; NaN where it was not finite."""
    measured = [record for record in records if name in record]
    return (
        resample([record[STEP] for record in measured], MAX_POINTS),
        resample([record[name] for record in measured], MAX_POINTS),
    )


def _small_panels(records: Sequence[Record]) -> dict[str, str]:
    """Choose what stands below the curve: entropy, a KL, the time of a step; only what was measured."""
    names = {name for record in records for name in record}
    kl = "kl/reference_mean" if "kl/reference_mean" in names else "actor/approx_kl"
    titles = {"actor/entropy": "entropy, nats per token", kl: "reference kl, nats per token"}
    if kl == "actor/approx_kl":
        titles[kl] = "update kl, nats per token"
    chosen = {name: title for name, title in titles.items() if name in names}
    if any(name.startswith(TIME_PREFIX) for name in names):
        chosen[TIME_PREFIX] = "seconds of a step"
    return chosen


def _course_of(records: Sequence[Record]) -> _Course:
    measured = {name for record in records for name in record}
    return next((each for each in _COURSES if each.name in measured), _COURSES[0])


def _draw_course(
    axes: Axes,
    records: Sequence[Record],
    course: _Course,
    resumes: Sequence[tuple[int, list[Change]]],
    saved: Sequence[int],
) -> None:
    steps, values = _series(records, course.name)
    score_steps, scores = _series(records, course.validated)
    if not steps and not scores:
        axes.text(0.5, 0.5, "no steps yet", ha="center", va="center", color=FAINT, transform=axes.transAxes)
    if steps:
        axes.plot(steps, values, color=REWARD_LIGHT, linewidth=0.9, alpha=0.75, label=f"{course.label} of a step")
        axes.plot(steps, smooth(values), color=REWARD_LINE, linewidth=2.0, label="moving average", **_dot(steps))
    if scores:
        label = "validation loss" if course.lower_is_better else "validation score"
        dots = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.7}
        axes.plot(score_steps, scores, color=SCORE, linewidth=1.4, clip_on=False, zorder=3, label=label, **dots)
    best = _best(records, course, saved)
    if best is not None:
        style = {"marker": "*", "markersize": 13, "markeredgecolor": "white", "markeredgewidth": 0.8}
        axes.plot(*best, color=SCORE, linestyle="", clip_on=False, zorder=4, label="best checkpoint", **style)
    for is_changed, label in ((False, "resumed"), (True, "config changed")):
        places = [step + 0.5 for step, keys in resumes if bool(keys) == is_changed]
        style: dict[str, Any] = {"color": QUIET} if is_changed else {"color": FAINT, "linestyle": (0, (2, 3))}
        for place in places:
            axes.axvline(place, linewidth=0.9, zorder=1, label=label if place == places[0] else None, **style)
    axes.set_ylim(*limits([*values, *scores]))
    _tidy(axes, [*steps, *score_steps])
    axes.set_xlabel("step", color=INK, fontsize=9, loc="right", labelpad=2)
    if values or scores:
        # Above the axes: inside them it would lie over one course or another.
        legend = axes.legend(
            frameon=False,
            fontsize=8.5,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.1,
            ncols=6,
            columnspacing=1.4,
            handlelength=1.6,
            labelcolor=INK,
        )
        legend.set_in_layout(False)  # which keeps the axes as wide as the picture


def _best(records: Sequence[Record], course: _Course, saved: Sequence[int]) -> tuple[list[float], list[float]] | None:
    """Return step and validation of the best checkpoint that is there; the first of equals."""
    sign = -1.0 if course.lower_is_better else 1.0
    found = {
        record[STEP]: value for record in records if math.isfinite(value := record.get(course.validated, math.nan))
    }
    measured = [step for step in saved if step in found]
    if not measured:
        return None
    best = max(measured, key=lambda step: sign * found[step])
    return [best], [found[best]]


def _dot(steps: Sequence[float]) -> dict[str, Any]:
    """Mark a single step, which makes no line."""
    return {"marker": "o", "clip_on": False} if len(steps) == 1 else {}


def _draw_line(axes: Axes, steps: list[float], values: list[float], title: str) -> None:
    axes.plot(steps, values, color=THIRD, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth(values), color=THIRD, linewidth=1.6, **_dot(steps))
    if values and min(values) >= 0:
        axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    _tidy(axes, steps)


def _draw_time(axes: Axes, records: Sequence[Record], title: str) -> None:
    """Stack the seconds of the phases, each with its name on the right."""
    timed = [record for record in records if spans_of(record) and TIME_PREFIX + START not in record]
    phases = list(dict.fromkeys(name for record in timed for name in top_level(spans_of(record))))
    steps = resample([record[STEP] for record in timed], MAX_POINTS)
    columns = [
        smooth(resample([record.get(TIME_PREFIX + phase, 0.0) for record in timed], MAX_POINTS)) for phase in phases
    ]
    colours, totals = phase_colours(phases), dict(zip(phases, map(sum, columns), strict=True))
    # Slivers have no name: their area could not be seen, and there is room for few.
    named = sorted(phases, key=lambda phase: -totals[phase])[:MAX_PHASES]
    named = [phase for phase in named if totals[phase] >= _NAMED_SHARE * sum(totals.values())]
    if len(steps) == 1:  # an area of one step has no width
        steps, columns = [steps[0] - 0.4, steps[0] + 0.4], [column * 2 for column in columns]
    areas = axes.stackplot(steps, columns, colors=[colours[phase] for phase in phases], linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    _tidy(axes, steps)
    by_name = dict(zip(phases, areas, strict=True))
    shown_phases = [phase for phase in reversed(phases) if phase in named]
    axes.legend(
        [by_name[phase] for phase in shown_phases],
        [shorten(phase, 18) for phase in shown_phases],
        frameon=False,
        fontsize=7.5,
        loc="upper left",
        bbox_to_anchor=(1.03, 1.06),
        borderaxespad=0.0,
        handlelength=0.8,
        handleheight=0.8,
        handletextpad=0.5,
        labelspacing=0.3 if len(named) < MAX_PHASES else 0.1,
        labelcolor=INK,
    )


_NAMED_SHARE = 0.02
"""Phases with a smaller share of the time are drawn without a name."""


def _tidy(axes: Axes, steps: Sequence[float]) -> None:
    if steps:
        only = 0.5 if min(steps) == max(steps) else 0.0
        axes.set_xlim(min(steps) - only, max(steps) + only)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=0)


def _headings(figure: Figure, records: Sequence[Record], course: _Course, title: str) -> None:
    """Write the title, and below it the result in words."""
    height = figure.get_figheight()
    found = [record[course.validated] for record in records if course.validated in record]
    scores = [score for score in found if math.isfinite(score)]
    what = "validation loss" if course.lower_is_better else "validation"
    parts = [f"{what} {' → '.join(f'{scores[at]:.3f}' for at in sorted({0, len(scores) - 1}))}"] if scores else []
    if missing := len(found) - len(scores):
        parts.append(f"{counted(missing, 'validation')} without a number")
    if records:
        parts.append(f"{counted(int(records[-1][STEP]), 'step')} in {clock_time(records[-1][TIME])}")
    figure.text(0.012, 1 - 0.3 / height, title, fontsize=14, weight="bold", color=INK, parse_math=False)
    figure.text(0.012, 1 - 0.5 / height, "   ·   ".join(parts), fontsize=9.5, color=QUIET)
