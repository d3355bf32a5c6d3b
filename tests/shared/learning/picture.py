"""The picture of the learning suite: a panel for each algorithm, a line for each task, and where its seeds are.

matplotlib is an extra and is imported only here, inside `draw_learning`, without its global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from learning.tasks import TASKS
from learning.training import BOUND, Result
from rallypoint.disk import naming
from rallypoint.display.theme import BLUE, GREEN, ORANGE, PURPLE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = dict(zip(TASKS, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
_AXES = {
    "advantage": "Advantages",
    "loss": "Policy losses",
    "aggregation": "Aggregations",
    "correction": "Corrections (the sampler is two steps behind)",
    "kl": "KL (on the bandit, its own optimum counts)",
    "shaping": "Shaping",
}
_COLUMNS, _INK, _FAINT = 9, "#333333", "#d8d8d8"


def save_learning(results: Sequence[Result], png_path: Path) -> Path | None:
    """Draw the curves and return the path; None where matplotlib is missing.

    Raises:
        DiskError: the disk is full or not writable.
    """
    try:
        figure = draw_learning(results)
    except ImportError:
        return None
    part = png_path.with_name(png_path.name + ".part")
    with naming(png_path):
        figure.savefig(part, format="png")
        part.replace(png_path)
    return png_path


def draw_learning(results: Sequence[Result]) -> Figure:
    """Draw the curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = _rows(results)
    columns = max((len(cells) for _, cells in rows), default=1)
    figure = Figure(figsize=(15.0, 0.9 + max(3.5, 1.55 * len(rows))), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    top = 1.0 - 0.85 / figure.get_figheight()
    bottom = 0.06 if len(rows) == 1 else 0.03
    grid = figure.add_gridspec(
        len(rows),
        columns,
        left=0.03,
        right=0.99,
        top=top,
        bottom=bottom,
        hspace=0.72,
        wspace=0.16,
    )
    before = ""
    for row, (axis, cells) in enumerate(rows):
        for column, of_task in enumerate(cells):
            panel = figure.add_subplot(grid[row, column])
            _draw(panel, of_task)
            if column == 0 and axis != before:
                panel.annotate(
                    _AXES[axis],
                    (0.0, 1.0),
                    (0.0, 17.0),
                    xycoords="axes fraction",
                    textcoords="offset points",
                    fontsize=11,
                    weight="bold",
                    color=_INK,
                )
        before = axis
    lines = [Line2D([], [], color=colour, linewidth=2, label=task) for task, colour in _COLOURS.items()]
    figure.legend(handles=lines, loc="upper right", ncols=len(lines), frameon=False, fontsize=10)
    title = f"Share of the possible gain, step by step: mean and range of seeds; dotted: {BOUND}, which all must reach"
    figure.text(0.03, 1.0 - 0.3 / figure.get_figheight(), title, fontsize=12, color=_INK)
    return figure


def _rows(results: Sequence[Result]) -> list[tuple[str, list[list[Result]]]]:
    """Return the rows of the picture: an axis, and so many of its cells as there are columns, task by task."""
    rows: list[tuple[str, list[list[Result]]]] = []
    for axis in _AXES:
        by_name: dict[str, list[Result]] = {}
        for result in results:
            if result.cell.axis == axis:
                by_name.setdefault(result.cell.name, []).append(result)
        cells = list(by_name.values())
        rows += [(axis, cells[at : at + _COLUMNS]) for at in range(0, len(cells), _COLUMNS)]
    return rows


def _draw(panel: Axes, of_task: Sequence[Result]) -> None:
    for result in of_task:
        at_step, colour = list(zip(*result.curves, strict=True)), _COLOURS[result.task]
        steps, lowest, highest = range(len(at_step)), [min(x) for x in at_step], [max(x) for x in at_step]
        panel.fill_between(steps, lowest, highest, color=colour, alpha=0.2, linewidth=0)
        panel.plot(steps, [sum(x) / len(x) for x in at_step], color=colour, linewidth=1.3)
    fails, name = not all(result.verdict.passes for result in of_task), of_task[0].cell.name
    panel.axhline(BOUND, color=_INK, linewidth=0.7, linestyle=":")
    size = 8.5 if len(name) < 24 else 7
    panel.set_title(name, fontsize=size, color=VERMILION if fails else _INK, loc="left", pad=3)
    panel.set_ylim(-0.05, 1.05)
    panel.set_xlim(0, len(of_task[0].curves[0]) - 1)
    panel.set_yticks([0, 1])
    panel.tick_params(labelsize=7, colors=_INK, length=2)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(_FAINT)
