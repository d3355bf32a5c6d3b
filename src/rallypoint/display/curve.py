"""The picture of a run: reward and validation score over the steps, and what went with them.

Read from the run's metrics.jsonl alone, so that it can be drawn again at any time. matplotlib is an
extra and is imported only here, inside `save_curve`, without its global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.disk import naming
from rallypoint.display.text import resample
from rallypoint.display.theme import phase_colours
from rallypoint.observability.numbers import finite_mean
from rallypoint.observability.spans import START, TIME_PREFIX, top_level
from rallypoint.run.metrics_log import STEP, TIME, read_metrics
from rallypoint.run.reports import REWARD, VALIDATION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REWARD_LIGHT, REWARD_LINE, SCORE, THIRD = "#8ecae6", "#0072b2", "#d55e00", "#009e73"
INK, FAINT = "#333333", "#b8b8b8"
MAX_POINTS = 400
"""More than this many steps are drawn as means of neighbours."""

Record = Mapping[str, float]


def save_curve(metrics_path: Path, png_path: Path, title: str) -> Path | None:
    """Draw the learning curve of a metrics file and return its path; None where matplotlib is missing.

    `reports.why_no_plot` says what to do then. A file without steps gives an empty picture that says so.

    Raises:
        DiskError: the disk is full or not writable.
    """
    try:
        from matplotlib import font_manager
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    records = read_metrics(metrics_path)
    figure = Figure(figsize=(9.0, 5.4), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    small = _small_panels(records)
    heights = [3.0, 1.15] if small else [1.0]
    grid = figure.add_gridspec(
        len(heights),
        max(len(small), 1),
        height_ratios=heights,
        hspace=0.46,
        wspace=0.24,
        left=0.05,
        right=0.89,
        top=0.85,
        bottom=0.06,
    )
    _draw_scores(figure.add_subplot(grid[0, :]), records)
    for column, name in enumerate(small):
        axes = figure.add_subplot(grid[1, column])
        if name == TIME_PREFIX:
            _draw_time(axes, records, small[name])
        else:
            _draw_line(axes, *_series(records, name), small[name])
    _headings(figure, records, title)
    part = png_path.with_name(png_path.name + ".part")
    try:
        with naming(png_path):
            figure.savefig(part, format="png")
            part.replace(png_path)
    finally:
        # matplotlib keeps the files of its fonts open, for each thread that ever drew.
        font_manager._get_font.cache_clear()  # pyright: ignore[reportAttributeAccessIssue]
    return png_path


def smooth(values: Sequence[float]) -> list[float]:
    """Return a centred moving average over an eighth of the series; at the ends, of the side there is.

    >>> smooth([0.0, 3.0] * 8)[4:6]
    [2.0, 1.0]
    """
    reach = len(values) // 16
    return [finite_mean(values[max(0, at - reach) : at + reach + 1]) for at in range(len(values))]


def _series(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one scalar where it is finite, thinned to what a picture can show."""
    points = [(record[STEP], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
    steps, values = [step for step, _ in points], [value for _, value in points]
    return resample(steps, MAX_POINTS), resample(values, MAX_POINTS)


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


_COURSES = (
    (REWARD, "reward", VALIDATION),
    ("actor/accuracy", "accuracy", VALIDATION),
    ("actor/loss", "loss", "validation/loss"),
)
"""What a run is about: the first of these that was measured, its name, and the same of a validation."""


def _draw_scores(axes: Axes, records: Sequence[Record]) -> None:
    measured = {name for record in records for name in record}
    watched, label, validated = next((each for each in _COURSES if each[0] in measured), _COURSES[0])
    steps, rewards = _series(records, watched)
    score_steps, scores = _series(records, validated if validated in measured else VALIDATION)
    if not steps and not scores:
        axes.text(0.5, 0.5, "no steps yet", ha="center", va="center", color=FAINT, transform=axes.transAxes)
    if steps:
        axes.plot(steps, rewards, color=REWARD_LIGHT, linewidth=0.9, alpha=0.75, label=f"{label} of a step")
        axes.plot(steps, smooth(rewards), color=REWARD_LINE, linewidth=2.0, label=f"{label}, moving average")
    if scores:
        axes.plot(
            score_steps,
            scores,
            color=SCORE,
            linewidth=1.4,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.7,
            clip_on=False,
            zorder=3,
            label="validation loss" if validated in measured and label == "loss" else "validation score",
        )
    values = [*rewards, *scores]
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, min(1.02, 1.1 * max(values)) or 1.02)
    _tidy(axes, [*steps, *score_steps])
    axes.set_xlabel("step", color=INK, fontsize=9, loc="right", labelpad=2)
    if values:
        # Above the axes: inside them it would lie over one course or another.
        axes.legend(
            frameon=False,
            fontsize=9,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.1,
            ncols=3,
            labelcolor=INK,
        )


def _draw_line(axes: Axes, steps: list[float], values: list[float], title: str) -> None:
    axes.plot(steps, values, color=THIRD, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth(values), color=THIRD, linewidth=1.6)
    if values and min(values) >= 0:
        axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    _tidy(axes, steps)


_NAMED_SHARE = 0.02
"""Phases with a smaller share of the time are drawn without a name."""


def _draw_time(axes: Axes, records: Sequence[Record], title: str) -> None:
    """Stack the seconds of the phases; each name stands beside them in its own colour."""
    timed = [record for record in records if any(name.startswith(TIME_PREFIX) for name in record)]
    timed = [record for record in timed if TIME_PREFIX + START not in record]
    names = dict.fromkeys(name for record in timed for name in record if name.startswith(TIME_PREFIX))
    phases = list(top_level({name.removeprefix(TIME_PREFIX): 0.0 for name in names}))
    steps = resample([record[STEP] for record in timed], MAX_POINTS)
    columns = [
        smooth(resample([record.get(TIME_PREFIX + phase, 0.0) for record in timed], MAX_POINTS)) for phase in phases
    ]
    colours = phase_colours(phases)
    axes.stackplot(steps, columns, colors=[colours[phase] for phase in phases], linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    _tidy(axes, steps)
    # Slivers have no name: their area could not be seen, and there is room for few.
    totals = {phase: sum(column) for phase, column in zip(phases, columns, strict=True)}
    named = [phase for phase in phases if totals[phase] >= _NAMED_SHARE * sum(totals.values())]
    for row, phase in enumerate(reversed(named)):
        axes.text(
            1.02,
            1.0 - 0.17 * row,
            phase,
            fontsize=7.5,
            va="top",
            color=colours[phase],
            weight="bold",
            transform=axes.transAxes,
        )


def _tidy(axes: Axes, steps: Sequence[float]) -> None:
    if steps:
        axes.set_xlim(min(steps), max(*steps, min(steps) + 1))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=0)


def _headings(figure: Figure, records: Sequence[Record], title: str) -> None:
    """Write the title, and below it the result in words."""
    _, scores = _series(records, VALIDATION)
    parts = [f"validation {scores[0]:.3f} → {scores[-1]:.3f}"] if len(scores) > 1 else []
    if records:
        parts.append(f"{records[-1][STEP]:.0f} steps in {records[-1][TIME]:.0f} s")
    figure.text(0.05, 0.945, title, fontsize=14, weight="bold", color=INK, parse_math=False)
    figure.text(0.05, 0.908, "   ·   ".join(parts), fontsize=9.5, color="#666666")
